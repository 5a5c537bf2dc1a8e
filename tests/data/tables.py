"""Tables of clients' rows that tests write, and what clients have in them."""

import pathlib
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

NAMES: dict[str, Any] = {"client": "who", "x": ["a", "b"], "y": "y"}
"""How `ClientData` takes what `make_table` returns."""


def write(table: Any, path: pathlib.Path, **options: Any) -> pathlib.Path:
    """Write a table to a parquet file, and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, **options)
    return path


def make_table(num_clients: int = 7) -> dict[str, Any]:
    """Return columns, sorted by client: `who`, `a` and `b` of one dtype, and `y`."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(num_clients), rng.integers(1, 9, num_clients))
    size = len(who)
    return {
        "who": who,
        "a": rng.normal(size=size).astype(np.float32),
        "b": rng.normal(size=size).astype(np.float32),
        "n": rng.integers(0, 9, size),
        "y": rng.integers(0, 5, size).astype(np.int32),
    }


def shuffled(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows in another order, those of each client in the same."""
    who = table["who"]
    order = np.random.default_rng(1).permutation(len(who))
    taken = np.zeros(len(who), np.int64)
    for client in np.unique(who):
        places = np.flatnonzero(who[order] == client)
        taken[places] = np.flatnonzero(who == client)
    return {name: column[taken] for name, column in table.items()}


def read(data: ClientData) -> dict[Any, list[Any]]:
    """Return each client's elements, as lists of flat tensors."""
    found: dict[Any, list[Any]] = {}
    for member in data:
        sequence = member.read()
        found[member.id] = [list(tensors) for tensors in sequence]
    return found


def expected(
    table: Mapping[str, Any], names: list[Any], batch_size: int | None
) -> dict[Any, list[Any]]:
    """Return what `read` should, computed by numpy.

    Args:
        table: of `make_table`.
        names: of each tensor: a column, or a list of them to stack.
        batch_size: rows of a batch.
    """
    found: dict[Any, list[Any]] = {}
    for client in np.unique(table["who"]):
        rows = np.flatnonzero(table["who"] == client)
        tensors = [
            table[name][rows]
            if isinstance(name, str)
            else np.stack([table[n][rows] for n in name], axis=1)
            for name in names
        ]
        step = batch_size or 1
        found[client] = [
            [t[i : i + step] if batch_size else t[i] for t in tensors]
            for i in range(0, len(rows), step)
        ]
    return found


def assert_same(found: dict[Any, list[Any]], wanted: dict[Any, list[Any]]) -> None:
    assert list(found) == list(wanted)
    for client, elements in wanted.items():
        assert len(found[client]) == len(elements), client
        for element, other in zip(found[client], elements, strict=True):
            np.testing.assert_equal(element, other)


BATCHES = fl.SequenceType(
    fl.StructWithPythonType(
        [
            ("x", fl.TensorType(np.float32, [None, 2])),
            ("y", fl.TensorType(np.int32, [None])),
        ],
        dict,
    )
)


def sum_over_clients(data: ClientData, zero: Any, add: Any) -> Any:
    """Return a computation that reduces each client's elements, and adds these up."""

    @rtf.computation(data.type_signature)
    def reduce(elements: Any) -> Any:
        return elements.reduce(zero, add)

    @fl.federated_computation(fl.FederatedType(data.type_signature, fl.CLIENTS))
    def total(clients: Any) -> Any:
        return fl.federated_sum(fl.federated_map(reduce, clients))

    return total
