"""Reads the texts of any exception, and makes them short and possible to encode.

An error of a user's code may have a message of 50 MB, a `__str__` that raises, or lone
surrogates, which Ray cannot send.
"""

import contextlib
import os
import platform
import re
import traceback
from collections.abc import Callable, Generator

MAX_CHARACTERS = 20_000
"""Largest number of characters of a message of ray_fed, or of a traceback."""

_MAX_QUOTED = 10_000
"""Largest number of characters of another error's message in a message of ray_fed."""


def describe_process() -> str:
    """Return a text for errors that names this process and its node."""
    return f"process {os.getpid()} on node `{platform.node()}`"


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Codes for bold text and colors in a terminal, such as in messages of Keras."""


def without_escapes(text: str) -> str:
    """Remove codes for colors from a text."""
    return _ESCAPES.sub("", text)


def bound(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a text that can be encoded. A long text is cut in its middle."""
    text = without_escapes(text)
    if len(text) > max_characters:
        kept = max_characters // 2
        cut = f" ... (cut: {len(text):,} characters) ... "
        text = text[:kept] + cut + text[-kept:]
    return text.encode(errors="backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """Return the message of an error, or "no message" if it cannot be read."""
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
    """A note on an exception: the code that raised it."""

    __slots__ = ()


class _Place(str):
    """A note on an exception: the line of user code whose operation raised it."""

    __slots__ = ()


@contextlib.contextmanager
def naming_origin(origin: str, find_place: Callable[[str], str]) -> Generator[None]:
    """Note the origin of errors in the `with` block, unless they have such a note.

    `origin` is text such as "the computation `train` (model.py:12)". `find_place` takes
    an error's message. It returns a sentence on the place in the origin that the
    message names, or "".
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
    """Return the origin that `naming_origin` noted on an error, or None."""
    return _noted(error, _Origin)


def place_of(error: BaseException) -> str | None:
    """Return the place that `naming_origin` noted on an error, or None."""
    return _noted(error, _Place)


def _noted(error: BaseException, kind: type[str]) -> str | None:
    notes = getattr(error, "__notes__", ())
    return next((str(note) for note in notes if isinstance(note, kind)), None)
