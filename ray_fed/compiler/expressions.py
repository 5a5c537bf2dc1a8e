"""Builds and rewrites building blocks, and finds the names that they use."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl

from ray_fed.language import blocks

flf = fl.framework
Block = flf.ComputationBuildingBlock
_Replace: TypeAlias = Callable[[Block], Block | None]


def select(source: Block, index: int) -> Block:
    """Return the element of a `Struct` block, or a `Selection` from any other block."""
    if isinstance(source, flf.Struct):
        return cast("Any", source)[index]
    return flf.Selection(source, index=index)


def close_over(
    parameter: flf.Reference | None, locals_: Sequence[tuple[str, Block]], result: Block
) -> flf.Lambda:
    """Return a function of a parameter, if any, with locals and a result."""
    body = flf.Block(locals_, result) if locals_ else result
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


def zip_at_server(values: Sequence[Block]) -> Block:
    """Return a block that zips values at the server to one struct at the server."""
    if not values:
        return flf.create_federated_value(flf.Struct([]), fl.SERVER)
    return flf.create_federated_zip(flf.Struct(list(values)))


def called_uris(block: Block) -> set[str]:
    """Return the URIs of all intrinsics in a building block."""
    parts = blocks.find_blocks(block, lambda _: True)
    return {part.uri for part in parts if isinstance(part, flf.Intrinsic)}


def root_name(block: Block) -> str | None:
    """Return "x" for a block `x` or a selection such as `x[0][1]`, otherwise None."""
    while isinstance(block, flf.Selection):
        block = block.source
    return block.name if isinstance(block, flf.Reference) else None


def free_references(block: Block) -> frozenset[str]:
    """Return the names that a building block refers to but does not bind."""
    match block:
        case flf.Reference():
            return frozenset([block.name])
        case flf.Lambda():
            return free_references(block.result) - {block.parameter_name or ""}
        case flf.Block():
            free: set[str] = set()
            bound: set[str] = set()
            for name, local in block.locals:
                free |= free_references(local) - bound
                bound.add(name)
            return frozenset(free | (free_references(block.result) - bound))
        case _:
            by_child = [free_references(child) for child in block.children()]
            return frozenset[str]().union(*by_child)


def replace_free(
    block: Block, replace: _Replace, bound: frozenset[str] = frozenset()
) -> Block:
    """Return a copy of a block with its free references replaced.

    `replace` maps a free reference to the block that replaces it, or to None to keep
    it. For a selection from a reference, such as `x[0][1]`, it gets the whole
    selection. The names `bound` are bound around the block, so they are not free.
    """
    root = root_name(block)
    if root is not None:
        return block if root in bound else replace(block) or block
    match block:
        case flf.Lambda():
            inner = bound | {block.parameter_name or ""}
            body = replace_free(block.result, replace, inner)
            return flf.Lambda(block.parameter_name, block.parameter_type, body)
        case flf.Block():
            locals_: list[tuple[str, Block]] = []
            for name, local in block.locals:
                locals_.append((name, replace_free(local, replace, bound)))
                bound |= {name}
            return flf.Block(locals_, replace_free(block.result, replace, bound))
        case flf.Struct():
            elements = [(n, replace_free(e, replace, bound)) for n, e in block.items()]
            container = cast("Any", block.type_signature).python_container
            return flf.Struct(elements, container)
        case flf.Call():
            function = replace_free(block.function, replace, bound)
            if block.argument is None:
                return flf.Call(function)
            return flf.Call(function, replace_free(block.argument, replace, bound))
        case flf.Selection():
            source = replace_free(block.source, replace, bound)
            return flf.Selection(source, index=block.as_index())
        case _:
            return block


def needed_names(
    roots: Iterable[str], calls: Mapping[str, Block], known: Container[str] = ()
) -> frozenset[str]:
    """Return the names of the calls that `roots` depend on, including `roots`.

    Names that are not in `calls` are left out. The values of `known` names exist
    already, so the names that their calls depend on are not followed.
    """
    needed: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in calls and name not in needed:
            needed.add(name)
            if name not in known:
                pending.extend(free_references(calls[name]))
    return frozenset(needed)
