"""Texts of errors that any exception has, and that any machine takes.

An error of a user's code may have a message of 50 MB, one with lone surrogates, which
no message of Ray's can carry, or one whose `__str__` raises. What ray_fed tells of such
an error is of bounded length, and can be encoded.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Generator

MAX_CHARACTERS = 20_000
"""Characters of a message of ray_fed, or of a traceback."""

_MAX_QUOTED = 10_000
"""Characters of another error's message in one of ray_fed."""


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""What a terminal shows as bold or colours, as in messages of Keras."""


def without_escapes(text: str) -> str:
    """Return a text as it is read: without what terminals take for colours."""
    return _ESCAPES.sub("", text)


def bound(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a text that can be encoded, cut in its middle if it is long."""
    text = without_escapes(text)
    if len(text) > max_characters:
        kept = max_characters // 2
        cut = f" ... (cut: {len(text):,} characters) ... "
        text = text[:kept] + cut + text[-kept:]
    return text.encode(errors="backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """Return the message of an error; "no message" if it has none that can be read."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 (`__str__` of any class)
        message = ""
    return bound(message, _MAX_QUOTED) or "no message"


def summarize(error: BaseException) -> str:
    """Return the class of an error and its message."""
    return f"{type(error).__name__}: {message_of(error)}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, with its causes."""
    return bound("".join(traceback.format_exception(error)))


class _Origin(str):
    """A note on an exception: what raised it."""

    __slots__ = ()


class _Place(str):
    """A note on an exception: which line of the user's code made what raised it."""

    __slots__ = ()


@contextlib.contextmanager
def naming_origin(origin: str, find_place: Callable[[str], str]) -> Generator[None]:
    """Note on what is raised inside what raised it, unless that is noted already.

    Args:
        origin: such as "the computation `train` (model.py:12)".
        find_place: returns a sentence on the place in it that a message names, or "".
    """
    try:
        yield
    except Exception as error:
        if origin_of(error) is None:
            error.add_note(_Origin(origin))
            place = find_place(message_of(error))
            if place:
                error.add_note(_Place(place))
        raise


def origin_of(error: BaseException) -> str | None:
    """Return what `naming_origin` noted on an error; None for another one."""
    return _noted(error, _Origin)


def place_of(error: BaseException) -> str | None:
    """Return the place that `naming_origin` noted on an error; None if it has none."""
    return _noted(error, _Place)


def _noted(error: BaseException, kind: type[str]) -> str | None:
    notes = getattr(error, "__notes__", ())
    return next((str(note) for note in notes if isinstance(note, kind)), None)
