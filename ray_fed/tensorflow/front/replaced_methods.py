"""Methods of TensorFlow's classes that are others while functions are traced.

Classes are shared by all threads: a replacement tells by its arguments whether it is
meant, and else does what the original does.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

Method: TypeAlias = Callable[..., Any]


class ReplacedMethods:
    """Puts methods into classes while any block is open, and the originals after it.

    Args:
        replacements: of a class and the name of its method, what makes the replacement
            of the original.
    """

    def __init__(
        self, replacements: Mapping[tuple[type[Any], str], Callable[[Method], Method]]
    ) -> None:
        self._replacements = replacements
        self._originals: dict[tuple[type[Any], str], Method] = {}
        self._lock = threading.Lock()
        self._open_blocks = 0

    @contextlib.contextmanager
    def replaced(self) -> Generator[None]:
        """Have the methods replaced, in all threads."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if not self._open_blocks:
                for (cls, name), make in self._replacements.items():
                    original = self._originals[cls, name] = getattr(cls, name)
                    setattr(cls, name, make(original))
            self._open_blocks += 1

    def _leave(self) -> None:
        with self._lock:
            self._open_blocks -= 1
            if not self._open_blocks:
                for (cls, name), original in self._originals.items():
                    setattr(cls, name, original)
