"""Describes the work of a worker as data: plans, merge tree, random keys and notes."""
