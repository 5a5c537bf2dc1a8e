"""Experiments of papers, written as a user of ray_fed writes them.

Each module is one paper: its settings, the figures that it printed, and a function
`reproduce` that returns our figures beside them. `docs/papers.md` has the results.
"""
