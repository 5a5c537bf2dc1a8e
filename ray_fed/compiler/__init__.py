"""Building blocks in, building blocks out: the mergeable form of a computation."""
