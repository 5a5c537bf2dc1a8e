"""The work of a worker, as plain data: the merge tree, random keys, diagnostics."""
