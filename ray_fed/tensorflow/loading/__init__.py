"""Computations as functions of tensors, as the leaf executor calls them."""
