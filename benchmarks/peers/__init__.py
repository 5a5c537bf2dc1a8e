"""The same rounds with other libraries, each in an environment of its own.

`python -m benchmarks.peers` is the command. Modules `with_...` are run by the Python of
a peer, where there is no ray_fed: they, and what they import of `benchmarks`, need that
peer and numpy alone.
"""
