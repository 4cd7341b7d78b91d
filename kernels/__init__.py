"""Triton kernels of lowbit: one arithmetic for every format, scheme and architecture.

``bits``, ``rng``, ``scales`` and ``tiles`` are device functions; ``codec``, ``quantize`` and ``matmul`` are kernels;
``spec`` and ``launch`` choose tiles and start kernels; ``aot`` compiles them all without a GPU. The codecs are integer
arithmetic on bit patterns, so that the interpreter (``TRITON_INTERPRET=1``) and every GPU give the same bits.

Source: docs/numerics.md.
"""
