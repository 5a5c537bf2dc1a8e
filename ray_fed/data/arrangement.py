"""How a client's rows become the elements of its sequence.

    rows -> hold_out_rows -> take -> shuffle, in each epoch -> batch -> elements

Each step is a method of `ClientData`. Steps run in this order, whatever the order of
the calls. A worker runs them before the client's work. Rows are NumPy columns, so each
step is indexing. A worker caches a client's rows, but not the result of the steps.
"""

import dataclasses
import hashlib
import itertools
import math
import numbers
import uuid
from collections.abc import Hashable, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language.structs import Plain
from ray_fed.language.type_checks import read_whole
from ray_fed.plan import random_keys
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource
from ray_fed.values.columnar_sequence import Column, ColumnarSequence, lay_column
from ray_fed.values.tensor_structures import (
    batch_type,
    flatten_type,
    storage_dtype,
)


def seed_of(*fields: object) -> int:
    """Return a random seed that is the same for equal `fields` in every process."""
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:16])


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the two parts that `hold_out_rows` divides a client's rows into.

    Attributes:
        fraction: Fraction of the rows that is held out, above 0 and below 1.
        seed: Seed of the random choice of these rows, >= 0. If None, the last rows are
            held out.
        is_held_out: Whether this part has the held-out rows. If not, it has the others.
    """

    fraction: float
    seed: int | None
    is_held_out: bool

    def rows(self, client: Hashable, count: int) -> NDArray[np.int64]:
        """Return the indices, ascending, of the client's `count` rows in this part."""
        num_held = round(self.fraction * count)
        if self.seed is None:
            held = np.arange(count - num_held, count)
        else:
            generator = np.random.default_rng(seed_of("part", self.seed, client))
            held = generator.permutation(count)[:num_held]
        if self.is_held_out:
            return np.sort(held)
        return np.setdiff1d(np.arange(count), held)


def check_fraction(fraction: float, seed: int) -> None:
    """Raise ConfigError unless 0 < `fraction` < 1 and `seed` is a whole number >= 0."""
    if not isinstance(cast("object", fraction), numbers.Real) or not 0 < fraction < 1:
        raise errors.ConfigError(
            f"Expected a `fraction` above 0 and below 1, found {fraction!r}."
        )
    read_whole("seed", seed, 0)


_INDEX_BYTES = 8
"""Bytes that each row takes in the array of row indices."""


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The steps from rows to elements that a user chose, the same for all clients.

    Attributes:
        parts: Parts that `hold_out_rows` chose, one for each call. Each part divides
            the rows of the previous part.
        take: Number of rows to use at most, from the first row on. None uses all rows.
        shuffles: Whether rows have a new random order in each call and epoch.
        seed: Seed of the random order, >= 0. If None, the seed of `Config` is used.
        epochs: Number of passes over the rows, >= 1.
        batch_size: Number of rows in an element. None makes each row an element.
        drop_remainder: Whether to leave out a smaller batch at the end of an epoch.
    """

    parts: tuple[Part, ...] = ()
    take: int | None = None
    shuffles: bool = False
    seed: int | None = None
    epochs: int = 1
    batch_size: int | None = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        for name in ("take", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None:
                read_whole(name, value, 1)

    def describe(self) -> dict[str, Any]:
        """Return the steps as JSON values, by the names of the `ClientData` methods."""
        seed = "the seed of the configuration" if self.seed is None else self.seed
        parts = [
            [
                part.fraction,
                "last" if part.seed is None else part.seed,
                part.is_held_out,
            ]
            for part in self.parts
        ]
        return {
            "hold_out_rows": parts,
            "take": self.take,
            "shuffle": seed if self.shuffles else None,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "drop_remainder": self.drop_remainder,
        }

    def element_type(self, row: fl.Type) -> fl.Type:
        """Return the type of one element, a batch or a row, given the type of a row."""
        if self.batch_size is None:
            return row
        return batch_type(row)

    def weigh(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many rows each client works on in all epochs, f64[clients].

        `rows` has the number of rows in each client's data, f64[clients].
        """
        for part in self.parts:
            held = np.round(part.fraction * rows)  # as `round` does in `Part.rows`
            rows = held if part.is_held_out else rows - held
        if self.take is not None:
            rows = np.minimum(rows, self.take)
        return rows * self.epochs


