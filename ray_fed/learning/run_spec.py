"""What `learning.run` was asked for, checked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_fed.learning.cohorts import CohortSampler, PrivateCohorts
from ray_fed.learning.history import History


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The arguments of `learning.run` that its rounds follow; see there.

    Attributes:
        data: of each client.
        sampler: of cohorts.
        num_rounds: of the whole run.
        checkpoint_every: rounds.
        evaluate: takes the state.
        evaluate_every: rounds.
        stop: takes the history.
        shows_progress: whether a bar or log lines are wanted.
    """

    data: Sequence[Any]
    sampler: CohortSampler | PrivateCohorts
    num_rounds: int
    checkpoint_every: int
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    stop: Callable[[History], bool] | None
    shows_progress: bool

    def add_epsilon(self, training: Any, round_index: int) -> Any:
        """Return a round's metrics, with the privacy that is spent after it, if any."""
        if not isinstance(self.sampler, PrivateCohorts):
            return training
        return {**training, "epsilon": self.sampler.privacy.epsilon(round_index + 1)}
