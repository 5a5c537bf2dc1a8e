"""Cuts a round's argument by clients: pure, by index, nothing copied."""

from typing import Any

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.values as values


def count_clients(arg: Any, type_spec: fl.Type | None, default: int) -> int:
    """Return the size of the cohort that an argument brings.

    Args:
        arg: of `type_spec`.
        type_spec: None for a computation without an argument.
        default: for an argument without client values.

    Raises:
        CardinalityError: client values in the argument differ in number.
        ValueMismatchError: a value for clients is no sequence.
    """
    if type_spec is None:
        return default
    counts: list[tuple[fl.Type, int]] = []

    def note(part_type: fl.Type, part: Any) -> Any:
        if values.differs_by_client(part_type):
            counts.append((part_type, len(values.client_sequence(part, part_type))))
        return part

    values.map_placed(note, arg, type_spec)
    if len({count for _, count in counts}) > 1:
        found = ", ".join(f"{count} for `{t}`" for t, count in counts)
        raise errors.CardinalityError(
            "Expected as many values in every argument placed at clients, found"
            f" {found}: pass one value a client."
        )
    return counts[0][1] if counts else default


def slice_clients(arg: Any, type_spec: fl.Type | None, clients: range) -> Any:
    """Return an argument with the values of some contiguous clients only."""
    if type_spec is None:
        return None

    def cut(part_type: fl.Type, part: Any) -> Any:
        if values.differs_by_client(part_type):
            return part[clients.start : clients.stop]
        return part

    return values.map_placed(cut, arg, type_spec)


def join_results(results: list[Any], type_spec: fl.Type) -> Any:
    """Return the results of leaves as the result of their cohort.

    Args:
        results: of each leaf, in order, structures as tuples; at least one.
        type_spec: of one result; values at clients are joined, of any other part the
            first is taken, as all are equal.
    """
    if isinstance(type_spec, fl.StructType) and fl.framework.contains_federated_types(
        type_spec
    ):
        columns = [
            [values.struct_elements(result, type_spec)[index][2] for result in results]
            for index in range(len(type_spec))
        ]
        return tuple(
            join_results(column, element)
            for column, (_, element) in zip(columns, type_spec.items(), strict=True)
        )
    if values.differs_by_client(type_spec):
        return [member for result in results for member in result]
    return results[0]
