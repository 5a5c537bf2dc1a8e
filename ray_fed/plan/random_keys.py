"""Keys of random numbers: each evaluation of a user's function has a key of its own.

    (seed, invocation, client, path of names, steps)      ->  the state of a random op

    map           client index
    accumulate    client index, and the step ("accumulate",)
    merge         the step ("merge", first leaf, one past the last leaf)
    sequences     the step ("sequence_map", element), or ("sequence_reduce", element)
    select        client index, and the step ("select", key)
    the rest      the path alone: zero, report, and other work at the server

The executor that calls a function sets the key in a context variable, which asyncio
tasks and calls on other threads inherit. The executor that runs TensorFlow reads the
key. So the same work draws the same numbers on each attempt and machine. It draws other
numbers if the seed, the call, the client, the place in the computation or the step
differs.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import os
from collections.abc import Generator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

STATE_SIZE = 3
"""Number of int64 words in a Philox state: two for the counter, one for the key."""

_OP_NAME_PARTS = (
    b"FractionalAvgPool", b"FractionalMaxPool", b"Multinomial", b"NonDeterministic",
    b"Random", b"RecordInput", b"Sampl", b"SeedGenerator", b"Shuffle",
    b"TruncatedNormal",
)  # fmt: skip
"""Parts of names. The name of each TensorFlow op that draws contains one of them."""

Step: TypeAlias = tuple[str | int, ...]
"""The role of a function, such as "merge", and the indices of one of its calls."""


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """Everything that decides the random numbers of some work, except the op itself.

    Attributes:
        seed: Seed of the configuration.
        invocation: Number of calls of the context before this one.
        first_client: Index in the cohort of the first client of this work.
        client: Index of the client in the cohort, or None for work without clients.
        path: Names of the locals that are being evaluated, outermost first. A local is
            a named value in the body of a computation.
        steps: For each function that is called several times for a client, its role and
            the index of the call, outermost first.
        dropped: Clients of the cohort that take no part after a failure, in order. The
            index `first_client` does not count them.
    """

    seed: int
    invocation: int
    first_client: int = 0
    client: int | None = None
    path: tuple[str, ...] = ()
    dropped: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()

    def in_cohort(self, client: int) -> int:
        """Return the cohort index of a client, by its index without dropped clients."""
        for dropped in self.dropped:
            client += dropped <= client
        return client

    def state(self, content: bytes) -> NDArray[np.int64]:
        """Return the state of the random op that `content` identifies, i64[3]."""
        fields = (self.seed, self.invocation, self.client, self.path, *self.steps)
        digest = hashlib.sha256(repr(fields).encode() + content).digest()
        return np.frombuffer(digest, np.int64)[:STATE_SIZE]


_current: contextvars.ContextVar[DrawKey | None] = contextvars.ContextVar(
    "ray_fed_draws", default=None
)


def current() -> DrawKey | None:
    """Return the random key of the work that runs here, or None outside of work."""
    return _current.get()


def may_draw(computation: bytes) -> bool:
    """Return False if a serialized computation certainly draws no random numbers.

    The result is also True if the bytes contain the name of a random op by chance.
    """
    return any(name in computation for name in _OP_NAME_PARTS)


def current_or_random() -> DrawKey:
    """Return the key of the running work, or a random key if there is none.

    Pass this key to work that may be repeated, so that it draws the same numbers again.
    """
    return current() or DrawKey(int.from_bytes(os.urandom(8)), 0)


def state(content: bytes, path: tuple[str, ...] = ()) -> NDArray[np.int64]:
    """Return the state of a random op in the running work, i64[3].

    The state is random if the work has no key. `content` identifies the op. `path` has
    the names of locals inside the running work.
    """
    key = current()
    if key is None:
        return np.frombuffer(os.urandom(8 * STATE_SIZE), np.int64)
    return dataclasses.replace(key, path=(*key.path, *path)).state(content)


@contextlib.contextmanager
def using(key: DrawKey | None) -> Generator[None]:
    """Set the key of the work in the `with` block."""
    token = _current.set(key)
    try:
        yield
    finally:
        _current.reset(token)


def at_client(position: int) -> contextlib.AbstractContextManager[None]:
    """Key the `with` block as work of a client, counted from `first_client`."""
    key = current()
    if key is not None:
        client = key.in_cohort(key.first_client + position)
        key = dataclasses.replace(key, client=client)
    return using(key)


def at_step(function: str, *indices: int) -> contextlib.AbstractContextManager[None]:
    """Key the `with` block as one of several calls of a function.

    `function` is the role: "accumulate", "merge", "select", "sequence_map" or
    "sequence_reduce". `indices` identify the call, in addition to client and path.
    """
    key = current()
    if key is not None:
        key = dataclasses.replace(key, steps=(*key.steps, (function, *indices)))
    return using(key)


def at_leaf(first_client: int) -> contextlib.AbstractContextManager[None]:
    """Key the `with` block as the work of a leaf, whose first client has this index."""
    key = current()
    if key is not None:
        key = dataclasses.replace(key, first_client=first_client)
    return using(key)


def at_local(name: str) -> contextlib.AbstractContextManager[None]:
    """Key the `with` block as the value of a local or an operand, by its name."""
    key = current()
    if key is not None:
        key = dataclasses.replace(key, path=(*key.path, name))
    return using(key)
