"""Codes and scales of a weight without data: candidates for the scale of a block, and the rules made of them."""

from lowbit.datafree.methods import DATA_FREE, DEFAULT, DataFreeMethod, default_data_free, find_data_free

__all__ = ["DATA_FREE", "DEFAULT", "DataFreeMethod", "default_data_free", "find_data_free"]
