"""Serialized graphs: how they are written, identified, loaded and keyed."""
