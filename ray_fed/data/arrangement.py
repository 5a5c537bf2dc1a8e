"""What is done with a client's rows before its work: declared once, done on the worker.

    rows --parts--> --take--> --shuffle, for each epoch--> --batch--> elements

The order is fixed, in whichever order it was asked for. Rows are numpy columns, so that
all of it is indexing: the rows of a client are cached, their arrangement is not.
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
from ray_fed.data.arguments import check_number
from ray_fed.language.structs import Plain
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
    """Return the seed of a generator that some fields name."""
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:16])


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of each client, drawn by a seed, or the last ones.

    Attributes:
        fraction: of the rows that are held out, above 0 and below 1.
        seed: >= 0; None: the last rows are held out.
        is_held_out: whether this is the part held out, or what is left.
    """

    fraction: float
    seed: int | None
    is_held_out: bool

    def rows(self, client: Hashable, count: int) -> NDArray[np.int64]:
        """Return the rows of the part, ascending."""
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
    """Raise unless a part can be held out.

    Raises:
        ConfigError: the fraction is not between 0 and 1, or the seed is no whole number
            of at least 0.
    """
    if not isinstance(cast("object", fraction), numbers.Real) or not 0 < fraction < 1:
        raise errors.ConfigError(
            f"Expected a `fraction` above 0 and below 1, found {fraction!r}."
        )
    check_number(seed, "seed")


_INDEX_BYTES = 8
"""What says of each row which one of the base it is."""


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """What is done with the rows of each client.

    Attributes:
        parts: which of them: of the rows that a part leaves, the next has some.
        take: the first of those, at most; None: all.
        shuffles: whether they are in another order in each call and epoch.
        seed: of the order, >= 0; None: the seed of the configuration.
        epochs: how often they are gone through, >= 1.
        batch_size: rows of one element; None: a row is an element.
        drop_remainder: whether a smaller batch, at the end of an epoch, is left out.
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
                check_number(value, name, 1)

    def element_type(self, row: fl.Type) -> fl.Type:
        """Return the type of an element, from that of a row.

        Raises:
            ValueMismatchError: rows cannot be batched.
        """
        if self.batch_size is None:
            return row
        return batch_type(row)

    def weigh(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the rows that clients' work goes through, of those that they have."""
        for part in self.parts:
            held = np.round(part.fraction * rows)  # as `round` does in `Part.rows`
            rows = held if part.is_held_out else rows - held
        if self.take is not None:
            rows = np.minimum(rows, self.take)
        return rows * self.epochs


class ArrangedSource(ClientSource):
    """The rows of another source, arranged.

    Args:
        base: its clients have a sequence of rows each.
        ids: of the clients, by position.
        row: the type of a row.
        arrangement: of the rows.

    Attributes:
        rows: the base.
        row_weights: of clients as they are in the base, by position, where that is
            known; stays with the one who arranges.
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
    def over(self, base: ClientSource) -> "ArrangedSource":
        made = ArrangedSource(base, self.ids, self.row, self.arrangement)
        made.token = self.token
        return made

    @override
    def read(self, position: int) -> Plain:
        return self.arrange(self.read_base(position), position)

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
        """Return the rows of one epoch, by index, in the order of the base."""
        rows = np.arange(count)
        for part in self.arrangement.parts:
            rows = rows[part.rows(client, len(rows))]
        return rows[: self.arrangement.take]

    def _count_epochs(
        self, client: Hashable, rows: ColumnarSequence, num_kept: int
    ) -> int:
        """Return how often rows are gone through: once where there are none.

        Raises:
            ValueMismatchError: the rows of all epochs are more than one sequence may
                have.
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
        """Return the rows to take, by index; None: all of them as they are."""
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
        """Return where batches begin and end; and which rows are kept, None: all.

        A batch has rows of one epoch alone.
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
