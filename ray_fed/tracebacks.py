"""Shortens tracebacks of errors to the frames of the user's code.

The functions that a user calls are decorated with `shorten`. It removes the frames of
ray_fed, of its dependencies and of Python from errors and their causes. The whole
traceback goes to the log (DEBUG). With `RAY_FED_TRACEBACKS=full` in the environment,
the whole traceback is shown.
"""

import functools
import inspect
import itertools
import linecache
import logging
import os
import pathlib
import re
import textwrap
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.tff_names as tff_names

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

VARIABLE = "RAY_FED_TRACEBACKS"
"""Environment variable that is read when an error is shown. "full" shows all frames."""

GRAPH_CACHE = "RAY_FED_GRAPH_CACHE"
"""Environment variable with the folder of `tensorflow.graphs.kept_graphs`."""

_HOW = f"{VARIABLE}=full shows the frames that are left out."
_NO_FRAME = f"  no frame of your code: {VARIABLE}=full shows all"
_CELL = "<cell>"

_logger = logging.getLogger(__name__)

_OWN = f"{pathlib.Path(__file__).parent}{os.sep}"
_PACKAGES = (
    "ray_fed|federated_language|tensorflow|keras|ray|absl|aiobotocore|botocore|fsspec"
    "|google|numpy|pandas|pyarrow|pydantic|s3fs|wrapt|yaml"
)
_LIBRARY = re.compile(
    rf"[/\\](site|dist)-packages[/\\]({_PACKAGES})[/\\]"
    r"|[/\\]lib[/\\]python3\.\d+[/\\](?!(site|dist)-packages)"
    rf"|^(python[/\\])?({_PACKAGES})[/\\].+\.p(yx|x[di])$"  # of Cython
    r"|^<frozen |__autograph_generated_file"
)
"""Paths of files of ray_fed's dependencies and of Python. Others may be the user's."""

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)(, in (?P<name>.+))?$')


_LOADED = re.compile(
    r'^Detected at node .+ defined at \(most recent call last\):\n(  File ".+\n.*\n)*',
    re.MULTILINE,
)
"""Part of TensorFlow's messages that tells where a graph was loaded in ray_fed."""


class Frame(NamedTuple):
    """A frame in the text of a traceback.

    Attributes:
        file: Path of the file.
        line: Number of the line.
        name: Name of the function.
        source: Text of the line, or "" if it is not known.
    """

    file: str
    line: int
    name: str
    source: str


def is_own(file: str) -> bool:
    """Return whether a file belongs to ray_fed."""
    return file.startswith(_OWN)


def is_of_user(file: str) -> bool:
    """Return whether a file may be the user's, because no known library has it."""
    return not (is_own(file) or _LIBRARY.search(file))


def user_frames(text: str) -> list[Frame]:
    """Return the frames of the user's code in a traceback's text, without repeats."""
    lines = _LOADED.sub("", text).splitlines()
    found: dict[Frame, None] = {}
    for line, after in itertools.pairwise([*lines, ""]):
        matched = _FRAME.match(line)
        if matched and is_of_user(matched["file"]):
            file, number = matched["file"], int(matched["line"])
            is_source = _indent(after) > _indent(line)
            # A worker knows no text of a notebook's cell; this process may.
            source = after if is_source else linecache.getline(file, number)
            name = (matched["name"] or "").rstrip(" *")
            found[Frame(file, number, name, source.strip())] = None
    return list(found)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def short_file(file: str) -> str:
    """Return the name of a file in messages, the last part of its path."""
    if file.startswith("<"):  # <stdin>, <string>
        return file
    return _CELL if _is_cell(file) else pathlib.PurePath(file).name


def _is_cell(file: str) -> bool:
    """Return whether a file is a notebook's cell, named by a hash of its text."""
    return pathlib.PurePath(file).parent.name.startswith("ipykernel_")


def find_place(text: str) -> str:
    """Return a sentence that names the user's line in a traceback's text, or ""."""
    frames = user_frames(text)
    if not frames:
        return ""
    frame = frames[-1]
    return f"At {short_file(frame.file)}:{frame.line}, in `{frame.name}`."


class WorkerTraceback(Exception):  # noqa: N818 (a cause, shown in tracebacks)
    """The cause of an error that came from a worker: its traceback there.

    The argument is the whole text. Only frames of the user's code are shown.
    """

    @override
    def __str__(self) -> str:
        return f"on the worker:\n{_show_frames(self.args[0]) or _NO_FRAME}"


