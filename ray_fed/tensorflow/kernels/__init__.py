"""Many clients' work as one graph."""
