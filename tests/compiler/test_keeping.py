"""What stages keep for later ones, as printed blocks."""

from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import KeepingStage, MergeableCompChain
from ray_fed.compiler.fuse import fuse
from ray_fed.compiler.split import compile_to_chain
from ray_fed.plan.plans import Kernel

FLOATS = fl.FederatedType(np.float32, fl.CLIENTS)
UNKNOWN = fl.FederatedType(fl.TensorType(np.float32, [None]), fl.CLIENTS)
PAIRS = fl.FederatedType(fl.StructType([np.float32, np.float32]), fl.CLIENTS)


@rtf.computation(np.float32)
def train(x: Any) -> Any:
    return x * 2


@rtf.computation(np.float32, np.float32)
def clip(x: Any, bound: Any) -> Any:
    return tf.minimum(x, bound)


@rtf.computation(np.float32)
def train_two(x: Any) -> Any:
    return x * 2, x * 3


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


def _names(chain: MergeableCompChain) -> list[tuple[int, int]]:
    """Return how many values each part takes and emits."""
    return [
        (0, 0) if keeping is None else (len(keeping.takes), len(keeping.emits))
        for keeping in _keepings(chain)
    ]


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
    assert (first.takes, first.emits, first.member_bytes) == ((), ("v0",), 4)
    assert _print(first).endswith(" in <federated_zip_at_server(<v1>),v0>))")
    assert second is not None
    assert (second.takes, second.emits) == (("v0",), ())
    assert _print(second).startswith(
        "(pair -> (let argument=pair[0],merged=pair[1],kept=pair[2],v0=kept[0],"
    )
    assert _print(second).count("comp#") == 1  # clip alone
    assert after is None


def test_kernels_return_and_take_what_is_kept() -> None:
    first, second = (stage.keeping for stage in _chain(trained_twice_used).stages)
    assert first is not None
    assert second is not None

    emitting, taking = fuse(first.computation), fuse(second.computation)

    assert isinstance(emitting, Kernel)
    assert (emitting.num_aggregations, emitting.num_kept) == (1, 1)
    assert isinstance(taking, Kernel)
    assert (taking.data, taking.num_kept) == (((2, 0),), 0)


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


def test_a_struct_is_kept_whole_where_stages_select_from_it() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        first = fl.federated_map(train_two, x)[0]
        bound = fl.federated_broadcast(fl.federated_max(first))
        return fl.federated_sum(fl.federated_map(clip, (first, bound)))

    chain = _chain(comp)

    assert _names(chain) == [(0, 1), (1, 0), (0, 0)]
    assert chain.kept_member_bytes == 8


def test_values_of_unknown_size_are_not_kept() -> None:
    @fl.federated_computation(UNKNOWN)
    def comp(x: Any) -> Any:
        reversed_ = fl.federated_map(reverse, x)
        one = fl.federated_map(add_up, (reversed_, fl.federated_value(1.0, fl.CLIENTS)))
        top = fl.federated_broadcast(fl.federated_max(one))
        return fl.federated_sum(fl.federated_map(add_up, (reversed_, top)))

    assert _keepings(_chain(comp)) == [None, None, None]


def test_a_later_stage_keeps_what_it_did_itself() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        trained = fl.federated_map(train, x)
        bound = fl.federated_broadcast(fl.federated_max(trained))
        clipped = fl.federated_map(clip, (trained, bound))
        total = fl.federated_broadcast(fl.federated_sum(clipped))
        return fl.federated_max(fl.federated_map(clip, (clipped, total)))

    assert _names(_chain(comp)) == [(0, 1), (1, 1), (1, 0), (0, 0)]


def test_results_of_clients_are_kept_for_the_end() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        trained = fl.federated_map(train, x)
        return trained, fl.federated_sum(trained)

    chain = _chain(comp)

    assert _names(chain) == [(0, 1), (1, 0)]
    assert chain.parts is not None
    assert chain.parts.names == ("v0",)


def test_first_stage_evaluates_what_clients_have_in_the_result() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        trained, other = (fl.federated_map(train_two, x)[i] for i in (0, 1))
        own = fl.federated_map(train, other)
        total = fl.federated_sum(trained)
        return total, fl.federated_map(clip, (own, own)), x

    chain = _chain(comp)

    assert _names(chain) == [(0, 1), (1, 0)]
    assert chain.kept_member_bytes == 4  # of `clip` alone
    assert chain.parts is not None
    assert chain.parts.names is None  # as `x` is none of them
    assert "comp#" not in _print(chain.parts.keeping)
    assert chain.parts.at_server is not None
    at_server, at_clients = (
        str(part.type_signature.result)
        for part in (chain.parts.at_server, chain.parts.at_clients)
    )
    assert at_server == "<float32@SERVER>"
    assert at_clients == "<{float32}@CLIENTS,{float32}@CLIENTS>"


def test_what_depends_on_all_that_was_merged_is_left_for_the_end() -> None:
    @fl.federated_computation(FLOATS)
    def comp(x: Any) -> Any:
        trained = fl.federated_map(train, x)
        total = fl.federated_broadcast(fl.federated_sum(trained))
        return fl.federated_map(clip, (trained, total))

    chain = _chain(comp)

    assert _names(chain) == [(0, 1), (1, 0)]
    assert chain.parts is not None
    assert chain.parts.names is None
    assert _print(chain.parts.keeping).count("comp#") == 1  # clip


def test_a_result_without_values_of_clients_has_no_parts() -> None:
    assert _chain(trained_twice_used).parts is None
