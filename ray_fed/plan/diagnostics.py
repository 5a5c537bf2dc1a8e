"""What work tells whoever evaluates it, beside its results: as data, as it runs.

The executor that runs something worth knowing notes it in a context variable, which
follows asyncio tasks and calls to other threads; whoever evaluates a subround collects
the notes, and passes them on with the results. They become events, once a round.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator, Iterable
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Unkeyed:
    """Random ops of one computation that draw anew on every attempt.

    Attributes:
        computation: what an error would call it.
        content: starts its hash.
        ops: name and kind of each.
    """

    computation: str
    content: str
    ops: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unlowered:
    """A computation that reads its sequences through tf.data, which takes longer.

    Attributes:
        computation: what an error would call it.
        content: starts its hash.
        reason: why it cannot do without.
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


Note: TypeAlias = Unkeyed | Unlowered | Unshaped | JitDecision

_noted: contextvars.ContextVar[set[Note] | None] = contextvars.ContextVar(
    "ray_fed_notes", default=None
)


@contextlib.contextmanager
def noting() -> Generator[set[Note]]:
    """Yield a set that takes what `note` is told by the work inside."""
    noted: set[Note] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(told: Iterable[Note]) -> None:
    """Tell whoever evaluates; does nothing where nobody asked."""
    noted = _noted.get()
    if noted is not None:
        noted.update(told)


def in_order(noted: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes in an order that depends on nothing but them."""
    return tuple(sorted(noted, key=repr))
