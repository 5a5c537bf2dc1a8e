"""Serialised graphs: read, made safe to run many times, keyed."""
