"""What a run did, a row a round: as a sequence, a table, a picture."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_name
from ray_fed.learning.extras import import_extra
from ray_fed.learning.history_table import draw_rounds, shown_row
from ray_fed.learning.metric_values import flatten_numbers, is_same
from ray_fed.observability import figures, reprs, timeline

_SHOWN_ROWS = 20
_SHOWN_NUMBERS = 12
_TRAINING, _EVALUATION = "training.", "evaluation."


@dataclasses.dataclass(frozen=True, repr=False)
class RoundRecord:
    """What one round was and did.

    Attributes:
        round_index: rounds of the run before this one.
        clients: of its cohort, by index, in order.
        training: metrics of the clients' training.
        evaluation: what `evaluate` returned after the round, as plain values; None
            where it was not due.
        seconds: from the call of the round to its metrics, without evaluation.
        retries: attempts of its subrounds beyond the first of each.
        dropped: clients of the cohort that the round went on without, by index.
        bytes_sent: of the state and of clients' values, as its report counts them.
        bytes_returned: of what came back to the coordinator of the round, likewise.
        bytes_read: of states that came into this process since the record before: to be
            saved, or for a callback.
        started_at: when the round was called, in seconds since 1970.
        spans: what each worker did when, as tuples of the fields of
            `observability.timeline.Span`.
    """

    round_index: int
    clients: tuple[int, ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    seconds: float
    retries: int = 0
    dropped: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_returned: int = 0
    bytes_read: int = 0
    started_at: float = 0.0
    spans: tuple[tuple[Any, ...], ...] = ()

    @property
    def round(self) -> int:
        """The number of the round, from 1: what tables, plots and files call it."""
        return self.round_index + 1

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoundRecord):
            return NotImplemented
        return is_same(vars(self), vars(other))

    @override
    def __hash__(self) -> int:
        return hash((self.round_index, self.clients))

    @override
    def __repr__(self) -> str:
        cost = f"{len(self.clients)} clients, {reprs.show_number(self.seconds)} s"
        return f"<round {self.round}: {cost}, {_show_numbers(self)}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts(f"round {self.round}", shown_row(row_of(self)))

    def numbers(self) -> dict[str, float]:
        """Return the numbers of metrics by name: `training.loss`.

        Of several in one metric each has a name of its own, `evaluation.f1_score/0`;
        of arrays with more than 100 elements none has.
        """
        parts = {_TRAINING: self.training, _EVALUATION: self.evaluation or {}}
        return {
            prefix + name: number
            for prefix, metrics in parts.items()
            for name, number in flatten_numbers(metrics)
        }

    def timeline(self) -> Any:
        """Return a matplotlib figure: a lane a worker, a bar a subround.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        import_extra("matplotlib", "demo", "RoundRecord.timeline")
        spans = [timeline.Span(*span) for span in self.spans]
        return timeline.draw_spans(spans, f"round {self.round} of the run")


