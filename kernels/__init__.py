"""Triton kernels of lowbit: one arithmetic for every format, scheme and architecture.

``bits``, ``rng``, ``scales``, ``tiles`` and ``patches`` are device functions; ``codec``, ``quantize``, ``weight_only``,
``integers``, ``scaled``, ``grouped`` and ``conv`` are kernels; ``spec``, ``launch``, ``operands``, ``products``,
``scaled_products`` and ``convolutions`` choose tiles, ``start`` starts kernels; ``aot`` compiles them all without a
GPU. The codecs are integer arithmetic on bit patterns, so that the interpreter (``TRITON_INTERPRET=1``) and every GPU
give the same bits.

Source: docs/numerics.md.
"""
