"""What belongs to clients over rounds: in memory up to a bound, the rest in files.

    take(ids) --> values of a cohort --> process.next --> put(ids, values)

A client's value is a row of bytes of one size.
"""

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import read_whole
from ray_fed.learning.client_state_file import read_states, write_states
from ray_fed.learning.segment_files import ClientId
from ray_fed.learning.segments import Segments
from ray_fed.learning.state_rows import ClientRows

_AT_ONCE = 1000
"""Clients whose values are copied or saved at a time."""


class ClientStates:
    """Values of clients by id: numpy arrays in one structure for all of them.

    Not safe for several threads at once. Equal calls leave equal values, however much
    is in memory.

    Args:
        initial: of a client that has put none, such as
            `process.initial_client_state`.
        path: a folder for what does not fit, of any file system that fsspec knows; what
            is there from others is left alone. None: all stays in memory.
        memory_bytes: of values in memory, >= those of a cohort; Python's own objects
            come on top, about 300 bytes for each client.

    Attributes:
        max_memory_bytes: `memory_bytes`.

    Raises:
        ConfigError: `memory_bytes` is too small for a value.
    """

    def __init__(
        self, initial: Any, path: str | None = None, *, memory_bytes: int = 2**28
    ) -> None:
        self._initial = tf.nest.map_structure(np.asarray, initial)
        arrays: list[NDArray[Any]] = tf.nest.flatten(self._initial)
        self._types = [(array.dtype, array.shape) for array in arrays]
        self._sizes = [(array.size, array.nbytes) for array in arrays]
        self._nest = _build_nest(self._initial)
        self._row_bytes = sum(array.nbytes for array in arrays)
        memory_bytes = read_whole("memory_bytes", memory_bytes, 0)
        self._path, self.max_memory_bytes = path, memory_bytes
        self._max_rows = memory_bytes // max(1, self._row_bytes)
        if self._max_rows < 1:
            raise errors.ConfigError(
                f"Expected `memory_bytes` to be at least {self._row_bytes}, the"
                f" bytes of one client, found {memory_bytes}."
            )
        # A folder of its own: two may share a path.
        folder = f"{path}/client-states-{uuid.uuid4().hex}"
        made = None if path is None else Segments(folder, self._row_bytes, removes=True)
        self._segments, self._rows = made, ClientRows(self._max_rows, made)

    @override
    def __repr__(self) -> str:
        return f"<states of {len(self)} clients, {self.memory_bytes} bytes in memory>"

    def __len__(self) -> int:
        """Return how many clients have put a value."""
        return len(self._rows)

    @property
    def ids(self) -> list[ClientId]:
        """The clients that have put a value, in no order that can be relied on."""
        return self._rows.clients

    @property
    def memory_bytes(self) -> int:
        """The bytes of values that are in memory now."""
        return self._rows.num_in_memory * self._row_bytes

    def take(self, client_ids: Iterable[ClientId]) -> list[Any]:
        """Return the values of clients, in the order of their ids.

        Args:
            client_ids: any; those that put none have the initial value.

        Raises:
            StorageError: values in files cannot be read.
            SavedStateError: these are damaged.
        """
        rows = self._rows.read(list(client_ids), uses=True)
        return [self._initial if row is None else self._unpack(row) for row in rows]

    def put(self, client_ids: Sequence[ClientId], values: Sequence[Any]) -> None:
        """Keep new values of clients.

        Args:
            client_ids: each once.
            values: one for each, of the initial value's structure, dtypes and shapes.

        Raises:
            ValueMismatchError: a value is of another kind, or an id comes twice.
            CardinalityError: there is another number of values.
            StorageError: values that memory has no room for cannot be written.
        """
        if len(client_ids) != len(values):
            raise errors.CardinalityError(
                f"Expected a value for each of {len(client_ids)} clients, found"
                f" {len(values)}."
            )
        if len(set(client_ids)) != len(client_ids):
            raise errors.ValueMismatchError(
                "Expected each client once, found an id that comes twice: one of its"
                " values would be lost."
            )
        rows = [self._pack(value) for value in values]  # all are checked first
        self._rows.put(list(zip(client_ids, rows, strict=True)))

    def emptied(self, initial: Any) -> "ClientStates":
        """Return another one without values, within the same bounds.

        Args:
            initial: its clients' initial value.

        Raises:
            ValueMismatchError: it is of another structure, dtype or shape than those of
                these clients.
        """
        self._pack(initial)
        return ClientStates(initial, self._path, memory_bytes=self.max_memory_bytes)

    def fill_from(self, other: "ClientStates") -> None:
        """Put all values that another one has."""
        for ids in _chunks(other.ids):
            self.put(ids, other.take(ids))

    def save(self, path: str) -> None:
        """Write all values to one file, which is there whole or not at all.

        Args:
            path: of any file system that fsspec knows.

        Raises:
            StorageError: it cannot be written.
        """
        clients = sorted(self.ids, key=lambda client: (str(type(client)), client))
        rows = (
            row
            for ids in _chunks(clients)
            for row in self._rows.read(ids, uses=False)
            if row is not None
        )
        write_states(path, self._described, clients, rows)

    @classmethod
    def load(
        cls,
        saved: str,
        initial: Any,
        path: str | None = None,
        *,
        memory_bytes: int = 2**28,
    ) -> Self:
        """Return the values that `save` wrote.

        Args:
            saved: path that they were saved to.
            initial: as when they were saved.
            path: as of the class.
            memory_bytes: as of the class.

        Raises:
            StorageError: the file cannot be read.
            SavedStateError: it is damaged, or of other values.
        """
        states = cls(initial, path, memory_bytes=memory_bytes)
        for row in read_states(saved, states._described, states._row_bytes):
            states._rows.put([row])
        return states

    @property
    def _described(self) -> list[Any]:
        """The types, as JSON has them."""
        return [[dtype.str, list(shape)] for dtype, shape in self._types]

    def close(self) -> None:
        """Remove what was written for want of memory."""
        if self._segments:
            self._segments.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pack(self, value: Any) -> bytes:
        try:
            tf.nest.assert_same_structure(self._initial, value)
        except (ValueError, TypeError) as error:
            raise errors.ValueMismatchError(
                "Expected a value of the structure of the initial one,"
                f" {errors.describe(self._initial)}, found {errors.describe(value)}."
            ) from error
        arrays = [np.asarray(array) for array in tf.nest.flatten(value)]
        found = [(array.dtype, array.shape) for array in arrays]
        if found != self._types:
            raise errors.ValueMismatchError(
                f"Expected arrays of dtypes and shapes {self._types}, found {found}."
            )
        return b"".join(array.tobytes() for array in arrays)

    def _unpack(self, row: bytes) -> Any:
        arrays: list[NDArray[Any]] = []
        start = 0
        for (dtype, shape), (count, num_bytes) in zip(
            self._types, self._sizes, strict=True
        ):
            arrays.append(np.frombuffer(row, dtype, count, start).reshape(shape))
            start += num_bytes
        return self._nest(arrays)


def _build_nest(initial: Any) -> Callable[[list[NDArray[Any]]], Any]:
    """Return what packs arrays into the structure of a value."""
    if type(initial) in (list, tuple) and not any(map(tf.nest.is_nested, initial)):
        return type(initial)  # takes a fiftieth of the time
    return functools.partial(tf.nest.pack_sequence_as, initial)


def _chunks(clients: Sequence[ClientId]) -> Iterator[Sequence[ClientId]]:
    for start in range(0, len(clients), _AT_ONCE):
        yield clients[start : start + _AT_ONCE]
