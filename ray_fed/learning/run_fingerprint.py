"""The fingerprint of a run: everything that decides its rounds.

A fingerprint is a flat dictionary of JSON values by name. It describes the computations
of the process, the initial values of its states, the arrangement of the data, the
sampler and the settings. If the fingerprints of a saved run and its resume differ, the
resume is refused, and the error names every part that differs.

The initial state is compared without its weights. They are random unless Keras is
seeded, and a resume continues from the saved weights. The other initial values are
compared only if `initialize` computes something else.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.data import NamedClients
from ray_fed.data.arguments import read_ids
from ray_fed.learning.batches import count_rows
from ray_fed.learning.client_states import ClientStates, digest_client_states
from ray_fed.learning.processes import LearningProcess
from ray_fed.program import ClientData, ClientReference, RayFederatedContext
from ray_fed.program.descriptions import describe_value, digest

_MEANINGS = {
    "num_clients": "the number of clients",
    "clients": "the clients, by their ids, or their numbers of elements and of rows",
    "cohort_size": "`cohort_size`",
    "seed": "`seed`",
    "sampler": "the `sampler`",
    "state_type": "the type of the process's state",
    "next_type": "the type of the process's `next`",
    "next_content": "what the process's `next` computes, by a hash of its graphs and of"
    " numbers in them, such as a learning rate",
    "devices": "`devices`",
    "schedule": "the `schedule`",
    "evaluates": "whether there is `evaluate`, or its `evaluate_every`",
}
_PARTS = {
    "data": "`{}` of `data`",
    "sampler": "`{}` of the `sampler`",
    "devices": "`{}` of the `devices`",
    "schedule": "`{}` of the `schedule`",
    "state": "the initial value of `{}` in the process's state",
    "client_state": "the initial value of `{}` in the state of clients",
    "config": "`Config.{}`",
}
"""Texts for the names of a fingerprint that have the form `part:name`."""

_INITIAL = ("state:", "client_state:")


def check_same(saved: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, with all differences, unless two fingerprints are equal."""
    found = json.loads(json.dumps(found))  # tuples become lists, as in `saved`
    names = [n for n in {**saved, **found} if saved.get(n) != found.get(n)]
    known = saved.get("initialize")
    is_same_start = known is not None and known == found.get("initialize")
    if is_same_start or "state_type" in names:  # single values explain nothing then
        names = [name for name in names if not name.startswith("state:")]
    names = [name for name in names if name != "initialize"]
    if not names:
        return
    told = "; ".join(
        f"{_describe_name(name)}: {errors.describe(saved.get(name))} there,"
        f" {errors.describe(found.get(name))} here"
        for name in names
    )
    then = ""
    if any(name.startswith(_INITIAL) for name in names):
        then += (
            " An initial value that is drawn at random is the same in every process if"
            " it is seeded: call `keras.utils.set_random_seed` before the model is"
            " built."
        )
    if "next_content" in names:
        then += (
            " Another version of ray_fed, TensorFlow or Keras may trace other graphs of"
            f" the same process. {say_how_to_take_over(where)}"
        )
    raise errors.ConfigError(
        f"Expected to resume the run in `{where}` as it was begun, found other"
        f" arguments: {told}. Pass the saved arguments, or another"
        f" `storage_path`.{then}"
    )


def _describe_name(name: str) -> str:
    part, _, rest = name.partition(":")
    return _PARTS[part].format(rest) if rest else _MEANINGS.get(name, name)


def say_how_to_take_over(where: str) -> str:
    """Return how to begin a new run with the model of a run that cannot be resumed."""
    return (
        "To begin anew with its model, pass another `storage_path` and its `state`, of"
        f' `FileProgramStateManager({where!r}, "round_").load_latest({{"state":'
        " process.initialize()})`."
    )


class ClientsById(Sequence[Any]):
    """The clients of a mapping by id, as a sequence that reads one client at a time.

    `ids` has the keys of the mapping, in its order.
    """

    def __init__(self, clients: Mapping[Any, Any]) -> None:
        self._names = tuple(clients)
        self.ids = tuple(read_ids(self._names))
        self._clients = clients

    @override
    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._clients[self._names[index]]


