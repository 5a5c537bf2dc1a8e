"""Whether the types of a learning process's parts go together, and which they are."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.learning.models import Model
from ray_fed.learning.processes import Part


@dataclasses.dataclass(frozen=True)
class PartTypes:
    """Members of what clients return.

    Attributes:
        result: a `ClientResult`.
        kept: what clients keep over rounds; None where they keep nothing.
    """

    result: Any
    kept: Any

    @property
    def update(self) -> fl.Type:
        """The type of an update."""
        return self.result.update

    @property
    def weight(self) -> fl.Type:
        """The type of its weight."""
        return self.result.weight

    def check_aggregation(self, aggregate: Part) -> None:
        """Raise ValueMismatchError unless a part takes the clients' updates."""
        given = [at_clients(self.update), at_clients(self.weight)]
        _, *results = _check("aggregate", aggregate, given, 2)
        for result in results:
            _expect_placed("aggregate", result, fl.SERVER)

    def check_finalization(self, aggregate: Part, finalize: Part) -> None:
        """Raise ValueMismatchError unless a part takes what another aggregated."""
        weights = finalize.next.type_signature.parameter[1]
        merged = aggregate.next.type_signature.result[1]
        _, result = _check("finalize", finalize, [weights, merged], 1)
        if not weights.is_assignable_from(result):
            raise errors.ValueMismatchError(
                f"Expected `finalize` to return weights of type `{weights}`, as it"
                f" takes, found `{result}`."
            )


def read_types(
    model: Model, view: fl.Type, distribute: Part, client_work: Part
) -> PartTypes:
    """Return the types of what clients return, once they are checked.

    Args:
        model: whose data clients have.
        view: what `distribute` is given.
        distribute: of `build_process`.
        client_work: of `build_process`.

    Raises:
        ValueMismatchError: the types of these parts do not go together.
    """
    _, sent = _check("distribute", distribute, [at_server(view)], 1)
    _expect_placed("distribute", sent, fl.CLIENTS)
    parameter = client_work.next.type_signature.parameter
    kept = [parameter[2]] if len(parameter) == 4 else []  # noqa: PLR2004 (S, B, K, data)
    given = [sent, *kept, model.data_type]
    _, result, *still_kept = _check("client_work", client_work, given, 1 + len(kept))
    _expect_placed("client_work", result, fl.CLIENTS)
    for taken, returned in zip(kept, still_kept, strict=True):
        if not taken.is_assignable_from(returned):
            raise errors.ValueMismatchError(
                f"Expected `client_work` to return what clients keep as `{taken}`, as"
                f" it takes it, found `{returned}`."
            )
    names = [name for name, _ in getattr(result.member, "items", list)()]
    if names != ["update", "weight", "measured"]:
        raise errors.ValueMismatchError(
            "Expected `client_work` to return a ClientResult of each client, found"
            f" `{result}`."
        )
    return PartTypes(result.member, kept[0].member if kept else None)


def at_server(member: fl.Type) -> fl.FederatedType:
    """Return the type of a value at the server."""
    return fl.FederatedType(member, fl.SERVER)


def at_clients(member: fl.Type) -> fl.FederatedType:
    """Return the type of one value for each client."""
    return fl.FederatedType(member, fl.CLIENTS)


def _check(
    name: str, part: Part, given: Sequence[fl.Type], num_results: int
) -> list[Any]:
    """Return the types of what a part returns, of which the first is its state."""
    state = part.initialize.type_signature.result
    _expect_placed(f"{name}.initialize", state, fl.SERVER)
    signature = part.next.type_signature
    expected = fl.StructType([state, *given])
    if signature.parameter is None or not signature.parameter.is_assignable_from(
        expected
    ):
        raise errors.ValueMismatchError(
            f"Expected `{name}.next` to take `{expected}`, found"
            f" `{signature.parameter}`."
        )
    results = [t for _, t in getattr(signature.result, "items", list)()]
    if len(results) != num_results + 1 or not state.is_assignable_from(results[0]):
        raise errors.ValueMismatchError(
            f"Expected `{name}.next` to return its state, `{state}`, and"
            f" {num_results} more, found `{signature.result}`."
        )
    return results


def _expect_placed(name: str, found: Any, placement: Any) -> None:
    if not isinstance(found, fl.FederatedType) or found.placement is not placement:
        raise errors.ValueMismatchError(
            f"Expected `{name}` to return a value at {placement}, found `{found}`."
        )


def count_bytes(type_spec: Any) -> int:
    """Return how many bytes values of a type have, whose shapes are known."""
    if isinstance(type_spec, fl.StructType):
        return sum(count_bytes(member) for _, member in type_spec.items())
    return math.prod(type_spec.shape) * type_spec.dtype.itemsize
