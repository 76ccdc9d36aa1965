"""Data sets: tables, arrays, images and the benchmark sets."""

from pseudograd.data.arrays import images, open_arrays
from pseudograd.data.benchmarks import data_folder, fetch, load, variant
from pseudograd.data.dataset import Dataset, digits
from pseudograd.data.encoder import Encoder
from pseudograd.data.table import load_table, open_data, read_frame, read_rows

__all__ = [
    "Dataset",
    "Encoder",
    "data_folder",
    "digits",
    "fetch",
    "images",
    "load",
    "load_table",
    "open_arrays",
    "open_data",
    "read_frame",
    "read_rows",
    "variant",
]
