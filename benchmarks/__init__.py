"""What ray_fed's rounds cost, beside the same work in hand-written TensorFlow."""
