"""Compiles computations: to stages whose results can be merged, and to kernels."""
