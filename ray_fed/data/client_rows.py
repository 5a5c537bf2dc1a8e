"""Clients by reference with their ids, and what is done with the rows of each."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Self

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data.arguments import (
    check_callable,
    check_ids,
    check_number,
    check_place,
    read_weights,
)
from ray_fed.data.arrangement import ArrangedSource, Arrangement
from ray_fed.data.mapped_source import MappedSource, map_rows
from ray_fed.data.parts import Part, check_fraction, draw_held_out
from ray_fed.observability import reprs
from ray_fed.values.client_references import ClientReference, ClientRun, ClientSource


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """What is known of the rows of a table, to be shown.

    Attributes:
        columns: the dtypes of those that rows are made of, by name; none after `map`.
        drops: whether a client may have fewer rows than were counted, as those with a
            missing cell are dropped where they are read.
    """

    columns: Mapping[str, str]
    drops: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClientRows(ClientRun):
    """Clients by reference, whose rows are arranged where their work is.

    Attributes:
        ids: one a client, in order.
        table: of their rows; None: they are of none, and weights count no rows.
    """

    ids: tuple[Hashable, ...] = ()
    table: TableFacts | None = None

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"clients": len(self)}
        weights = self._row_weights()
        if self.table is not None and weights is not None:
            arrangement = dataclasses.replace(self._rows()[2], epochs=1)
            rows = reprs.show_number(arrangement.weigh(weights).sum())
            facts["rows"] = f"at most {rows}" if self.table.drops else rows
        if self.table is not None and self.table.columns:
            named = self.table.columns.items()
            facts["columns"] = ", ".join(f"{name} {dtype}" for name, dtype in named)
        return {**facts, "type": self.type_signature}

    @override
    def __repr__(self) -> str:
        facts = self._facts()
        kind = facts.pop("type")
        rows = f", {facts['rows']} rows" if "rows" in facts else ""
        of = f", columns {facts['columns']}" if "columns" in facts else f" of {kind}"
        return f"<{reprs.shorten(f'{len(self):,} clients{rows}{of}')}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts(type(self).__name__, self._facts())

    @classmethod
    def _of(
        cls,
        source: ClientSource,
        member: fl.Type,
        ids: Sequence[Hashable],
        weights: Sequence[float] | NDArray[np.float64] | None,
        table: TableFacts | None = None,
    ) -> Self:
        check_ids(ids)
        of_clients = None if weights is None else read_weights(weights, ids)
        positions = np.arange(len(ids), dtype=np.int64)
        return cls(source, member, positions, of_clients, tuple(ids), table)

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.pick(range(len(self))[index])
        check_place(index)
        weight = None if self.weights is None else float(self.weights[index])
        return ClientReference(
            self.source,
            int(self.positions[index]),
            self.type_signature,
            self.ids[index],
            weight,
        )

    @tracebacks.shorten
    def select(self, ids: Iterable[Any]) -> Self:
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
        return self.pick([indices[client] for client in wanted])

    @tracebacks.shorten
    def take(self, count: int) -> Self:
        """Return the clients with their first `count` rows at most.

        Of those that an earlier `take` left.

        Raises:
            ConfigError: it is below 1.
            UnsupportedError: clients have no sequences of rows.
        """
        check_number(count, "take", 1)
        before = self._rows()[2].take
        return self._arranged(take=count if before is None else min(count, before))

    @tracebacks.shorten
    def shuffle(self, seed: int | None = None) -> Self:
        """Return the clients with rows in another order in each call and epoch.

        The order depends on the seed, on the calls of the context before, on the
        client's id and on the epoch, and not on the worker or the attempt.

        Args:
            seed: >= 0; None: the seed of the configuration.

        Raises:
            ConfigError: it is no such number.
        """
        if seed is not None:
            check_number(seed, "seed")
        return self._arranged(shuffles=True, seed=seed)

    @tracebacks.shorten
    def epochs(self, count: int) -> Self:
        """Return the clients with rows that are gone through `count` times.

        Raises:
            ConfigError: it is below 1.
        """
        return self._arranged(epochs=count)

    @tracebacks.shorten
    def batch(self, size: int | None, *, drop_remainder: bool = False) -> Self:
        """Return the clients with batches of rows, a smaller one at an epoch's end.

        Args:
            size: rows of a batch, >= 1; None: each row is an element.
            drop_remainder: whether the smaller batch is left out.

        Raises:
            ConfigError: the size is below 1.
            ValueMismatchError: rows cannot be batched.
        """
        return self._arranged(batch_size=size, drop_remainder=drop_remainder)

    @tracebacks.shorten
    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return the clients with rows that a TensorFlow function makes of theirs.

        It takes rows as they are before `take`, `shuffle`, `epochs` and `batch`, is
        pickled, and is called again after a failure.

        Args:
            function: from a row, in the containers of its type, to another one.

        Raises:
            ConfigError: it is no function.
            ValueMismatchError: a shape of a row, before or after, is not known.
            UnsupportedError: it draws random numbers.
        """
        check_callable(function, "function")
        base, row, arrangement = self._rows()
        row_map = map_rows(function, row)
        mapped = MappedSource(base, self._by_position(self.ids), row_map)
        made = self._over(mapped, row_map.result, arrangement)
        unnamed = self.table and dataclasses.replace(self.table, columns={})
        return dataclasses.replace(made, table=unnamed)

    @tracebacks.shorten
    def hold_out_rows(
        self, fraction: float, seed: int = 0, *, last: bool = False
    ) -> tuple[Self, Self]:
        """Return the clients with most of their rows, and with the rows held out.

        Args:
            fraction: of each client's rows to hold out, above 0 and below 1; rounded,
                so that a client of few rows may hold out none. Of the rows that an
                earlier call left.
            seed: of the rows, >= 0.
            last: hold out the last rows, those of the latest time in a table that is
                sorted by it, and none by the seed.

        Raises:
            ConfigError: an argument is out of its range.
        """
        check_fraction(fraction, seed)
        before = self._rows()[2].parts
        kept, held = (
            Part(fraction, None if last else seed, is_held_out=is_held_out)
            for is_held_out in (False, True)
        )
        return (
            self._arranged(parts=(*before, kept)),
            self._arranged(parts=(*before, held)),
        )

    @tracebacks.shorten
    def hold_out_clients(self, fraction: float, seed: int = 0) -> tuple[Self, Self]:
        """Return most of the clients, and those held out, each in order.

        Args:
            fraction: of the clients to hold out, above 0 and below 1; rounded, at
                least one and not all.
            seed: of the clients, >= 0.

        Raises:
            ConfigError: an argument is out of its range, or there are too few clients.
        """
        kept, held = draw_held_out(len(self), fraction, seed)
        return self.pick(kept), self.pick(held)

    @functools.cached_property
    def _indices(self) -> dict[Hashable, int]:
        return {client: index for index, client in enumerate(self.ids)}

    @tracebacks.shorten
    def pick(self, indices: Sequence[int]) -> Self:
        """Return the clients at some places, in this order."""
        taken = np.array(indices, np.int64)
        weights = None if self.weights is None else self.weights[taken]
        ids = tuple(self.ids[index] for index in indices)
        return dataclasses.replace(
            self, positions=self.positions[taken], weights=weights, ids=ids
        )

    def _rows(self) -> tuple[ClientSource, fl.Type, Arrangement]:
        """Return what has the rows, the type of one, and how they are arranged.

        Raises:
            UnsupportedError: clients have no sequences.
        """
        if isinstance(self.source, ArrangedSource):
            return self.source.rows, self.source.row, self.source.arrangement
        if not isinstance(self.type_signature, fl.SequenceType):
            raise errors.UnsupportedError(
                "Expected clients that have a sequence of rows each, to arrange, found"
                f" that each has a value of `{self.type_signature}`."
            )
        return self.source, self.type_signature.element, Arrangement()

    def _arranged(self, **changes: Any) -> Self:
        base, row, arrangement = self._rows()
        return self._over(base, row, dataclasses.replace(arrangement, **changes))

    def _over(self, base: ClientSource, row: fl.Type, arrangement: Arrangement) -> Self:
        member = fl.SequenceType(arrangement.element_type(row))
        rows = self._row_weights()
        weights = None if rows is None else arrangement.weigh(rows)
        source = base
        if arrangement != Arrangement():
            ids = self._by_position(self.ids)
            source = ArrangedSource(base, ids, row, arrangement)
            source.row_weights = None if rows is None else self._by_position(rows)
        return dataclasses.replace(
            self, source=source, type_signature=member, weights=weights
        )

    def _row_weights(self) -> NDArray[np.float64] | None:
        if not isinstance(self.source, ArrangedSource):
            return self.weights
        found = self.source.row_weights
        if found is None:
            return None
        return np.array([found[position] for position in self.positions], np.float64)

    def _by_position(self, values: Sequence[Any] | NDArray[Any]) -> list[Any]:
        """Return values of these clients by their position in the source."""
        found: list[Any] = [None] * (int(self.positions.max(initial=-1)) + 1)
        for position, value in zip(self.positions, values, strict=True):
            found[position] = value
        return found
