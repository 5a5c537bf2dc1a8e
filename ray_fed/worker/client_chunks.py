"""Work on a contiguous chunk of clients over one executor, the same everywhere.

A local strategy calls these functions in its process, an actor calls them in its own:
so a client's arithmetic, its order and its errors do not depend on where it runs.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import federated_language as fl

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
from ray_fed.language import structs
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import random_keys
from ray_fed.values import read_limits

ExecutorValue = fl.framework.ExecutorValue

ChunkArg: TypeAlias = list[ExecutorValue] | Struct[Any]
"""One value a client of the chunk, or a struct of such lists."""

_MESSAGE_LINES = 3
_BOILERPLATE = (
    "Graph execution error",
    "Detected at node",
    "<stack traces",
    "[[{{node",
)
"""Starts of lines in TensorFlow's messages that tell a user nothing."""
_MARKERS = frozenset("~^ ")
"""Of a line under one of source, in a traceback."""

_NO_MEMORY = "ResourceExhaustedError"
"""TensorFlow's name for it; this module does not load TensorFlow."""

_OWN_ASSERTION = re.compile(r"assertion failed: \[(Expected .+, found .+)\]")
"""What a graph of ray_fed says in full."""

_TAGS = re.compile(r"\{\{function_node [^}]*\}\}\s*|\s*\[Op:[^\]]*\]")


async def embed_members(
    executor: fl.framework.Executor,
    members: Sequence[Plain],
    member: fl.Type,
    first: int = 0,
) -> list[ExecutorValue]:
    """Embed one value a client, in order.

    Args:
        executor: embeds them.
        members: of each client.
        member: type of each.
        first: index of the first of these clients.

    Raises:
        ComputationError: reading a client's value raised, with the client's index.
    """
    embedded: list[ExecutorValue] = []
    for client_index, value in enumerate(members, first):
        await _let_end()
        try:
            embedded.append(await executor.create_value(value, member))
        except errors.ComputationError as error:
            raise error.located(client_index=client_index) from error
    return embedded


async def map_members(
    executor: fl.framework.Executor,
    function: Function | None,
    arg: ChunkArg | None,
    clients: range,
) -> list[ExecutorValue]:
    """Embed a function and call it on each client of a chunk: see `map_embedded`."""
    embedded = None if function is None else await executor.create_value(function)
    return await map_embedded(executor, embedded, arg, clients)


async def map_embedded(
    executor: fl.framework.Executor,
    function: ExecutorValue | None,
    arg: ChunkArg | None,
    clients: range,
) -> list[ExecutorValue]:
    """Call a function on each client of a chunk, in client order.

    Args:
        executor: embeds `arg` and `function`.
        function: None returns the arguments, zipped to structs.
        arg: None for a function of no argument.
        clients: the chunk's place in the cohort.

    Raises:
        ComputationError: the function raised, with the client's index.
    """
    results: list[ExecutorValue] = []
    for position, client_index in enumerate(clients):
        await _let_end()
        try:
            member = None if arg is None else await _member(executor, arg, position)
            if function is not None:
                with random_keys.at_client(client_index):
                    member = await executor.create_call(function, member)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise describe_failure(error, client_index) from error
        if member is None:
            raise errors.UnsupportedError("Expected a function or a value to map.")
        results.append(member)
    return results


async def _member(
    executor: fl.framework.Executor, arg: ChunkArg, position: int
) -> ExecutorValue:
    if isinstance(arg, list):
        return arg[position]
    elements = [
        (name, await _member(executor, element, position))
        for name, element in structs.iter_elements(arg)
    ]
    return await executor.create_struct(structs.Struct(elements))


async def accumulate_members(
    executor: fl.framework.Executor,
    zero: ExecutorValue,
    members: Sequence[ExecutorValue],
    accumulate: ExecutorValue,
    clients: range,
) -> ExecutorValue:
    """Fold the members into zero, in order: the accumulation of one leaf.

    Each call of `accumulate` draws from the key of its client.

    Args:
        executor: embeds the rest.
        zero: U.
        members: T of each client of the leaf.
        accumulate: <U, T> -> U.
        clients: the leaf's place in the cohort.

    Raises:
        ComputationError: `accumulate` raised, with the client's index.
    """
    accumulator = zero
    for client_index, member in zip(clients, members, strict=True):
        await _let_end()
        pair = await executor.create_struct([accumulator, member])
        try:
            with random_keys.at_client(client_index), random_keys.at_step("accumulate"):
                accumulator = await executor.create_call(accumulate, pair)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise describe_failure(error, client_index) from error
    return accumulator


async def _let_end() -> None:
    """End here where nobody waits, or the call was cancelled.

    An executor may answer without waiting, and so without letting its loop cancel.

    Raises:
        ClusterError: nobody waits for this work; see `read_limits.checked`.
    """
    read_limits.check()
    await asyncio.sleep(0)


def describe_failure(
    error: Exception, client_index: int | None
) -> errors.ComputationError:
    """Return what a computation raised as an error that says where, in few lines."""
    lines = [line.strip() for line in error_texts.message_of(error).splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if frames:
        lines = lines[frames[-1] + 2 :]  # a frame has a second line, which may be empty
    told = [line for line in lines if set(line) - _MARKERS]
    told = [line for line in told if not line.startswith(_BOILERPLATE)]
    summary = _TAGS.sub("", " ".join(told[:_MESSAGE_LINES])) or "no message"
    origin = error_texts.origin_of(error) or "a computation"
    said = _OWN_ASSERTION.fullmatch(summary)
    kind = errors.ComputationError
    if isinstance(error, MemoryError) or type(error).__name__ == _NO_MEMORY:
        kind = errors.WorkerMemoryError
    what = f"{origin[0].upper()}{origin[1:]} raised {type(error).__name__}: {summary}"
    failure = kind(
        said[1] if said else what,
        errors.Location(client_index=client_index),
        cause_text=error_texts.traceback_of(error),
    )
    place = error_texts.place_of(error)
    if place and not hasattr(failure, "__notes__"):
        failure.add_note(place)
    return failure
