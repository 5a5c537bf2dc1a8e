"""Python functions become TensorFlow computations."""
