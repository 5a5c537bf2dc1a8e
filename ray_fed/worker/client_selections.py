"""What keys of clients select: evaluated once a key for all clients of a subround."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.executors.selection import split_rows
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, fused, plans
from ray_fed.values.stored import ClientValues
from ray_fed.worker.device_stack import DeviceStack


async def select(
    stack: DeviceStack,
    selection: plans.Selection,
    constants: Sequence[Plain],
    keys: ClientValues,
) -> list[Plain] | plans.NoKernel:
    """Return the sequence that each client's keys select, or why no graph does it.

    Args:
        stack: runs the graph, and holds clients.
        selection: of one key.
        constants: of the kernel, plain or tensors in tuples.
        keys: i32[keys] of each client, plain or a run of clients.
    """
    function = await stack.embed_fused(fused.KeySelection(selection.function))
    if isinstance(function, plans.NoKernel):
        return function
    of_clients: list[NDArray[np.int32]] = list(stack.clients.read_all(keys))
    if not of_clients:
        return []
    flat = np.concatenate(of_clients)
    limit = int(np.asarray(constants[selection.max_key]))
    if len(flat) and not 0 <= flat.min() <= flat.max() <= limit:
        return plans.NoKernel("a key that is out of range")
    different, places = np.unique(flat, return_inverse=True)
    try:
        called = await stack.call_fused(function, constants, different)
    except errors.ClusterError:
        raise
    except Exception as error:
        if diagnostics.is_defect(error):
            raise
        return plans.NoKernel(f"{type(error).__name__} in a selection")
    rows = [tensor[places] for tensor in called.reference]
    return list(split_rows(rows, of_clients))
