"""Computations survive the way over the wire."""

from collections.abc import Callable

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.language import blocks

flf = fl.framework
_IDENTITY = flf.create_identity(fl.TensorType(np.int32))


def test_bytes_of_a_block_are_always_the_same() -> None:
    again = flf.create_identity(fl.TensorType(np.int32))

    assert blocks.serialize(_IDENTITY) == blocks.serialize(again)


def test_type_comes_back_without_its_python_container() -> None:
    type_spec = fl.StructWithPythonType([("a", np.int32)], dict)

    parsed = blocks.parse_type(blocks.serialize_type(type_spec))

    assert parsed == fl.StructType([("a", np.int32)])


def _lets(depth: int) -> flf.ComputationBuildingBlock:
    one = flf.Literal(1, fl.TensorType(np.int32))
    block: flf.ComputationBuildingBlock = one
    for index in range(depth):
        block = flf.Block([(f"x{index}", one)], block)
    return block


def _structs(depth: int) -> flf.ComputationBuildingBlock:
    block: flf.ComputationBuildingBlock = flf.Literal(1, fl.TensorType(np.int32))
    for _ in range(depth):
        block = flf.Struct([block])
    return block


@pytest.mark.claim("semantics.14")
@pytest.mark.parametrize(
    "nested", [pytest.param(_lets, id="lets"), pytest.param(_structs, id="structs")]
)
def test_block_that_nests_too_deep_for_protobuf_is_a_compile_error(
    nested: Callable[[int], flf.ComputationBuildingBlock],
) -> None:
    block = nested(100)

    with pytest.raises(errors.CompileError, match="name intermediate results"):
        blocks.serialize(block)


@pytest.mark.claim("semantics.15")
def test_block_of_many_locals_is_not_too_deep() -> None:
    one = flf.Literal(1, fl.TensorType(np.int32))
    block = flf.Block([(f"x{index}", one) for index in range(1000)], one)

    parsed = blocks.parse_block(blocks.serialize(block))

    assert parsed.compact_representation() == block.compact_representation()


def test_show_block_cuts_long_blocks() -> None:
    literal = flf.Literal(1, fl.TensorType(np.int32))

    shown = blocks.show_block(flf.Struct([literal] * 500))

    assert shown.startswith("<1,1,")
    assert shown.endswith("...")
    assert len(shown) < 250