def with_ids(data: Sequence[Any] | Mapping[Any, Any]) -> Sequence[Any]:
    """Return data of clients as a sequence that has the clients' `ids`, if known."""
    if isinstance(data, dict):
        return NamedClients(data.values(), data)
    if isinstance(data, Mapping):
        return ClientsById(data)
    if not isinstance(data, list | tuple) or not data:
        return data
    references = [each for each in data if isinstance(each, ClientReference)]
    if len(references) < len(data):
        return data
    return NamedClients(references, [each.id for each in references])


def describe_process(process: LearningProcess) -> dict[str, Any]:
    """Return the facts about a process that a resume of its run compares."""
    kept = process.initial_client_state
    return {
        "state_type": _type_of(process.initialize),
        "next_type": _type_of(process.next),
        "initialize": _content_of(process.initialize),
        "next_content": _content_of(process.next),
        **_describe_leaves("client_state", () if kept is None else kept),
    }


def _type_of(comp: Any) -> str | None:
    if isinstance(comp, fl.framework.Computation):
        return str(comp.type_signature)
    return None


def _content_of(comp: Any) -> str | None:
    """Return a hash of a computation, or None if it has Python functions."""
    if not isinstance(comp, fl.framework.ConcreteComputation):
        return None
    try:
        return rtf.identify_computation(comp)[:16]
    except errors.UnsupportedError:  # it has Python functions
        return None


def describe_state(initial: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the facts about an initial state, except weights, that a resume compares.

    `read` reads a state of references into this process.
    """
    if isinstance(initial, Mapping):
        named = cast("Mapping[str, Any]", initial)
        initial = {k: v for k, v in named.items() if k != "weights"}
    elif "weights" in getattr(initial, "_fields", ()):
        initial = initial._replace(weights=())
    return _describe_leaves("state", read(initial))


def digest_start(state: Any, client_states: ClientStates | None) -> str:
    """Return a digest of a run's first values. Equal values have equal digests.

    `state` has plain values. `client_states` are the values that clients keep, if any.
    """
    kept = digest_client_states(client_states) if client_states else None
    described = [_describe_leaves("state", state), kept]
    return digest(json.dumps(described).encode())


def _describe_leaves(part: str, values: Any) -> dict[str, Any]:
    try:
        named = structure_utils.flatten_with_name(values)
    except (TypeError, ValueError):  # it cannot be saved, and the save raises the error
        return {}
    return {f"{part}:{name}": describe_value(leaf) for name, leaf in named}


def describe_data(data: Sequence[Any]) -> dict[str, Any]:
    """Return the facts about the clients' data that a resume compares.

    No data is read. The rows of lists are counted. Other sequences may load a client
    for each request, so only their length and ids are compared.
    """
    ids: Any = getattr(data, "ids", None)
    described: dict[str, Any] = {}
    counts: list[Any] | None = None
    if isinstance(data, ClientData):
        described = data.describe()
    elif isinstance(data, list | tuple):
        each = cast("Sequence[Any]", data)
        counts = [count_rows(client) for client in each]
        references = [one for one in each if isinstance(one, ClientReference)]
        sources = {one.source.token: one.source for one in references}
        found = [source.describe() for source in sources.values()]
        described = found[0] if len(found) == 1 else {"sources": found} if found else {}
    return {
        "num_clients": len(data),
        "clients": digest(repr((ids, counts)).encode()),
        **{f"data:{name}": value for name, value in described.items()},
    }


def find_context() -> ray_fed.ExecutionContext | None:
    """Return the default context if it is ray_fed's or wraps ray_fed's, or None."""
    context = fl.framework.get_context_stack().current
    if isinstance(context, RayFederatedContext):
        context = context.execution_context
    return context if isinstance(context, ray_fed.ExecutionContext) else None


def describe_settings() -> dict[str, Any]:
    """Return the settings of the default context that decide the bits of a round."""
    context = find_context()
    if context is None:
        return {}
    config = context.config
    return {
        "config:seed": config.seed,
        "config:clients_per_leaf": config.clients_per_leaf,
        "config:kernels.jit": config.kernels.jit,
        "config:kernels.vectorized_clients": config.kernels.vectorized_clients,
    }
