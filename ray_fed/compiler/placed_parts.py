"""The placed parts of a result: those that differ by client, and the others.

<state@SERVER, <kept@CLIENTS, metrics@SERVER>>   ->   at_server   state, metrics
                                                      at_clients  kept
"""

from collections.abc import Iterator, Sequence

import federated_language as fl

from ray_fed.compiler.substitution import select
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock


def at_server(result: Block) -> list[Block]:
    """Return the parts that do not differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if not type_checks.differs_by_client(part.type_signature)
    ]


def at_clients(result: Block) -> list[Block]:
    """Return the parts that differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if type_checks.differs_by_client(part.type_signature)
    ]


def struct(parts: Sequence[Block]) -> flf.Struct:
    """Return parts as a struct without names."""
    return flf.Struct([(None, part) for part in parts])


def _parts(block: Block) -> Iterator[Block]:
    type_spec = block.type_signature
    if not type_checks.is_placed_struct(type_spec):
        yield block
        return
    for index in range(len(type_checks.struct_type(type_spec))):
        yield from _parts(select(block, index))
