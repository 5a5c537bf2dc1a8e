"""Learning processes: a federated algorithm as two computations, with its facts."""

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
    """The bytes that one client of a real federation would receive and send in a round.

    Attributes:
        sent: Size of the tensors from the server that the client's work uses.
        returned: Size of the client's result: its update in the form that the
            aggregator sends, its weight, and the sums behind metrics.
    """

    sent: int
    returned: int


class Paces(NamedTuple):
    """The orders that a schedule of `devices` gives to clients in a round.

    A process with orders is called paced. It tells each client from which earlier state
    of the server to begin, or how many epochs to do:

        next  (<state@SERVER, <state, ...>@SERVER, T@CLIENTS, data> -> as before)

    The type T of an order is `<start=i32, scale=f32>` if there are earlier states, and
    `<epochs=i32>` if epochs are limited.

    Attributes:
        num_starts: Number of earlier states. A client works from the state at index
            `start`, and its update is multiplied by `scale`. 0: all work from the
            newest state.
        moves_to: Whether an update leads from the newest state to the client's weights.
            Otherwise it is the change from the client's start.
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
        initialize: Computation of the first state, ( -> state@SERVER).
        next: Computation of one round, from the state and all clients' data. The
            function that builds the process describes the results.
        privacy: Privacy that its rounds spend, or None if they protect no client.
        initial_client_state: Values of a client before its first round, as NumPy
            arrays. None: clients keep nothing between rounds.
        num_clients: Number of all clients, or None if any number works.
        facts: Texts on the algorithm, its settings and the model, which are only shown.
        model: Model that it trains. `run` evaluates it on `validation_data`.
        client_bytes: Bytes that each client of a round would receive and send. None if
            shapes are not fixed, or if `build_process` did not make the process.
        personal_weights: Computation (<weights, K> -> weights) of a client's own
            weights from the server's weights and the client's kept values. None:
            clients have no weights of their own. See `evaluate_personal`.
        has_client_metrics: Whether `next` returns the metrics of each client.
        trace_client_metrics: Function that returns a `next` with the metrics of each
            client. None unless `build_process` made the process.
        epochs: Number of a client's passes over its data in a round, which clocks
            count.
        pace: Function that returns the process with the orders of `processes.Paces`.
            None unless `build_process` made the process.
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
        client's training, at clients. `run` puts them into `record.client_metrics`. The
        round then drops no client, whatever `max_dropped_clients` is.

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
    """Raise ConfigError for a process with noise, whose clients no clock may choose."""
    if process.privacy is not None:
        raise errors.ConfigError(
            "Expected a process without noise, found one whose guarantee assumes"
            f" cohorts that are drawn by chance alone, {process.privacy}: clocks of"
            " devices choose clients by their speed. Leave out the noise, or the"
            " `schedule`, `hours` and `drop_out`."
        )


def build_constants(values: Any) -> Any:
    """Return the computation ( -> S) of a structure of numbers and arrays.

    `values` may be a function, which is traced and may also return tensors.
    """

    @rtf.computation
    def make() -> Any:
        made = values() if callable(values) else values
        return tf.nest.map_structure(
            lambda value: value if tf.is_tensor(value) else tf.constant(value), made
        )

    return make


def build_initialize(values: Any) -> Any:
    """Return the computation of `build_constants` at the server, ( -> S@SERVER)."""
    make = build_constants(values)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(make, fl.SERVER)

    return initialize


def _type_of(comp: Any) -> str:
    return str(getattr(comp, "type_signature", comp))
