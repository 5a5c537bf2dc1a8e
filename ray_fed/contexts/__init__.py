"""A call becomes subrounds, wherever they run."""
