"""What parts of a learning process hand on: named tuples of tensors."""

from typing import Any, NamedTuple

from typing_extensions import override

from ray_fed.learning.models import ModelWeights
from ray_fed.learning.totals import Totals


class PartStates(NamedTuple):
    """States of the parts that hold neither weights nor optimiser.

    Attributes:
        distribute: of what clients are sent.
        client_work: of the clients' work, as the server keeps it.
        aggregate: of the aggregation, such as a bound that adapts.
    """

    distribute: Any
    client_work: Any
    aggregate: Any


class ServerState(NamedTuple):
    """What the server keeps between rounds: numpy arrays where `next` returns it.

    Attributes:
        weights: of the model.
        optimizer: state of `finalize`; of federated averaging the variables of the
            server's optimiser, in its own order.
        round_index: i32[], rounds done so far.
        parts: states of the other parts; empty structs where they have none.
    """

    weights: ModelWeights
    optimizer: Any
    round_index: Any
    parts: Any = PartStates((), (), ())

    @override
    def __repr__(self) -> str:
        after = f"<server state after {self.round_index} rounds"
        return f"{after}: {self.weights!r}, {len(self.optimizer)} of the optimizer>"


class ServerView(NamedTuple):
    """What `distribute` sees of the state.

    Attributes:
        weights: of the model.
        optimizer: state of `finalize`.
        round_index: i32[], rounds done so far.
    """

    weights: ModelWeights
    optimizer: Any
    round_index: Any


class Measured(NamedTuple):
    """What is summed over clients for the metrics.

    Attributes:
        totals: of loss and metrics.
        counts: i32[] each, by name; may be empty.
    """

    totals: Totals
    counts: Any


class ClientResult(NamedTuple):
    """What a client sends back.

    Attributes:
        update: any struct of tensors, unscaled.
        weight: f32[], >= 0; 0 leaves the client out.
        measured: summed over clients.
    """

    update: Any
    weight: Any
    measured: Measured
