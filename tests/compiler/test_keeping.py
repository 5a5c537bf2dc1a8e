"""What stages keep for later ones, as printed blocks."""

from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import KeepingStage, MergeableCompChain
from ray_fed.compiler.split import compile_to_chain

FLOATS = fl.FederatedType(np.float32, fl.CLIENTS)
UNKNOWN = fl.FederatedType(fl.TensorType(np.float32, [None]), fl.CLIENTS)
PAIRS = fl.FederatedType(fl.StructType([np.float32, np.float32]), fl.CLIENTS)


@rtf.computation(np.float32)
def train(x: Any) -> Any:
    return x * 2


@rtf.computation(np.float32, np.float32)
def clip(x: Any, bound: Any) -> Any:
    return tf.minimum(x, bound)


@rtf.computation(fl.TensorType(np.float32, [None]))
def reverse(x: Any) -> Any:
    return x[::-1]


@rtf.computation(fl.TensorType(np.float32, [None]), np.float32)
def add_up(x: Any, y: Any) -> Any:
    return x[0] + y


def _chain(comp: Any) -> MergeableCompChain:
    return compile_to_chain(comp)


def _keepings(chain: MergeableCompChain) -> list[KeepingStage | None]:
    after = chain.parts and chain.parts.keeping
    return [*(stage.keeping for stage in chain.stages), after]


def _print(keeping: KeepingStage | None) -> str:
    assert keeping is not None
    block = keeping.computation.to_building_block()
    return block.compact_representation()


@fl.federated_computation(FLOATS)
def trained_twice_used(x: Any) -> Any:
    trained = fl.federated_map(train, x)
    bound = fl.federated_broadcast(fl.federated_max(trained))
    return fl.federated_sum(fl.federated_map(clip, (trained, bound)))


def test_first_stage_returns_what_the_second_takes() -> None:
    first, second, after = _keepings(_chain(trained_twice_used))

    assert first is not None
    assert (first.loads, first.saves, first.member_bytes) == ((), ("v0",), 4)
    assert _print(first).endswith(" in <federated_zip_at_server(<v1>),v0>))")
    assert second is not None
    assert (second.loads, second.saves) == (("v0",), ())
    assert _print(second).startswith(
        "(pair -> (let argument=pair[0],merged=pair[1],kept=pair[2],v0=kept[0],"
    )
    assert _print(second).count("comp#") == 1  # clip alone
    assert after is None


def test_work_that_one_stage_alone_needs_is_not_kept() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        bound = fl.federated_broadcast(fl.federated_max(fl.federated_map(train, x)))
        return fl.federated_sum(fl.federated_map(clip, (x, bound)))

    assert _keepings(_chain(comp)) == [None, None, None]


def test_selections_from_the_argument_are_not_kept() -> None:
    @fl.federated_computation(PAIRS)
    def comp(pairs: Any) -> Any:
        bound = fl.federated_broadcast(fl.federated_max(pairs[0]))
        return fl.federated_sum(fl.federated_map(clip, (pairs[0], bound)))

    assert _keepings(_chain(comp)) == [None, None, None]


def test_values_of_unknown_size_are_not_kept() -> None:
    @fl.federated_computation(UNKNOWN)
    def comp(x: Any) -> Any:
        reversed_ = fl.federated_map(reverse, x)
        one = fl.federated_map(add_up, (reversed_, fl.federated_value(1.0, fl.CLIENTS)))
        top = fl.federated_broadcast(fl.federated_max(one))
        return fl.federated_sum(fl.federated_map(add_up, (reversed_, top)))

    assert _keepings(_chain(comp)) == [None, None, None]
