"""Notes that work leaves as it runs, beside its results, for the reports of its round.

An executor adds notes to a set in a context variable, which follows asyncio tasks and
calls to other threads. The function that evaluates a subround collects them with
`noting` and returns them with the results. Each becomes one event of the round.
"""

import contextlib
import contextvars
import dataclasses
import traceback
import types
from collections.abc import Generator, Iterable
from typing import TypeAlias

import ray_fed.error_texts as error_texts

_OF_DEFECTS = AttributeError, AssertionError, LookupError, NameError


@dataclasses.dataclass(frozen=True)
class Unkeyed:
    """Random ops of one computation that draw anew on every attempt.

    Attributes:
        computation: its name and line, as an error shows them.
        content: the first characters of its hash.
        ops: name and kind of each.
    """

    computation: str
    content: str
    ops: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unlowered:
    """A computation that reads its sequences through tf.data, which takes longer.

    Attributes:
        computation: its name and line, as an error shows them.
        content: the first characters of its hash.
        reason: why tf.data is needed, in a few words.
    """

    computation: str
    content: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Unshaped:
    """Why XLA does not compile some work, or not several clients of it run at once.

    Attributes:
        reason: in a few words.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class JitDecision:
    """Which way some leaves of a kernel ran with `kernels.jit="auto"`, and why.

    Attributes:
        jit: whether XLA compiled them.
        reason: in a few words.
    """

    jit: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """Work that executors did step by step, because its graph raised an error.

    Attributes:
        work: what the graph was to do, in a few words.
        reason: the class of the error, and the first line of its message.
    """

    work: str
    reason: str

    @classmethod
    def of(cls, work: str, error: BaseException) -> "Interpreted":
        """Return the note about work whose graph raised an error.

        Raises:
            Exception: the error itself, where it tells of a mistake in ray_fed.
        """
        if is_defect(error):
            raise error
        return cls(work, first_line(error))


Note: TypeAlias = Unkeyed | Unlowered | Unshaped | JitDecision | Interpreted

_noted: contextvars.ContextVar[set[Note] | None] = contextvars.ContextVar(
    "ray_fed_notes", default=None
)


@contextlib.contextmanager
def noting() -> Generator[set[Note]]:
    """Yield a set to which `note` adds what it is given inside the `with` block."""
    noted: set[Note] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(told: Iterable[Note]) -> None:
    """Add notes to the innermost `noting`; outside of one, do nothing."""
    noted = _noted.get()
    if noted is not None:
        noted.update(told)


def in_order(noted: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes sorted by their content."""
    return tuple(sorted(noted, key=repr))


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return error_texts.summarize(error).partition("\n")[0]


def is_defect(error: BaseException) -> bool:
    """Return whether an error tells of a mistake in ray_fed, and of nothing else.

    True for an AttributeError, a failed assertion and their like that a line of ray_fed
    raised. A user's function or graph, and TensorFlow, raise such errors in lines of
    their own. TensorFlow may raise one again, as another object of the same class.
    """
    found: BaseException | None = error
    while isinstance(found, _OF_DEFECTS):
        frames = list(traceback.walk_tb(found.__traceback__))
        if frames and _is_of_ray_fed(frames[-1][0]):
            return True
        found = found.__cause__ or found.__context__
    return False


def _is_of_ray_fed(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("ray_fed.")