class History(Sequence[RoundRecord]):
    """The rounds of a run, in order; equal to one of equal rounds.

    Args:
        records: one a round, from the first one on.
        evaluates: whether the run has an `evaluate`: a metric's bare name is that of
            evaluation then.
    """

    def __init__(
        self, records: Iterable[RoundRecord] = (), *, evaluates: bool = False
    ) -> None:
        self._records = tuple(records)
        self._evaluates = evaluates

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    @override
    def __getitem__(self, index: int | slice) -> "RoundRecord | History":
        if isinstance(index, slice):
            return History(self._records[index], evaluates=self._evaluates)
        return self._records[index]

    @override
    def __len__(self) -> int:
        return len(self._records)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._records == other._records

    @override
    def __hash__(self) -> int:
        return hash(tuple(record.round_index for record in self))

    def with_round(self, record: RoundRecord) -> "History":
        """Return this history and one more round."""
        return History((*self._records, record), evaluates=self._evaluates)

    @override
    def __repr__(self) -> str:
        last = f": {_show_numbers(self[-1])}" if self else ""
        return f"<history of {len(self)} rounds{last}>"

    def names(self) -> list[str]:
        """Return the names of all numbers, such as `training.loss`, in order."""
        found = (name for record in self for name in record.numbers())
        return list(dict.fromkeys(found))

    def values(self, metric: str) -> list[float | None]:
        """Return a metric by round; None where a round has none.

        Args:
            metric: one of `names()`; or its bare name, as `loss`: that of evaluation in
                a run that evaluates, else that of training.

        Raises:
            ConfigError: it is no name, or rounds have metrics, but not this one.
        """
        expect_name(metric)
        name = self._full_name(metric)
        return [record.numbers().get(name) for record in self]

    def _full_name(self, metric: str) -> str:
        names = self.names()
        evaluated = any(record.evaluation is not None for record in self)
        if metric.startswith((_TRAINING, _EVALUATION)):
            name = metric
        elif _EVALUATION + metric in names or (self._evaluates and not evaluated):
            name = _EVALUATION + metric
        else:
            name = _TRAINING + metric
        has_part = len(self) > 0 if name.startswith(_TRAINING) else evaluated
        if name not in names and has_part:
            raise errors.ConfigError(
                f"Expected one of the metrics {names}, or what follows the dot, found"
                f" `{metric}`."
            )
        return name

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dict for each round, what CSV and tables show.

        `round` is its number, from 1.
        """
        return [row_of(record) for record in self]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each round, by its number.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = import_extra("pandas", "pandas", "History.to_pandas")
        frame = pandas.DataFrame(self.rows())
        return frame.set_index("round") if len(self) else frame

    def plot(self, *metrics: str) -> Any:
        """Return a matplotlib figure with a panel for each metric, by its full name.

        Args:
            *metrics: names as for `values`; by default all but numbers of examples and
                elements of arrays.

        Raises:
            ConfigError: there is no such metric, or no round at all.
            UserError: matplotlib is not installed.
        """
        import_extra("matplotlib", "demo", "History.plot")
        known = [
            name
            for name in self.names()
            if not name.endswith("num_examples")
            and not name.rpartition("/")[2].isdigit()
        ]
        chosen = [self._full_name(each) for each in metrics] or known
        if not chosen:
            raise errors.ConfigError(
                "Expected rounds with metrics to plot, found a history of"
                f" {len(self)} rounds without any number."
            )
        figure = figures.new_figure(4.5 * len(chosen), 3.5)
        panels = figure.subplots(1, len(chosen), squeeze=False)[0]
        for index, name in enumerate(chosen):
            _plot(panels[index], name, self, color=f"C{index}")
        return figure

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write when each worker did what in all rounds, in Chrome's trace format.

        Open the file in https://ui.perfetto.dev. On a context that is not ray_fed's,
        it has rounds alone.

        Args:
            path: of the file, JSON; its folder exists.

        Raises:
            StorageError: it cannot be written.
        """
        first = min((record.started_at for record in self), default=0.0)
        rounds = [
            timeline.TracedRound(
                record.round,
                record.started_at - first,
                record.seconds,
                [timeline.Span(*span) for span in record.spans],
            )
            for record in self
        ]
        try:
            pathlib.Path(path).write_text(json.dumps(timeline.trace(rounds)))
        except OSError as error:
            raise errors.StorageError(
                f"Expected to write the file `{os.fspath(path)}`, found"
                f" {type(error).__name__} ({error.strerror}): name another one."
            ) from error

    def _repr_html_(self) -> str:
        rows = [row_of(record) for record in self[-_SHOWN_ROWS:]]
        return draw_rounds(rows, len(self))


def row_of(record: RoundRecord) -> dict[str, Any]:
    """Return a round as a flat dict: its cost, then its numbers."""
    return {
        "round": record.round,
        "clients": len(record.clients),
        "dropped": len(record.dropped),
        "retries": record.retries,
        "seconds": record.seconds,
        "bytes_sent": record.bytes_sent,
        "bytes_returned": record.bytes_returned,
        "bytes_read": record.bytes_read,
        **record.numbers(),
    }


def _show_numbers(record: RoundRecord) -> str:
    numbers = [f"{k} {reprs.show_number(v)}" for k, v in record.numbers().items()]
    return ", ".join(
        numbers[:_SHOWN_NUMBERS] + ["..."] * (len(numbers) > _SHOWN_NUMBERS)
    )


def _plot(panel: Any, name: str, history: History, color: str) -> None:
    """Draw a metric by round."""
    import matplotlib.ticker

    points = zip(
        (record.round for record in history), history.values(name), strict=True
    )
    found = [(number, value) for number, value in points if value is not None]
    panel.plot(*zip(*found, strict=True), color=color, marker=".")
    panel.set(xlabel="round", ylabel=name)
    panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.grid(alpha=0.3)
