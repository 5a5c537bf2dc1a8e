"""Values in Ray's object store."""
