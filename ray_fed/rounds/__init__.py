"""The course of one call: cut the cohort, run subrounds, merge, and finish."""
