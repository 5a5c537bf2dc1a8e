"""Which worker runs what: pure decisions, no Ray."""
