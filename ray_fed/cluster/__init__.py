"""Ray: sessions, the pool, and everything that runs on other processes."""
