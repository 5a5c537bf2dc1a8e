"""Values that travel: their plain form, parts, references to clients, sequences."""
