"""Values that travel: plain values, components, references to clients, sequences."""
