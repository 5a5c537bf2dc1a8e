"""Ray as a subround's task uses it: leased workers, and executors on them."""
