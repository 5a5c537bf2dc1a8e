"""What lives in Ray actors: workers with TensorFlow, and the pool."""
