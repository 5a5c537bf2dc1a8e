"""Writes, identifies and loads serialized graphs, and keys their random numbers."""
