"""The parts that the programs of papers share: options, clients, runs, and tables."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ray_fed import learning
from ray_fed.data import ClientData

Row: TypeAlias = dict[str, str]
"""One row of a table: the text of each cell, by the name of its column."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one call of the command.

    Attributes:
        data: The folder with the data, or None.
        is_quick: Whether to run a few rounds of each trial only.
        only: Text in the names of trials. Trials without it are left out.
        runs: The folder where trials are saved and resumed, or None. Quick trials have
            folders of their own in it.
    """

    data: pathlib.Path | None = None
    is_quick: bool = False
    only: str = ""
    runs: pathlib.Path | None = None

    def wants(self, name: str) -> bool:
        """Return whether the trial of this name is asked for."""
        return self.only in name

    def run(
        self, name: str, process: learning.LearningProcess, data: Any, **arguments: Any
    ) -> learning.TrainingResult:
        """Run a trial, or continue it where it was stopped."""
        folder = name.replace("/", "-") + "-quick" * self.is_quick
        path = None if self.runs is None else self.runs / folder
        return learning.run(
            process, data, storage_path=path, progress=True, **arguments
        )


def build_clients(
    owners: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]
) -> ClientData:
    """Return clients of examples whose owners are known.

    Args:
        owners: The client of each example, [n].
        x: The input of each example, [n, ...] with one or two dimensions.
        y: The label of each example, [n, ...] with one or two dimensions.
    """
    columns: dict[str, Any] = {"client": owners}
    for name, values in {"x": x, "y": y}.items():
        columns[name] = values if values.ndim == 1 else list(values)
    return ClientData.from_table(columns, client="client", x="x", y="y")


def find_owners(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the client of each example from the examples of each client."""
    owners = np.empty(sum(map(len, parts)), np.int64)
    for client, part in enumerate(parts):
        owners[part] = client
    return owners


def read_accuracies(history: learning.History) -> list[float]:
    """Return the accuracy of each evaluation."""
    values = history.values("evaluation.accuracy")
    return [value for value in values if value is not None]


def describe_speed(*histories: learning.History) -> Row:
    """Return the seconds of all rounds, and the median of clients a second."""
    records = [record for history in histories for record in history]
    rates = [len(record.clients) / record.seconds for record in records]
    return {
        "seconds": f"{sum(record.seconds for record in records):.1f}",
        "clients a second": f"{statistics.median(rates):,.0f}",
    }


def count_rounds(accuracies: Sequence[float], target: float) -> float:
    """Return after how many rounds a target is reached, or infinity.

    The curve is the best accuracy so far, with straight lines between rounds, as in
    McMahan et al., 2017, Section 3.

    Args:
        accuracies: The accuracy after each round.
        target: The accuracy to reach.
    """
    best = np.maximum.accumulate(np.asarray(accuracies, np.float64))
    reached = np.flatnonzero(best >= target)
    if not len(reached):
        return math.inf
    after = int(reached[0])
    if after == 0:
        return 1.0
    before = best[after - 1]
    return after + float((target - before) / (best[after] - before))


def draw_table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown, with the columns of all of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, ["---"] * len(names)]
    cells += [[row.get(name, "") for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
