"""All code that uses Ray: sessions, the pool of workers, and the worker actor."""
