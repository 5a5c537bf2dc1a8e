"""Data in files as values of computations."""
