"""How low-bit numbers lie in memory: packed rows, codes with their scales, and the packed layout of weights."""
