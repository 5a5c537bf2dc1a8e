"""Functions that a fusion writes: of constants and a client's data, or of a key."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import federated_language as fl
import numpy as np

from ray_fed.compiler.substitution import select
from ray_fed.language import blocks, type_checks
from ray_fed.plan import plans

flf = fl.framework
Block = flf.ComputationBuildingBlock
_SELECTED = "selected"


def struct_reference(name: str, parts: Sequence[Sequence[Block]]) -> flf.Reference:
    """Return a reference to a struct of structs of what some references stand for."""
    types = [fl.StructType([b.type_signature for b in part]) for part in parts]
    return flf.Reference(name, fl.StructType(types))


def bind(
    parameter: flf.Reference, position: int, references: Sequence[flf.Reference]
) -> list[tuple[str, Block]]:
    """Return locals that give names to the elements of a part of a parameter."""
    return [
        (reference.name, select(select(parameter, position), index))
        for index, reference in enumerate(references)
    ]


def close_over(
    parameter: flf.Reference | None, locals_: list[tuple[str, Block]], result: Block
) -> flf.Lambda:
    """Return a function of a parameter, or of none, with locals."""
    body = flf.Block(locals_, result) if locals_ else result
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


def server_placed(block: Block) -> Block:
    """Return a block, placed at the server unless it is placed."""
    if isinstance(block.type_signature, fl.FederatedType):
        return block
    return flf.create_federated_value(block, fl.SERVER)


def as_passed(block: Block) -> tuple[Block, list[int]]:
    """Return the part of the argument that holds a block, and what to select of it.

    A context passes along placed values, and structs without any, as wholes.
    """
    rest: list[int] = []
    while isinstance(block, flf.Selection) and not flf.contains_federated_types(
        block.source.type_signature
    ):
        rest.insert(0, block.as_index())
        block = block.source
    return block, rest


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What clients' keys select: the arguments of a `federated_select`.

    Attributes:
        function: of state and key; what it captures are constants.
        keys: of clients, see `plans.Selection`.
        max_key: the constant that is the largest key.
        state: the constant that the function takes.
    """

    function: Block
    keys: plans.Path | int
    max_key: flf.Reference
    state: flf.Reference

    @property
    def elements(self) -> fl.SequenceType:
        """The type of what is selected for a client."""
        function = type_checks.function_type(self.function.type_signature)
        return fl.SequenceType(function.result)

    def close(self, constants: Sequence[flf.Reference]) -> plans.Selection:
        """Return the selection as a function of all constants and a key."""
        of_constants = fl.StructType([c.type_signature for c in constants])
        whole = fl.StructType([of_constants, fl.TensorType(np.int32)])
        parameter = flf.Reference(_SELECTED, whole)
        function = type_checks.function_type(self.function.type_signature)
        taken = type_checks.struct_type(cast("fl.Type", function.parameter))
        names = (name for name, _ in taken.items())
        pair = zip(names, [self.state, select(parameter, 1)], strict=True)
        call = flf.Call(self.function, flf.Struct(list(pair)))
        closed = close_over(parameter, bind(parameter, 0, constants), call)
        limit = [constant.name for constant in constants].index(self.max_key.name)
        return plans.Selection(blocks.serialise(closed), self.keys, limit)
