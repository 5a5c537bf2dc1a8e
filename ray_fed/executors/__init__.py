"""Executors, and the interface of the strategies over them."""
