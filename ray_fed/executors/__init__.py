"""Executors, the strategies over them, and the stacks that they form."""
