"""One call becomes plans: cut, run in subrounds, merged, finished."""
