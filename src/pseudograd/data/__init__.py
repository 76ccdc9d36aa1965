"""Data sets."""

from pseudograd.data.dataset import Dataset, digits

__all__ = ["Dataset", "digits"]
