"""Cuts a round's argument by clients: pure, by index, nothing copied."""

from collections.abc import Iterator, Sequence

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language import structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.columnar_sequence import ColumnarSequence
from ray_fed.values.stored import ArgumentPart, ClientValues

_BASE_WEIGHT = 10
"""What a client costs beside its rows: about so many rows of a small model."""


def count_clients(arg: Plain, type_spec: fl.Type | None, default: int) -> int:
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

    def note(part_type: fl.Type, part: ArgumentPart) -> None:
        if type_checks.differs_by_client(part_type):
            counts.append((part_type, len(stored.client_sequence(part, part_type))))

    stored.map_placed(note, arg, type_spec)
    if len({count for _, count in counts}) > 1:
        found = ", ".join(f"{count} for `{t}`" for t, count in counts)
        raise errors.CardinalityError(
            "Expected as many values in every argument placed at clients, found"
            f" {found}: pass one value a client."
        )
    return counts[0][1] if counts else default


def weigh_clients(arg: Plain, type_spec: fl.Type | None) -> NDArray[np.float64] | None:
    """Return what each client's work will cost, as far as its data tell.

    Args:
        arg: of `type_spec`.
        type_spec: None for a computation without an argument.

    Returns:
        In client order: rows of the client's sequences, and a base cost. None where no
        sequence is placed at clients, or its size is not known here.
    """
    rows: list[NDArray[np.float64]] = []  # NaN where it is not known
    if type_spec is None:
        return None

    def note(part_type: fl.Type, part: ArgumentPart) -> None:
        if isinstance(part, ClientRun):
            rows.append(np.empty(0) if part.weights is None else part.weights)
        elif type_checks.differs_by_client(part_type) and isinstance(
            part, list | tuple
        ):
            member = type_checks.member_type(part_type)
            rows.append(np.array([_count_rows(v, member) for v in part], np.float64))

    stored.map_placed(note, arg, type_spec)
    told = [counts for counts in rows if not np.isnan(counts).all()]
    if not told or any(np.isnan(counts).any() for counts in told):
        return None  # some clients' data are in files, say
    return _BASE_WEIGHT + np.sum(told, axis=0)


def _count_rows(value: Plain, type_spec: fl.Type) -> int | None:
    if isinstance(value, ColumnarSequence):
        return max([value.length, *(len(column.rows) for column in value.columns)])
    if not isinstance(type_spec, fl.StructType) or not isinstance(value, list | tuple):
        return None
    counts = [
        _count_rows(member, element)
        for member, (_, element) in zip(value, type_spec.items(), strict=True)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def cut_by_weight(weights: Sequence[float], num_runs: int) -> list[range]:
    """Cut items into at most `num_runs` contiguous runs of about equal weight.

    Args:
        weights: of each item, > 0.
        num_runs: >= 1.

    Returns:
        Runs in order, none of them empty; as many as there are items, if those are
        fewer. A run ends at the item whose end is nearest to its share of the sum.
    """
    num_runs = min(num_runs, len(weights))
    ends = np.cumsum(weights)
    runs: list[range] = []
    start = 0
    for index in range(num_runs):
        share = ends[-1] * (index + 1) / num_runs
        last = len(weights) - (num_runs - index - 1)  # one item for each later run
        candidates = ends[start:last]
        stop = start + int(np.argmin(np.abs(candidates - share))) + 1
        runs.append(range(start, stop))
        start = stop
    return runs


def drop_clients(clients: ClientValues, dropped: Sequence[int]) -> ClientValues:
    """Return the values of some clients without the values of dropped clients.

    Args:
        clients: their values, in order.
        dropped: positions of the dropped clients, in order.
    """
    if not dropped:
        return clients
    if isinstance(clients, ClientRun):
        return clients.without(dropped)
    return [member for i, member in enumerate(clients) if i not in dropped]


def without_clients(arg: Plain, type_spec: fl.Type) -> Plain:
    """Return an argument with stand-ins of the same length for values of clients."""

    def leave_out(part_type: fl.Type, part: ArgumentPart) -> ArgumentPart:
        if type_checks.differs_by_client(part_type):
            return stored.StoredClients(None, 0, len(part))
        return part

    return stored.map_placed(leave_out, arg, type_spec)


def join_parts(
    at_server: Iterator[Plain], at_clients: Iterator[Plain], type_spec: fl.Type
) -> Plain:
    """Return a result of its parts; see `compiler.form.ResultParts`.

    Args:
        at_server: the parts that do not differ by client, in order.
        at_clients: the parts that do.
        type_spec: of the result.
    """
    if type_checks.is_placed_struct(type_spec):
        elements = type_checks.struct_type(type_spec).items()
        return tuple(join_parts(at_server, at_clients, e) for _, e in elements)
    if type_checks.differs_by_client(type_spec):
        return next(at_clients)
    return next(at_server)


def join_results(results: list[Plain], type_spec: fl.Type) -> Plain:
    """Return the results of leaves as the result of their cohort.

    Args:
        results: of each leaf, in order, structures as tuples; at least one.
        type_spec: of one result; values at clients are joined, of any other part the
            first is taken, as all are equal.
    """
    if type_checks.is_placed_struct(type_spec):
        struct = type_checks.struct_type(type_spec)
        columns = [
            [structs.struct_elements(result, struct)[index][2] for result in results]
            for index in range(len(struct))
        ]
        return tuple(
            join_results(column, element)
            for column, (_, element) in zip(columns, struct.items(), strict=True)
        )
    if type_checks.differs_by_client(type_spec):
        return [member for result in results for member in result]
    return results[0]
