"""What makes a run the same run: compared before it is resumed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import federated_language as fl

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.batches import count_rows
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.run_spec import RunSpec
from ray_fed.program import RayFederatedContext

_MEANINGS = {
    "num_clients": "the number of clients",
    "clients": "the clients, by their ids, or their numbers of elements and of rows",
    "cohort_size": "`cohort_size`",
    "seed": "`seed`",
    "state_type": "the type of the process's state",
    "next_type": "the type of the process's `next`",
    "next_content": "what the process's `next` computes, by a hash of its graphs and of"
    " numbers in them, such as a learning rate",
    "config_seed": "`Config.seed`",
    "clients_per_leaf": "`Config.clients_per_leaf`",
    "evaluates": "whether there is `evaluate`, or its `evaluate_every`",
}


def describe_run(process: LearningProcess, spec: RunSpec) -> dict[str, Any]:
    """Return what decides the bits of a run, and is compared when it is resumed.

    Args:
        process: that is run.
        spec: of the run; no client's data are read.
    """
    sampler = spec.sampler
    initialize, run_round = (_type_of(c) for c in (process.initialize, process.next))
    return {
        "num_clients": sampler.num_clients,
        "clients": _digest_clients(spec.data),
        "cohort_size": sampler.cohort_size,
        "seed": sampler.seed,
        "state_type": initialize,
        "next_type": run_round,
        "next_content": _content_of(process.next),
        "evaluates": None if spec.evaluate is None else spec.evaluate_every,
        **_settings(),
    }


def _type_of(comp: Any) -> str | None:
    if isinstance(comp, fl.framework.Computation):
        return str(comp.type_signature)
    return None


def _content_of(comp: Any) -> str | None:
    """Return what tells a computation from others; None where nothing does."""
    if not isinstance(comp, fl.framework.ConcreteComputation):
        return None
    try:
        return rtf.identify_computation(comp)[:16]
    except errors.UnsupportedError:  # it has Python functions
        return None


def _digest_clients(data: Sequence[Any]) -> str:
    ids = getattr(data, "ids", None)
    if ids is None:
        ids = tuple(count_rows(client) for client in data)
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def _settings() -> dict[str, int | None]:
    context = fl.framework.get_context_stack().current
    if isinstance(context, RayFederatedContext):
        context = context.execution_context
    if not isinstance(context, ray_fed.ExecutionContext):
        return {}
    config = context.config
    return {"config_seed": config.seed, "clients_per_leaf": config.clients_per_leaf}


def check_same(saved: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Refuse to resume another run.

    Raises:
        ConfigError: something differs; the message says what.
    """
    names = [n for n in {**saved, **found} if saved.get(n) != found.get(n)]
    if not names:
        return
    told = "; ".join(
        f"{_MEANINGS.get(name, name)}: {_show(saved.get(name))} there,"
        f" {_show(found.get(name))} here"
        for name in names
    )
    raise errors.ConfigError(
        f"Expected to resume the run in `{where}` as it was begun, found other"
        f" arguments: {told}. Pass those, or another `storage_path`."
    )


def _show(value: object) -> str:
    return errors.describe(value)
