"""What a task or a method that raised refers to, collected once Ray has it passed on.

Ray's own frames hold what it took, and the error; all of them refer to each other, and
an idle process would keep them: references of an argument, say.
"""

import gc
import threading

LEFT_S = 1.0
"""Seconds within which Ray has passed on an error."""


def collect_soon() -> None:
    """Collect everything, in a while, on a thread that ends then."""
    later = threading.Timer(LEFT_S, gc.collect)
    later.daemon = True
    later.start()
