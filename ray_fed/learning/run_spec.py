"""What `learning.run` was asked for, checked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_fed.learning.cohorts import CohortSampler
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
    sampler: CohortSampler
    num_rounds: int
    checkpoint_every: int
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    stop: Callable[[History], bool] | None
    shows_progress: bool
