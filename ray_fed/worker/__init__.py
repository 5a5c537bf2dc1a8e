"""The evaluation of a plan in one process, with kernels and cached client data."""
