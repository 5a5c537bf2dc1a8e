"""Whether metrics that are asked for by name can be there: told before any round."""

from collections.abc import Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.learning.metric_values import name_elements
from ray_fed.learning.processes import LearningProcess


def check_metrics(
    askers: Sequence[Any], process: LearningProcess, *, evaluates: bool
) -> None:
    """Refuse the name of a metric that no round will have, where that is known.

    Args:
        askers: objects that may have an attribute `metric`.
        process: whose type says what training measures.
        evaluates: whether there is `evaluate`, whose metrics are known once it ran.

    Raises:
        ConfigError: training has no such metric, and there is no evaluation.
    """
    names = _training_names(process)
    for asker in askers:
        metric = getattr(asker, "metric", None)
        if names is None or not isinstance(metric, str):
            continue
        may_be_evaluated = evaluates and not metric.startswith("training.")
        if not may_be_evaluated and metric.removeprefix("training.") not in names:
            raise errors.ConfigError(
                f"Expected one of the metrics {names} for `{type(asker).__name__}`,"
                f" found `{metric}`: name one of these, or pass an `evaluate` that"
                " returns it."
            )


def _training_names(process: LearningProcess) -> list[str] | None:
    if not isinstance(process.next, fl.framework.Computation):
        return None
    result = process.next.type_signature.result
    if not isinstance(result, fl.StructType) or len(result) != 2:  # noqa: PLR2004
        return None
    metrics = result[1]
    if isinstance(metrics, fl.FederatedType):
        metrics = metrics.member
    if not isinstance(metrics, fl.StructType):
        return None
    return _names(metrics, "") + ["epsilon"] * (process.privacy is not None)


def _names(type_spec: fl.StructType, path: str) -> list[str]:
    found: list[str] = []
    for name, member in type_spec.items():
        full = f"{path}/{name}" if path else str(name)
        match member:
            case fl.StructType():
                found += _names(member, full)
            case fl.TensorType(shape=shape) if shape and None not in shape:
                found += name_elements(full, [size or 0 for size in shape])
            case _:
                found.append(full)
    return found
