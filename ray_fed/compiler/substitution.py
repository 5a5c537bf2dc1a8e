"""Replaces what a building block captures, and lists the names that it uses itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl

flf = fl.framework
Block = flf.ComputationBuildingBlock
_Replace: TypeAlias = Callable[[Block], Block | None]


def replace_free(
    block: Block, replace: _Replace, bound: frozenset[str] = frozenset()
) -> Block:
    """Replace what refers to, or selects from, names that a block does not bind.

    Args:
        block: to return a changed copy of.
        replace: takes a free reference, or the longest selection from one; returns
            None for what is to stay.
        bound: names that are bound around the block.
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
        case _:
            return _replace_in_children(block, replace, bound)


def _replace_in_children(
    block: Block, replace: _Replace, bound: frozenset[str]
) -> Block:
    match block:
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


def root_name(block: Block) -> str | None:
    """Return the name that a block refers to or selects from."""
    while isinstance(block, flf.Selection):
        block = block.source
    return block.name if isinstance(block, flf.Reference) else None


def bound_names(block: Block) -> set[str]:
    """Return the names of all parameters and locals in a building block."""
    return _found(block, _names)


def called_uris(block: Block) -> set[str]:
    """Return the uris of all intrinsics in a building block."""
    return _found(
        block, lambda part: [part.uri] if isinstance(part, flf.Intrinsic) else []
    )


def find_blocks(block: Block, is_wanted: Callable[[Block], bool]) -> list[Block]:
    """Return the blocks in a building block, itself included, that a test accepts."""
    found: list[Block] = []

    def note(part: Block) -> tuple[Block, bool]:
        if is_wanted(part):
            found.append(part)
        return part, False

    flf.transform_postorder(block, note)
    return found


def _found(block: Block, of: Callable[[Block], Iterable[str]]) -> set[str]:
    parts = find_blocks(block, lambda _: True)
    return {name for part in parts for name in of(part)}


def _names(part: Block) -> list[str]:
    match part:
        case flf.Lambda(parameter_name=str(name)):
            return [name]
        case flf.Block():
            return [name for name, _ in part.locals]
        case _:
            return []


def zip_at_server(values: Sequence[Block]) -> Block:
    """Return server-placed values as one, of a struct; there may be none."""
    if not values:
        return flf.create_federated_value(flf.Struct([]), fl.SERVER)
    return flf.create_federated_zip(flf.Struct(list(values)))


def select(source: Block, index: int) -> Block:
    """Return an element of a struct, without a selection where it is written out."""
    if isinstance(source, flf.Struct):
        return cast("Any", source)[index]
    return flf.Selection(source, index=index)
