"""What runs a plan in one process: leaves, kernels, what is kept of clients."""
