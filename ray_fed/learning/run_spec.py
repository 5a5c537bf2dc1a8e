"""What `learning.run` was asked for, checked.

Arguments of `learning.run` of another kind than it takes: told before any round.

Whether metrics that are asked for by name can be there: told before any round.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.learning.cohorts import CohortSampler, PrivateCohorts
from ray_fed.learning.history import History, name_elements
from ray_fed.learning.processes import LearningProcess
from ray_fed.observability import reprs


def _is_function(value: object) -> bool:
    return value is None or callable(value)


def _is_sequence(value: object) -> bool:
    has_places = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_places and not isinstance(value, Mapping)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data": (_is_sequence, "a sequence with the batches of each client, no mapping,"),
    "storage_path": (
        lambda value: value is None or isinstance(value, str | os.PathLike),
        "a path, a URI or None",
    ),
    "evaluate": (_is_function, "a function of the state or None"),
    "callbacks": (
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
        "a list of callbacks, such as `[callback]`,",
    ),
    "on_error": (lambda value: value in ("raise", "log"), '"raise" or "log"'),
    "stop": (_is_function, "a function of the history or None"),
    "progress": (lambda value: isinstance(value, bool), "True or False"),
}


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raise unless arguments are of their kinds.

    Args:
        arguments: by name; those of `_KINDS` alone.

    Raises:
        ConfigError: one is of another kind.
    """
    for name, value in arguments.items():
        is_right, kind = _KINDS[name]
        if not is_right(value):
            raise errors.ConfigError(
                f"Expected {kind} as `{name}`, found {errors.describe(value)}."
            )


def check_process(process: Any) -> None:
    """Raise unless a process trains: its `next` returns a state first.

    Raises:
        ConfigError: it is no process, or an evaluation.
    """
    if not hasattr(process, "initialize") or not hasattr(process, "next"):
        raise errors.ConfigError(
            "Expected a learning process, such as `build_fed_avg` returns, as"
            f" `process`, found {errors.describe(process)}."
        )
    if not isinstance(process.next, fl.framework.Computation):
        return
    signature = process.next.type_signature
    state = process.initialize.type_signature.result
    result = signature.result
    returned = result[0] if isinstance(result, fl.StructType) and result else None
    if returned is None or not state.is_assignable_from(returned):
        raise errors.ConfigError(
            "Expected a learning process whose `next` returns the new state first, a"
            f" `{reprs.shorten(str(state))}`, as `process`, found one that returns"
            f" `{reprs.shorten(str(result))}`: an evaluation is called in a function"
            " that is passed as `evaluate`."
        )


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
