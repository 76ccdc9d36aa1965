"""Data sets."""

from pseudograd.data.dataset import Dataset, digits
from pseudograd.data.table import Encoder, load_table, open_data, read_frame

__all__ = ["Dataset", "Encoder", "digits", "load_table", "open_data", "read_frame"]
