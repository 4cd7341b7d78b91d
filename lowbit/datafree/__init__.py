"""Data-free quantization methods for weights."""

from lowbit.datafree.methods import DATA_FREE, DEFAULT, DataFreeMethod, default_data_free, find_data_free

__all__ = ["DATA_FREE", "DEFAULT", "DataFreeMethod", "default_data_free", "find_data_free"]
