"""Where clients' values come from."""
