"""How low-bit numbers lie in memory."""
