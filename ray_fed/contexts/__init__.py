"""The contexts that run calls as subrounds, on Ray or on threads."""
