"""The forms in which values are checked, sent between processes and stored."""
