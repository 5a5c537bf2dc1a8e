"""When a run ends before its last round: functions of its history."""

import dataclasses
import math
import numbers
import re
from typing import Literal

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_name, read_whole
from ray_fed.learning.history import History

_RISING = (
    *("acc", "accuracy", "auc", "precision", "recall", "score", "io_u", "iou"),
    *("correlation", "sensitivity", "similarity", "specificity"),
)


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends a run once a metric has not become better for some time.

    It depends on the history alone, so that a resumed run ends where it would have.

    Attributes:
        metric: as `History.values` takes it.
        patience: rounds that have the metric and may pass without a better one, >= 1.
        min_delta: by how much a value must be better to count, >= 0.
        mode: whether less is better, or more; "auto": by how the name ends, more for
            accuracies, AUC, precision, recall, scores (F1, R2), overlap (IoU),
            correlation and similarity, sensitivity and specificity; else less.

    Raises:
        ConfigError: a field is out of its range.
    """

    metric: str
    patience: int = 1
    min_delta: float = 0.0
    mode: Literal["auto", "min", "max"] = "auto"

    def __post_init__(self) -> None:
        read_whole("patience", self.patience, 1)
        if not isinstance(self.min_delta, numbers.Real) or not self.min_delta >= 0:
            raise errors.ConfigError(
                "Expected a number of at least 0 as `min_delta`, found"
                f" {errors.describe(self.min_delta)}."
            )
        is_rising(self.metric, self.mode)

    def __call__(self, history: History) -> bool:
        """Return whether the run should end after these rounds."""
        sign = -1.0 if is_rising(self.metric, self.mode) else 1.0
        values = [sign * v for v in history.values(self.metric) if v is not None]
        best, since = math.inf, 0
        for value in values:
            if value < best - self.min_delta:
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


def is_rising(metric: str, mode: str) -> bool:
    """Return whether more of a metric is better.

    Raises:
        ConfigError: the mode is none, or the metric no name.
    """
    expect_name(metric)
    if mode not in ("auto", "min", "max"):
        raise errors.ConfigError(
            f'Expected "auto", "min" or "max" as `mode`, found {errors.describe(mode)}.'
        )
    name = re.sub(r"_\d+$", "", re.sub(r"(/\d+)+$", "", metric))  # auc_1, f1_score/0
    return mode == "max" or (mode == "auto" and name.endswith(_RISING))
