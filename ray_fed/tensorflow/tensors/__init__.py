"""Converts types and datasets of TensorFlow, and sets up its devices."""
