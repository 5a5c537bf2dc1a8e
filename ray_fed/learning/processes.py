"""The pair of computations that a federated algorithm is."""

# pyright: reportUnknownLambdaType=false

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.observability import reprs


class ClientBytes(NamedTuple):
    """The bytes that one client of a federation would receive and send in a round.

    Attributes:
        sent: The size of the sent tensors that the client's work uses.
        returned: The size of its update, as the aggregator sends it, of its weight, and
            of the sums behind metrics.
    """

    sent: int
    returned: int


class Paces(NamedTuple):
    """The orders of clients of a paced process, beside the state and their data.

        next  (<state@SERVER, <state, ...>@SERVER, T@CLIENTS, data> -> as before)

    T is `<start=i32, scale=f32>` with starts, and `<epochs=i32>` with epochs.

    Attributes:
        num_starts: The number of earlier states. A client works from the one at `start`
            and its update is multiplied by `scale`. 0: all work from the state itself.
        moves_to: Whether an update leads from the state to the client's weights. If it
            is not, the update is the change from the client's start.
        limits_epochs: Whether each client makes `epochs` passes.
    """

    num_starts: int = 0
    moves_to: bool = False
    limits_epochs: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class LearningProcess:
    """A federated algorithm as two federated_language computations.

    Call them as functions, or pass them to any context of federated_language.

    Attributes:
        initialize: The computation of the first state, ( -> state@SERVER).
        next: The computation of one round, from the state and all clients' data. The
            function that builds the process describes the results.
        privacy: The privacy that its rounds spend, or None if they protect no client.
        initial_client_state: The values of a client before its first round, NumPy
            arrays. None if clients keep nothing.
        num_clients: The number of all clients, or None if any number works.
        facts: The algorithm, its settings and the model, which are only shown.
        model: The model that it trains. `run` evaluates it on `validation_data`.
        client_bytes: Bytes that each client of a round would receive and send. None if
            shapes are not fixed, or if the process was not built by `build_process`.
        personal_weights: The computation (<weights, K> -> weights) of a client's own
            weights from the server's weights and the values that the client keeps. None
            if clients have no weights of their own. See `evaluate_personal`.
        has_client_metrics: Whether `next` returns the metrics of each client.
        trace_client_metrics: Returns the `next` that does so. None if the process was
            not built by `build_process`.
        epochs: The passes of a client over its data in a round, which clocks count.
        pace: Returns the process whose clients get orders: see
            `composition.Paces`. None if the process was not built by `build_process`.
    """

    initialize: Any
    next: Any
    privacy: SampledGaussian | TreeGaussian | None = None
    initial_client_state: Any = None
    num_clients: int | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    model: Any = dataclasses.field(default=None, compare=False)
    client_bytes: ClientBytes | None = dataclasses.field(default=None, compare=False)
    personal_weights: Any = dataclasses.field(default=None, compare=False)
    has_client_metrics: bool = False
    trace_client_metrics: Callable[[], Any] | None = dataclasses.field(
        default=None, compare=False
    )
    epochs: int = dataclasses.field(default=1, compare=False)
    pace: "Callable[[Paces], LearningProcess] | None" = dataclasses.field(
        default=None, compare=False
    )

    @tracebacks.shorten
    def with_client_metrics(self) -> "LearningProcess":
        """Return this process with training metrics of each client.

        Its `next` returns one more result, before the metrics: the metrics of each
        client's training, at clients. `run` puts them into `record.client_metrics`. A
        round whose result has values of clients drops no client, whatever
        `max_dropped_clients` is.

        Raises:
            ConfigError: The process was not built by `build_process`.
        """
        if self.has_client_metrics:
            return self
        if self.trace_client_metrics is None:
            raise errors.ConfigError(
                "Expected a process of `build_process`, or of a builder of `learning`,"
                " found one whose computations are its own: return the metrics of"
                " clients from its `next`."
            )
        traced = self.trace_client_metrics()
        return dataclasses.replace(self, next=traced, has_client_metrics=True)

    @override
    def __repr__(self) -> str:
        if not self.facts:
            types = "; ".join(f"{name} {each}" for name, each in self._types().items())
            return f"<learning process: {types}>"
        facts = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        return f"<learning process: {reprs.shorten(facts, 240)}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts("learning process", {**self.facts, **self._types()})

    def _types(self) -> dict[str, str]:
        named = {"initialize": self.initialize, "next": self.next}
        return {name: reprs.shorten(_type_of(comp)) for name, comp in named.items()}


def check_chosen(process: LearningProcess) -> None:
    """Raise ConfigError if a guarantee does not hold for clients of a clock."""
    if process.privacy is not None:
        raise errors.ConfigError(
            "Expected a process without noise, found one whose guarantee assumes"
            f" cohorts that are drawn by chance alone, {process.privacy}: clocks of"
            " devices choose clients by their speed. Leave out the noise, or the"
            " `schedule`, `hours` and `drop_out`."
        )


def build_constants(values: Any) -> Any:
    """Return the computation ( -> S) of a structure of values.

    A structure has numbers and arrays. A function is traced and may also return
    tensors.
    """

    @rtf.computation
    def make() -> Any:
        made = values() if callable(values) else values
        return tf.nest.map_structure(
            lambda value: value if tf.is_tensor(value) else tf.constant(value), made
        )

    return make


def build_initialize(values: Any) -> Any:
    """Return the computation ( -> S@SERVER) of `build_constants`."""
    make = build_constants(values)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(make, fl.SERVER)

    return initialize


def _type_of(comp: Any) -> str:
    return str(getattr(comp, "type_signature", comp))
