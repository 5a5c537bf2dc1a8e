"""Values that travel: plain values, parts, references to clients, sequences."""
