"""Data of clients, placed once: on the workers that need it, for as long as it fits."""

import collections
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language import structs
from ray_fed.values import plain_values
from ray_fed.values.client_references import ClientReference, ClientRun
from ray_fed.values.client_sources import FunctionSource, HeldSource
from ray_fed.values.columnar_sequence import ColumnarSequence


@dataclasses.dataclass(frozen=True, eq=False)
class ClientData(ClientRun):
    """What clients have, by reference: an argument placed at clients that stays put.

        data = ClientData.from_function(ids, read_file, dataset_type)
        state = training.next(state, data.select(["anna", "bert"]))

    A sequence of `ClientReference`s. It, a slice, a selection, or a list of its
    elements may stand wherever a value placed at clients is expected. Nothing of it is
    read on the way: each worker reads the clients that it is given, lays them out once,
    and keeps them between rounds, up to `Config.workers.client_bytes`.

    Made by `from_values` or `from_function`.

    Attributes:
        ids: one a client, in order.
    """

    ids: tuple[Hashable, ...] = ()

    @classmethod
    def from_values(
        cls,
        clients: Mapping[Any, Any] | Sequence[Any],
        type_spec: Any,
        weights: Sequence[float] | None = None,
    ) -> "ClientData":
        """Return clients whose values are at hand; they are checked now, sent once.

        Args:
            clients: value of each client by id, or a sequence of values, whose ids are
                their indices.
            type_spec: of one client's value.
            weights: what each client's work costs, finite, >= 0; None: as many as the
                elements of its sequences.

        Raises:
            ValueMismatchError: a value is not of the type.
            ConfigError: there are more or fewer weights than clients, one is not such a
                number, or ids cannot be hashed or are not distinct.
        """
        ids: list[Any]
        if isinstance(clients, Mapping):
            ids, given = list(clients.keys()), list(clients.values())
        else:
            ids, given = list(range(len(clients))), list(clients)
        member = fl.to_type(type_spec)
        held = [
            plain_values.to_plain(
                value, member, f"what the client with the id {client!r} has"
            )
            for client, value in zip(ids, given, strict=True)
        ]
        if weights is None:
            counts = [_count_elements(value) for value in held]
            weights = None if None in counts else cast("list[float]", counts)
        return cls._of(HeldSource(held), member, ids, weights)

    @classmethod
    def from_function(
        cls,
        ids: Iterable[Any],
        load: Callable[[Any], Any],
        type_spec: Any,
        weights: Sequence[float] | None = None,
    ) -> "ClientData":
        """Return clients whose values a function reads, on the worker that needs them.

        Args:
            ids: of the clients, in order.
            load: takes an id, returns what the client has: the same each time, as it is
                called again after a failure, or when what it returned was dropped. It
                is pickled.
            type_spec: of what it returns.
            weights: what each client's work costs, finite, >= 0; None: not known.

        Raises:
            ConfigError: there are more or fewer weights than clients, one is not such a
                number, or ids cannot be hashed or are not distinct.
        """
        ids, member = list(ids), fl.to_type(type_spec)
        return cls._of(FunctionSource(load, ids, member), member, ids, weights)

    @classmethod
    def _of(
        cls,
        source: HeldSource | FunctionSource,
        member: fl.Type,
        ids: Sequence[Hashable],
        weights: Sequence[float] | None,
    ) -> "ClientData":
        _check_ids(ids)
        of_clients = None if weights is None else _read_weights(weights, ids)
        positions = np.arange(len(ids), dtype=np.int64)
        return cls(source, member, positions, of_clients, tuple(ids))

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._take(range(len(self))[index])
        weight = None if self.weights is None else float(self.weights[index])
        return ClientReference(
            self.source,
            int(self.positions[index]),
            self.type_signature,
            self.ids[index],
            weight,
        )

    def select(self, ids: Iterable[Any]) -> "ClientData":
        """Return the clients of these ids, in this order; an id may stand there twice.

        Raises:
            ConfigError: there is no client of an id.
        """
        indices, wanted = self._indices, list(ids)
        unknown = [client for client in wanted if client not in indices]
        if unknown:
            raise errors.ConfigError(
                f"Expected ids of these {len(self)} clients, found {unknown[:5]}."
            )
        return self._take([indices[client] for client in wanted])

    @functools.cached_property
    def _indices(self) -> dict[Hashable, int]:
        return {client: index for index, client in enumerate(self.ids)}

    def _take(self, indices: Sequence[int]) -> "ClientData":
        taken = np.array(indices, np.int64)
        return ClientData(
            self.source,
            self.type_signature,
            self.positions[taken],
            None if self.weights is None else self.weights[taken],
            tuple(self.ids[index] for index in indices),
        )


def _check_ids(ids: Sequence[Any]) -> None:
    unhashable = [client for client in ids if not _is_hashable(client)]
    if unhashable:
        raise errors.ConfigError(
            "Expected ids that can be hashed, such as numbers, text or tuples of"
            f" these, found {structs.show(unhashable[0])}."
        )
    if len(set(ids)) < len(ids):
        ((twice, count),) = collections.Counter(ids).most_common(1)
        raise errors.ConfigError(
            "Expected an id of its own for each client, found"
            f" {structs.show(twice)} {count} times."
        )


def _is_hashable(client: object) -> bool:
    try:
        hash(client)  # a tuple may hold what cannot be hashed
    except TypeError:
        return False
    return True


def _read_weights(weights: object, ids: Sequence[Hashable]) -> NDArray[np.float64]:
    """Return one number for each client; text and truth values are none."""
    found = np.asarray(weights, object)
    if found.shape != (len(ids),):
        raise errors.ConfigError(
            f"Expected one weight for each of {len(ids)} clients, found {found.size}."
        )
    for client, weight in zip(ids, found, strict=True):
        if not _is_weight(weight):
            raise errors.ConfigError(
                "Expected finite numbers as weights, of at least 0, found"
                f" {structs.show(weight)} for the client with the id {client!r}."
            )
    return found.astype(np.float64)


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        found = float(value)
    except OverflowError:
        return False
    return math.isfinite(found) and found >= 0


def _count_elements(value: Any) -> float | None:
    """Return how many elements the sequences of a plain value have; None without."""
    if isinstance(value, ColumnarSequence):
        return float(max([value.length, *(len(c.rows) for c in value.columns)]))
    if not isinstance(value, tuple):
        return None
    counts = [_count_elements(member) for member in cast("tuple[Any, ...]", value)]
    return sum(known) if (known := [c for c in counts if c is not None]) else None
