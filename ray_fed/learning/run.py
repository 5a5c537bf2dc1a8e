"""The loop over rounds: pick a cohort, run a round, keep its numbers."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_fed.learning.batches import check_batches
from ray_fed.learning.cohorts import CohortSampler
from ray_fed.learning.processes import LearningProcess

_MAX_NAMED = 10
"""Clients of a cohort that a note lists."""

Dataset = Sequence[Any]
"""What one client has: its batches, each of the model's `batch_type`."""


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What one round was and did.

    Attributes:
        round_index: rounds of the training before this one.
        clients: of its cohort, by index, ascending.
        training: metrics of the clients' training.
        evaluation: what `evaluate` returned after the round; None without it.
        seconds: that the round took, without evaluation.
    """

    round_index: int
    clients: tuple[int, ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Where a training ended, and how it came there.

    Attributes:
        state: of the server, after the last round.
        rounds: those that were run, in order.
    """

    state: Any
    rounds: tuple[RoundRecord, ...]


def run(  # noqa: PLR0913 (keywords of one loop; none belongs to another)
    process: LearningProcess,
    clients: Sequence[Dataset],
    *,
    num_rounds: int,
    cohort_size: int | None = None,
    seed: int = 0,
    evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
    on_round: Callable[[Any, RoundRecord], None] | None = None,
    state: Any = None,
) -> TrainingResult:
    """Run rounds of a learning process in the default context.

    A run goes on where another one ended, with the cohorts that it would have had, when
    it is given that one's state, clients, cohort size and seed.

    Args:
        process: such as `build_fed_avg` returns; its state counts rounds.
        clients: each client's batches; only those of a cohort are read.
        num_rounds: to run now, >= 0.
        cohort_size: clients a round; None: all of them.
        seed: of the cohorts, >= 0.
        evaluate: called with the state after each round; returns metrics.
        on_round: called with the state and the record after each round.
        state: to go on from; None: `process.initialize()`.

    Returns:
        The last state and a record of each round.

    Raises:
        ConfigError: `cohort_size` or `seed` is out of its range.
        ValueMismatchError: inputs and labels of a batch, in a list, have different
            numbers of rows.
        Exception: what a round raised. It counts clients by their place in the cohort;
            a note says which of `clients` these are.
    """
    num_clients = len(clients)
    sampler = CohortSampler(num_clients, cohort_size or num_clients, seed)
    state = process.initialize() if state is None else state
    records: list[RoundRecord] = []
    for _ in range(num_rounds):
        round_index = int(state.round_index)
        cohort = sampler.sample(round_index)
        started = time.monotonic()
        try:
            drawn = {index: clients[index] for index in cohort}
            check_batches(drawn)
            state, training = process.next(state, list(drawn.values()))
        except Exception as error:
            _say_who(error, cohort)
            raise
        seconds = time.monotonic() - started
        evaluation = None if evaluate is None else evaluate(state)
        record = RoundRecord(round_index, tuple(cohort), training, evaluation, seconds)
        records.append(record)
        if on_round is not None:
            on_round(state, record)
    return TrainingResult(state, tuple(records))


def _say_who(error: Exception, cohort: Sequence[int]) -> None:
    """Note which clients the places in an error are: it knows of the cohort alone."""
    place = getattr(getattr(error, "location", None), "client_index", None)
    if place is None:
        shown = ", ".join(map(str, cohort[:_MAX_NAMED]))
        others = f" and {len(cohort) - _MAX_NAMED} others" * (len(cohort) > _MAX_NAMED)
        error.add_note(
            f"The cohort is, in order, `clients[i]` for i in {shown}{others}."
        )
    else:
        error.add_note(
            f"The client at position {place} of the cohort is"
            f" `clients[{cohort[place]}]`."
        )
