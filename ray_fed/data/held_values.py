"""Values at hand: checked within the bounds of the installed context, and counted."""

from collections.abc import Hashable, Sequence
from typing import Any, cast

import federated_language as fl

from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.language.structs import Plain
from ray_fed.values import plain_values, read_limits
from ray_fed.values.columnar_sequence import ColumnarSequence


def hold_values(
    ids: Sequence[Hashable], given: Sequence[object], member: fl.Type
) -> list[Plain]:
    """Return clients' values, plain, in order.

    Args:
        ids: of the clients.
        given: what each has.
        member: the type of each value.

    Raises:
        ValueMismatchError: a value is not of the type, or an iterable has more bytes
            than one sequence may have; its client is named.
    """
    with read_limits.limited(_installed_limits()):
        return [
            plain_values.to_plain(
                value, member, f"what the client with the id {client!r} has"
            )
            for client, value in zip(ids, given, strict=True)
        ]


def _installed_limits() -> read_limits.Limits:
    """Return what may be read, by the context that is installed in this thread."""
    context: Any = fl.framework.get_context_stack().current
    context = getattr(context, "execution_context", context)  # of a federated context
    if isinstance(context, ExecutionContext):
        return context.read_limits
    return read_limits.limits()


def weigh_values(held: Sequence[Plain]) -> list[float] | None:
    """Return how many elements each client's sequences have; None: one has none."""
    counts = [_count_elements(value) for value in held]
    return None if None in counts else cast("list[float]", counts)


def _count_elements(value: Any) -> float | None:
    if isinstance(value, ColumnarSequence):
        return float(max([value.length, *(len(c.rows) for c in value.columns)]))
    if not isinstance(value, tuple):
        return None
    counts = [_count_elements(member) for member in cast("tuple[Any, ...]", value)]
    return sum(known) if (known := [c for c in counts if c is not None]) else None