class ArrangedSource(ClientSource):
    """A source that applies an `Arrangement` to the clients' rows in the source `base`.

    `row_weights` has the numbers of rows of the clients in `base`, by position, or is
    None if they are not known. Workers do not receive it.
    """

    is_resident = True

    def __init__(
        self,
        base: ClientSource,
        ids: Sequence[Hashable],
        row: fl.Type,
        arrangement: Arrangement,
    ) -> None:
        self.token = uuid.uuid4().hex
        self._types = flatten_type(row)
        self.base: ClientSource | None = base
        self.rows = base
        self.ids = ids
        self.row = row
        self.arrangement = arrangement
        self.row_weights: list[float] | None = None

    @override
    def describe(self) -> dict[str, Any]:
        return {**self.rows.describe(), **self.arrangement.describe()}

    @override
    def over(self, base: ClientSource) -> "ArrangedSource":
        made = ArrangedSource(base, self.ids, self.row, self.arrangement)
        made.token = self.token
        return made

    @override
    def occasion(self) -> Hashable:
        if not self.arrangement.shuffles:
            return self.rows.occasion()
        key = random_keys.current()
        return (0, 0) if key is None else (key.seed, key.invocation)

    @override
    def arrange(self, value: Plain, position: int) -> Plain:
        rows: ColumnarSequence = value
        client, declared = self.ids[position], self.arrangement
        kept = self._kept(client, rows.length)
        epochs = self._count_epochs(client, rows, len(kept))
        order = self._order(client, rows.length, kept, epochs)
        if declared.batch_size is None:
            found = order if order is not None else np.arange(rows.length)
            columns = [_gather(column, order) for column in rows.columns]
            return ColumnarSequence(tuple(columns), len(found))
        length = rows.length if order is None else len(order)
        splits, whole = self._batches(length, epochs)
        if whole is not None:
            order = np.arange(length)[whole] if order is None else order[whole]
        columns = [
            self._batched(column, order, splits, tensor, client)
            for column, tensor in zip(rows.columns, self._types, strict=True)
        ]
        return ColumnarSequence(tuple(columns), len(splits) - 1)

    def _kept(self, client: Hashable, count: int) -> NDArray[np.int64]:
        rows = np.arange(count)
        for part in self.arrangement.parts:
            rows = rows[part.rows(client, len(rows))]
        return rows[: self.arrangement.take]

    def _count_epochs(
        self, client: Hashable, rows: ColumnarSequence, num_kept: int
    ) -> int:
        """Return the number of epochs, or 1 if the client has no rows.

        Raises ValueMismatchError if the rows of all epochs take more bytes than a
        sequence may.
        """
        epochs, limit = self.arrangement.epochs, read_limits.limits()
        if epochs == 1 or not num_kept:
            return 1
        row_bytes = rows.num_bytes / rows.length + _INDEX_BYTES
        found = math.ceil(row_bytes * num_kept) * epochs
        if found > limit.num_bytes:
            raise errors.ValueMismatchError(
                f"Expected the rows of {epochs} `epochs` of the client {client!r} to"
                f" take at most {limit.num_bytes} bytes, found {found}: lower `epochs`."
                f" {limit.advice}"
            )
        return epochs

    def _order(
        self, client: Hashable, count: int, kept: NDArray[np.int64], epochs: int
    ) -> NDArray[np.int64] | None:
        """Return the row indices of all epochs, or None if they change nothing."""
        if self.arrangement.shuffles:
            return np.concatenate(
                [
                    kept[self._shuffle(client, epoch, len(kept))]
                    for epoch in range(epochs)
                ]
            )
        return None if len(kept) == count and epochs == 1 else np.tile(kept, epochs)

    def _shuffle(self, client: Hashable, epoch: int, count: int) -> NDArray[np.int64]:
        seed, invocation = self.occasion() or (0, 0)  # pyright: ignore[reportGeneralTypeIssues]
        if self.arrangement.seed is not None:
            seed = self.arrangement.seed
        drawn = seed_of("shuffle", seed, invocation, client, epoch)
        return np.random.default_rng(drawn).permutation(count)

    def _batches(self, length: int, epochs: int) -> tuple[NDArray[np.int64], Any]:
        """Return the bounds of batches, i64[batches + 1], and a mask of rows to keep.

        The mask is None if all rows are kept. All rows of a batch are from one epoch.
        """
        declared = self.arrangement
        size, rows = declared.batch_size or 1, length // epochs
        if epochs == 1 and not declared.drop_remainder:
            return np.minimum(np.arange(0, rows + size, size), rows), None
        if declared.drop_remainder:
            whole = rows - rows % size
            kept = np.arange(length) % max(1, rows) < whole
            return np.arange(0, whole * epochs + 1, size), kept
        ends = np.append(np.arange(size, rows, size), rows) if rows else np.arange(0)
        starts = np.arange(epochs)[:, None] * rows
        return np.append(0, (ends + starts).ravel()).astype(np.int64), None

    def _batched(
        self,
        column: Column,
        order: NDArray[np.int64] | None,
        splits: NDArray[np.int64],
        tensor: fl.TensorType,
        client: Hashable,
    ) -> Column:
        shape = tensor.shape
        if shape is not None and None not in shape:
            rows = column.rows if order is None else column.rows[order]
            return Column(rows, splits)
        order = np.arange(column.length) if order is None else order
        batches: list[Any] = []
        for start, stop in itertools.pairwise(splits):
            cells = [np.asarray(column[int(row)]) for row in order[start:stop]]
            found = {cell.shape for cell in cells}
            if len(found) > 1:
                raise errors.ValueMismatchError(
                    "Expected lists of one length in each batch of the client"
                    f" {client!r}, found {sorted(found)[:4]} in the batch"
                    f" {len(batches)}: pad them, or leave `batch_size` out."
                )
            batches.append(np.stack(cells))
        whole = None if shape is None else (None, *shape)
        return lay_column(batches, storage_dtype(tensor), whole)


def _gather(column: Column, order: NDArray[np.int64] | None) -> Column:
    if order is None:
        return column
    if column.splits is None:
        return Column(column.rows[order])
    lengths = np.diff(column.splits)[order]
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inside = np.arange(splits[-1]) + np.repeat(
        column.splits[:-1][order] - splits[:-1], lengths
    )
    return Column(column.rows[inside], splits)
