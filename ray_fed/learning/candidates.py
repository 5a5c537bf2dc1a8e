"""The candidates of adaptive samplers: clients that are evaluated before a round.

The sampler proposes candidates and chooses the cohort by their metrics. Records keep
the metrics for later rounds and for a resume.

    sampler.propose --> candidates --evaluated--> columns of metrics --> sampler.choose
                                                        |
    seen by later rounds <-- records of the run <-------+
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.learning.checks import join_metrics
from ray_fed.learning.fed_eval import build_client_eval
from ray_fed.learning.history import flatten_numbers
from ray_fed.learning.processes import LearningProcess
from ray_fed.program import ClientMetrics


def is_adaptive(sampler: object) -> bool:
    """Return whether a sampler chooses clients by their metrics."""
    methods = (getattr(sampler, name, None) for name in ("propose", "choose"))
    return all(map(callable, methods))


def build_candidate_evaluation(process: LearningProcess) -> LearningProcess:
    """Return the computations that evaluate the candidates, or raise ConfigError."""
    model = getattr(process, "model", None)
    if model is None:
        raise errors.ConfigError(
            "Expected a process with a `model` for a sampler that draws clients by"
            f" their metrics, found none in {process!r}: build it by"
            " `learning.build_process`, or pass another sampler."
        )
    return build_client_eval(model, process)


def to_columns(
    candidates: Sequence[int], metrics: Sequence[Any]
) -> dict[str, tuple[float, ...]]:
    """Return one column for each number of the candidates' metrics, and their indices.

    The column `client` has the indices `candidates`. Raises ValueMismatchError if a
    metric has this name.
    """
    numbers = [dict(flatten_numbers(each)) for each in metrics]
    names = dict.fromkeys(name for each in numbers for name in each)
    columns = {name: tuple(each[name] for each in numbers) for name in names}
    indices = {"client": tuple(candidates)}
    return join_metrics(("the sampler", indices), ("the model", columns))


def read_columns(
    round_index: int, columns: Mapping[str, Sequence[float]]
) -> dict[int, ClientMetrics]:
    """Invert `to_columns`: return each client's metrics by its index."""
    names = [name for name in columns if name != "client"]
    rows = zip(*(columns[name] for name in names), strict=True)
    return {
        int(client): ClientMetrics(round_index, dict(zip(names, row, strict=True)))
        for client, row in zip(columns["client"], rows, strict=True)
    }
