"""What clients of a run keep from round to round: taken, put, and put back."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.saved_clients import SavedClientStates
from ray_fed.learning.state_rows import FrozenRows

_MAX_NAMED = 10


def check_client_states(given: object, initial: Any, num_clients: int) -> None:
    """Raise unless a run can begin with values of clients.

    Args:
        given: `client_states` of `learning.run`, not None.
        initial: of a client of its process that has put none.
        num_clients: in its `data`.

    Raises:
        ValueMismatchError: they are of another process, or of other clients.
    """
    if not isinstance(given, ClientStates):
        raise errors.ValueMismatchError(
            "Expected a `ClientStates` as `client_states`, found"
            f" {errors.describe(given)}."
        )
    try:
        given.emptied(initial)
    except errors.ValueMismatchError as error:
        cause = str(error).rstrip(".")
        raise errors.ValueMismatchError(
            "Expected `client_states` of a run of this process, found those of another"
            f" one ({cause}): pass those of a result of this one."
        ) from error
    known = range(num_clients)
    unknown = [each for each in given.ids if isinstance(each, str) or each not in known]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MAX_NAMED]))
        others = f" and {len(unknown) - _MAX_NAMED} others" * (
            len(unknown) > _MAX_NAMED
        )
        raise errors.ValueMismatchError(
            f"Expected `client_states` by index in `data`, from 0 to {num_clients - 1},"
            f" found values of {shown}{others}: pass those of a run of these clients."
        )


@dataclasses.dataclass(frozen=True)
class _Taken:
    """What clients of a round had kept before it.

    Attributes:
        round_index: of the round.
        cohort: its clients.
        values: theirs, in order.
    """

    round_index: int
    cohort: Sequence[int]
    values: Sequence[Any]


class RunClients:
    """Takes and puts the values of one round after another.

    Args:
        states: hold the values; None where clients keep nothing.
    """

    def __init__(self, states: ClientStates | None) -> None:
        self._states = states
        self._taken = self._put = _Taken(-1, (), ())

    def take(self, round_index: int, cohort: Sequence[int]) -> list[list[Any]]:
        """Return what `next` takes before the cohort's data: a list of values, or none.

        Args:
            round_index: of the round that takes them.
            cohort: its clients.
        """
        if self._states is None:
            return []
        values = self._states.take(cohort)
        self._taken = _Taken(round_index, cohort, values)
        return [values]

    def put(self, kept: "concurrent.futures.Future[Any] | None") -> FrozenRows | None:
        """Put what the round returned that took last, and freeze it to be saved.

        Args:
            kept: what it returned for its clients.

        Returns:
            None where no run is saved, or clients keep nothing.
        """
        if self._states is None or kept is None:
            return None
        self._states.put(self._taken.cohort, kept.result())
        self._put = self._taken
        if isinstance(self._states, SavedClientStates):
            return self._states.freeze()
        return None

    def put_back(self, num_rounds: int) -> None:
        """Put what clients had after some rounds, if one more round was put."""
        put = self._put
        if self._states is not None and put.round_index >= num_rounds:
            self._states.put(put.cohort, put.values)