def _show_frames(text: str) -> str:
    if shows_all() or not any(map(_FRAME.match, text.splitlines())):
        return text
    shown: list[str] = []
    for file, line, name, source in user_frames(text):
        shown += [
            f'  File "{_CELL if _is_cell(file) else file}", line {line}, in {name}'
        ]
        shown += [f"    {source}"] if source else []
    return "\n".join(shown)


def shows_all() -> bool:
    """Return whether the user asks for all frames."""
    return os.environ.get(VARIABLE) == "full"


def shorten(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that its errors have no frames of libraries.

    Errors are shortened only if the user's code makes the call. Errors of a coroutine
    are always shortened, because any event loop may run it. If the call has names of
    arguments that only TensorFlow Federated has, the TypeError says what to pass.
    """
    if inspect.iscoroutinefunction(function):
        return cast("Callable[_P, _R]", _shorten_async(cast("Any", function)))

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            advice = isinstance(error, TypeError) and tff_names.explain(
                function, kwargs
            )
            if advice:
                error.args = (advice,)
            # If autograph is the caller, it needs its own frames in the error.
            if _is_called_by_user():
                _cut(error)
            raise  # a bare `raise` adds no frame: none of this function is shown

    return call


def shorten_init(cls: type[_T]) -> type[_T]:
    """Decorate a class so that `shorten` applies to its constructor."""
    cls.__init__ = shorten(cls.__init__)
    return cls


def _shorten_async(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            _cut(error)
            raise

    return call


def _is_called_by_user() -> bool:
    frame = inspect.currentframe()
    for _ in range(2):  # the function that asks, then what called that
        frame = frame and frame.f_back
    return frame is not None and is_of_user(_file_of(frame))


def _file_of(frame: types.FrameType) -> str:
    file = frame.f_code.co_filename
    return (file == "<string>" and frame.f_globals.get("__file__")) or file


def _cut(error: BaseException) -> None:
    """Remove frames of libraries from the tracebacks of an error and its causes."""
    if shows_all():
        return
    walked = list(traceback.walk_tb(error.__traceback__))
    if walked and not is_of_user(_file_of(walked[-1][0])):
        _tell_how_to_see_all(error)
    _logger.debug("The whole traceback of an error:", exc_info=error)
    chain: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        raised = pending.pop()
        if raised is None or id(raised) in chain:
            continue
        chain[id(raised)] = raised
        raised.__traceback__ = _of_user(raised.__traceback__)
        if any(isinstance(arg, str) and "\x1b[" in arg for arg in raised.args):
            raised.args = tuple(
                error_texts.without_escapes(arg) if isinstance(arg, str) else arg
                for arg in raised.args
            )
        _cut_autograph(raised)
        cause = raised.__cause__
        if isinstance(cause, WorkerTraceback) and not _show_frames(cause.args[0]):
            raised.__cause__ = None  # it would show nothing
        pending += [raised.__cause__, raised.__context__]
    for raised in chain.values():
        context = raised.__context__
        if context is not None and context.__traceback__ is None:
            raised.__suppress_context__ = True  # it came up inside of a library


def _cut_autograph(error: BaseException) -> None:
    """Move the message of an autograph error before its list of frames."""
    text = error.args[0] if error.args else None
    if not (isinstance(text, str) and text.startswith("in user code:\n")):
        return
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if _FRAME.match(line) or not i)
    # After a frame, its source, and an empty line.
    said = textwrap.dedent("\n".join(lines[last + 2 :])).strip()
    said = said.removeprefix(f"{type(error).__name__}: ")
    error.args = ("\n".join(filter(None, [said, _show_frames(text)])), *error.args[1:])


def _tell_how_to_see_all(error: BaseException) -> None:
    """Note on an error of a library how to see all frames. ray_fed's need no note."""
    is_own_class = type(error).__module__.startswith("ray_fed.")
    is_said = _HOW in getattr(error, "__notes__", ())
    if isinstance(error, Exception) and not is_own_class and not is_said:
        error.add_note(_HOW)


def _of_user(found: types.TracebackType | None) -> types.TracebackType | None:
    short = None
    for frame, line in reversed(list(traceback.walk_tb(found))):
        if is_of_user(_file_of(frame)):
            short = types.TracebackType(short, frame, frame.f_lasti, line)
    return short
