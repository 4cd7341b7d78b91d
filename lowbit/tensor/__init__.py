"""Storage of low-bit numbers: packed rows, quantized tensors, and the packed layout of weights."""
