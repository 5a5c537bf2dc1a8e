"""What keys select, by one graph for all of them, where an executor has such graphs."""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language import blocks, type_checks
from ray_fed.language.blocks import Function
from ray_fed.plan import fused
from ray_fed.values import plain_values
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

flf = fl.framework


async def select_all(
    unplaced: flf.Executor,
    function: Function,
    state: flf.ExecutorValue,
    all_keys: Sequence[Any],
) -> list[ColumnarSequence] | None:
    """Return what the keys of each client select; None where no graph does it.

    Args:
        unplaced: runs the graph, or knows none.
        function: of state and key; draws nothing.
        state: embedded in `unplaced`.
        all_keys: of each client.
    """
    if not any(map(len, all_keys)):
        return None
    different, places = np.unique(
        np.concatenate([np.asarray(keys, np.int32) for keys in all_keys]),
        return_inverse=True,
    )
    try:
        type_spec = state.type_signature
        plain = plain_values.to_plain(await state.compute(), type_spec, "the state")
        constants = (plain, *(value for _, _, value in function.captured))
        work = fused.KeySelection(blocks.serialise(_close(function, type_spec)))
        graph = await unplaced.create_value(work)
        taken = type_checks.function_type(graph.type_signature).parameter
        given = await unplaced.create_value(
            fused.Arguments((constants, different)), taken
        )
        found = await (await unplaced.create_call(graph, given)).compute()
    except errors.ClusterError:
        raise
    except Exception:  # noqa: BLE001 (one call a key says what it is)
        return None
    return split_rows([tensor[places] for tensor in found], all_keys)


def split_rows(
    rows: Sequence[NDArray[Any]], all_keys: Sequence[Any]
) -> list[ColumnarSequence]:
    """Return each client's elements as a sequence.

    Args:
        rows: each tensor of the elements of all clients, one after another.
        all_keys: of each client, as many as its elements.
    """
    ends = itertools.accumulate(map(len, all_keys), initial=0)
    return [
        ColumnarSequence(tuple(Column(row[start:stop]) for row in rows), stop - start)
        for start, stop in itertools.pairwise(ends)
    ]


def check_keys(all_keys: Sequence[Any], max_key: int) -> None:
    """Check each client's keys.

    Raises:
        ComputationError: a key is out of range; with the client's index.
    """
    for client_index, keys in enumerate(all_keys):
        if any(not 0 <= key <= max_key for key in keys):
            raise errors.ComputationError(
                f"Expected keys from 0 to max_key={max_key}, found"
                f" {np.asarray(keys).tolist()}",
                errors.Location(client_index=client_index),
            )


def _close(function: Function, state: fl.Type) -> flf.Lambda:
    """Return the function as one of constants, state and captures, and a key."""
    captured = [
        (name, blocks.parse_type(type_bytes))
        for name, type_bytes, _ in function.captured
    ]
    constants = fl.StructType([state, *(type_spec for _, type_spec in captured)])
    parameter = flf.Reference(
        "selected", fl.StructType([constants, fl.TensorType(np.int32)])
    )
    held = flf.Selection(parameter, index=0)
    locals_ = [
        (name, flf.Selection(held, index=index))
        for index, (name, _) in enumerate(captured, 1)
    ]
    block = function.building_block()
    taken = type_checks.function_type(block.type_signature).parameter
    names = [name for name, _ in type_checks.struct_type(cast("Any", taken)).items()]
    pair = [flf.Selection(held, index=0), flf.Selection(parameter, index=1)]
    call = flf.Call(block, flf.Struct(list(zip(names, pair, strict=True))))
    body = flf.Block(locals_, call) if locals_ else call
    return flf.Lambda(parameter.name, parameter.type_signature, body)
