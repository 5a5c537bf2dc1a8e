"""Rewrites building blocks: mergeable forms of computations, and their kernels."""
