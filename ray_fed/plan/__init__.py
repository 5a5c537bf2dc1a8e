"""What a worker is to run, as plain data: the merge tree, random keys, diagnostics."""
