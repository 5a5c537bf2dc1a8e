"""Building blocks of computations and their types: parsed, written, checked."""
