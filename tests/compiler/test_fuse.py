"""The fusion of an `up_to_merge` into one function of a client, as printed blocks."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.plan.plans as plans
from ray_fed.compiler.fuse import fuse
from ray_fed.compiler.split import compile_to_chain, compile_to_mergeable_comp_form
from ray_fed.language import blocks

AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.int32, fl.CLIENTS, all_equal=True)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)
SEQUENCES = fl.FederatedType(fl.SequenceType(np.int32), fl.CLIENTS)
PAIR = fl.StructType([np.int32, np.int32])


@fl.federated_computation(PAIR)
def left(pair: Any) -> Any:
    return pair[0]


@fl.federated_computation(np.int32)
def double_up(x: Any) -> Any:
    return (x, x)


@fl.federated_computation
def three() -> Any:
    return 3


@fl.federated_computation(AT_SERVER, AT_CLIENTS)
def with_state(state: Any, data: Any) -> Any:
    sent = fl.federated_broadcast(fl.federated_map(double_up, state))
    return fl.federated_sum(
        fl.federated_map(left, (fl.federated_map(left, sent), data))
    )


@fl.federated_computation(AT_CLIENTS)
def two_aggregations(data: Any) -> Any:
    return fl.federated_sum(data), fl.federated_aggregate(
        data, 7, left, left, double_up
    )


@fl.federated_computation(np.int32, AT_CLIENTS)
def capturing(k: Any, data: Any) -> Any:
    @fl.federated_computation(np.int32)
    def pair_up(x: Any) -> Any:
        return (x, k)

    return fl.federated_sum(fl.federated_map(pair_up, data))


@fl.federated_computation(np.int32, AT_CLIENTS)
def accumulating_with_a_capture(k: Any, data: Any) -> Any:
    @fl.federated_computation(PAIR)
    def count(pair: Any) -> Any:
        return k

    return fl.federated_aggregate(data, 0, count, left, double_up)


@fl.federated_computation(ALL_EQUAL, AT_CLIENTS)
def with_all_equal(common: Any, data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(left, (common, data)))


@fl.federated_computation(PAIR, AT_CLIENTS)
def capturing_an_element(pair: Any, data: Any) -> Any:
    @fl.federated_computation(np.int32)
    def pair_up(x: Any) -> Any:
        return (x, pair[1])

    return fl.federated_sum(fl.federated_map(pair_up, data))


@fl.federated_computation(AT_CLIENTS)
def of_two_stages(data: Any) -> Any:
    total = fl.federated_broadcast(fl.federated_sum(data))
    return fl.federated_sum(fl.federated_map(left, (data, total)))


@fl.federated_computation
def without_argument() -> Any:
    at_clients = fl.federated_eval(three, fl.CLIENTS)
    return fl.federated_sum(
        fl.federated_map(left, (at_clients, fl.federated_value(5, fl.CLIENTS)))
    )


@fl.federated_computation(fl.SequenceType(np.int32))
def sequence_sum(xs: Any) -> Any:
    return fl.sequence_sum(xs)


@fl.federated_computation(SEQUENCES)
def summing_sequences(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(sequence_sum, data))


@fl.federated_computation(fl.FederatedType(fl.SequenceType(np.int32), fl.SERVER))
def broadcasting_a_sequence(xs: Any) -> Any:
    sent = fl.federated_broadcast(xs)
    return fl.federated_sum(fl.federated_map(sequence_sum, sent))


@fl.federated_computation(fl.TensorType(np.int32, [1]))
def same(keys: Any) -> Any:
    return keys


@fl.federated_computation(fl.TensorType(np.int32, [1]), fl.TensorType(np.int32, [1]))
def first_of(one: Any, other: Any) -> Any:
    del other
    return one


@fl.federated_computation(fl.SequenceType(np.int32), fl.TensorType(np.int32, [1]))
def counting(rows: Any, keys: Any) -> Any:
    del rows, keys
    return 3


@fl.federated_computation(fl.TensorType(np.int32, [2**14]))
def same_of_many(keys: Any) -> Any:
    return keys


@fl.federated_computation(fl.TensorType(np.int32, [2**14]))
def none_of_many(keys: Any) -> Any:
    del keys
    return np.zeros(1, np.int32)


@fl.federated_computation(fl.SequenceType(np.int32), fl.TensorType(np.int32, [2**14]))
def counting_many(rows: Any, keys: Any) -> Any:
    del rows, keys
    return 3


@fl.federated_computation(fl.SequenceType(np.int32))
def ignoring(rows: Any) -> Any:
    del rows
    return 3


@fl.federated_computation(
    fl.FederatedType(fl.TensorType(np.int32, [1]), fl.CLIENTS), AT_SERVER, AT_SERVER
)
def selecting_by_work(data: Any, max_key: Any, state: Any) -> Any:
    """Its last work takes what the first made of the keys, and not the keys."""
    zipped = fl.federated_zip([data, data])
    before = fl.federated_map(first_of, zipped)
    keys = fl.federated_map(same, before)
    chosen = fl.federated_select(keys, max_key, state, left)
    return fl.federated_sum(fl.federated_map(counting, (chosen, before)))


@fl.federated_computation(
    fl.FederatedType(fl.TensorType(np.int32, [2**14]), fl.CLIENTS), AT_SERVER, AT_SERVER
)
def selecting_by_much(data: Any, max_key: Any, state: Any) -> Any:
    before = fl.federated_map(same_of_many, data)
    keys = fl.federated_map(none_of_many, before)
    chosen = fl.federated_select(keys, max_key, state, left)
    return fl.federated_sum(fl.federated_map(counting_many, (chosen, before)))


@fl.federated_computation(
    fl.FederatedType(fl.TensorType(np.int32, [1]), fl.CLIENTS), AT_SERVER, AT_SERVER
)
def selecting_alone(keys: Any, max_key: Any, state: Any) -> Any:
    chosen = fl.federated_select(keys, max_key, state, left)
    return fl.federated_sum(fl.federated_map(ignoring, chosen))


@fl.federated_computation(AT_CLIENTS)
def with_a_report(data: Any) -> Any:
    return fl.federated_aggregate(data, 7, left, left, double_up)


@fl.federated_computation(AT_SERVER)
def nothing_aggregated(state: Any) -> Any:
    return fl.federated_map(double_up, state)


TOO_MUCH = (
    "`federated_select` of keys that clients compute, together with other values of"
    " 65,540 bytes, where at most 65,536 can be passed on"
)


def _fuse(comp: Any) -> plans.Kernel | plans.Fallback:
    return fuse(compile_to_mergeable_comp_form(comp).up_to_merge)


def _kernel(comp: Any) -> plans.Kernel:
    kernel = _fuse(comp)
    assert isinstance(kernel, plans.Kernel)
    return kernel


def _print(serialized: bytes) -> str:
    return blocks.parse_block(serialized).compact_representation()


def _type(serialized: bytes) -> str:
    return str(blocks.parse_block(serialized).type_signature)


def test_client_work_becomes_one_function_of_constants_and_data() -> None:
    kernel = _kernel(with_state)

    assert (kernel.parts, kernel.data, kernel.num_aggregations) == (((0,),), ((1,),), 1)
    assert _print(kernel.server) == (
        "(server -> (let v1=federated_apply(<(v0 -> <v0,v0>),server[0]>),"
        "v8_zero=ray_fed_zeros()"
        " in federated_zip_at_server(<federated_value_at_server(v8_zero),v1>)))"
    )
    assert _print(kernel.work) == (
        "(client -> (let constant0=client[0][0],data0=client[1][0],"
        "v4=(v3 -> v3[0])(constant0),v5=<v4,data0>,v7=(v6 -> v6[0])(v5) in <v7>))"
    )
    assert _print(kernel.accumulate) == (
        "(step -> (let constant0=step[2][0],"
        "v8=generic_plus(<step[0][0],step[1][0]>) in <v8>))"
    )
    assert _type(kernel.server) == "(<int32@SERVER> -> <int32,<int32,int32>>@SERVER)"
    assert _type(kernel.work) == "(<<<int32,int32>>,<int32>> -> <int32>)"
    assert _type(kernel.accumulate) == (
        "(<<int32>,<int32>,<<int32,int32>>> -> <int32>)"
    )


def test_aggregations_are_accumulated_as_one() -> None:
    kernel = _kernel(two_aggregations)

    assert (kernel.parts, kernel.data, kernel.num_aggregations) == ((), ((),), 2)
    assert _print(kernel.server) == (
        "( -> (let v0_zero=ray_fed_zeros() in federated_zip_at_server("
        "<federated_value_at_server(v0_zero),federated_value_at_server(7)>)))"
    )
    assert _print(kernel.work) == (
        "(client -> (let data0=client[1][0] in <data0,data0>))"
    )
    assert _print(kernel.accumulate) == (
        "(step -> (let v0=generic_plus(<step[0][0],step[1][0]>),"
        "v4=(v1 -> v1[0])(<step[0][1],step[1][1]>) in <v0,v4>))"
    )


def test_captured_values_become_constants() -> None:
    work = _kernel(capturing)
    accumulate = _kernel(accumulating_with_a_capture)

    assert _print(work.work) == (
        "(client -> (let constant0=client[0][0],data0=client[1][0],"
        "v1=(v0 -> <v0,constant0>)(data0) in <v1>))"
    )
    assert _print(work.server) == (
        "(server -> (let v2_zero=ray_fed_zeros() in federated_zip_at_server("
        "<federated_value_at_server(v2_zero),federated_value_at_server(server[0])>)))"
    )
    assert _print(accumulate.accumulate) == (
        "(step -> (let constant0=step[2][0],"
        "v3=(v0 -> constant0)(<step[0][0],step[1][0]>) in <v3>))"
    )


def test_value_that_is_equal_for_all_clients_is_a_constant() -> None:
    kernel = _kernel(with_all_equal)

    assert (kernel.parts, kernel.data) == (((0,),), ((1,),))
    assert _type(kernel.server) == "(<int32@SERVER> -> <int32,int32>@SERVER)"
    assert _print(kernel.work) == (
        "(client -> (let constant0=client[0][0],data0=client[1][0],"
        "v0=<constant0,data0>,v2=(v1 -> v1[0])(v0) in <v2>))"
    )


def test_unplaced_struct_is_taken_whole_as_contexts_pass_it() -> None:
    kernel = _kernel(capturing_an_element)

    assert (kernel.parts, kernel.data) == (((0,),), ((1,),))
    assert _type(kernel.server) == ("(<<int32,int32>> -> <<int32,int32>,int32>@SERVER)")


def test_later_stage_takes_what_the_first_one_merged() -> None:
    comp: Any = of_two_stages
    _, second = compile_to_chain(comp).stages

    kernel = fuse(second.up_to_merge)

    assert isinstance(kernel, plans.Kernel)
    assert (kernel.parts, kernel.data) == (((1,),), ((0,),))
    assert _print(kernel.work) == (
        "(client -> (let constant0=client[0][0],data0=client[1][0],"
        "v2=<data0,constant0>,v4=(v3 -> v3[0])(v2) in <v4>))"
    )


def test_selected_rows_are_data_behind_that_of_the_argument() -> None:
    kernel = _kernel(selecting_alone)

    (selection,) = kernel.selections
    assert (kernel.parts, kernel.data) == (((1,), (2,)), ())
    assert (selection.keys, selection.max_key) == ((0,), 0)
    assert _type(selection.function) == "(<<int32,int32>,int32> -> int32)"
    assert _print(selection.function) == (
        "(selected -> (let constant0=selected[0][0],constant1=selected[0][1]"
        " in (v0 -> v0[0])(<constant1,selected[1]>)))"
    )
    assert _type(kernel.work) == "(<<int32,int32>,<int32*>> -> <int32>)"


def test_work_that_makes_keys_comes_first_and_hands_on_what_the_last_needs() -> None:
    kernel = _kernel(selecting_by_work)

    assert kernel.first is not None
    assert (kernel.first.parts, kernel.first.data) == ((), ((0,),))
    assert (kernel.first.num_aggregations, kernel.first.num_kept) == (0, 2)
    assert (kernel.first.first, kernel.first.selections) == (None, ())
    assert _type(kernel.first.work) == "(<<>,<int32[1]>> -> <int32[1],int32[1]>)"
    (selection,) = kernel.selections
    assert selection.keys == 1
    assert kernel.data == ()
    assert (
        _type(kernel.work) == "(<<int32,int32>,<int32[1],int32[1],int32*>> -> <int32>)"
    )
    assert "first_of" not in _print(kernel.work)


def test_work_without_an_argument_has_constants_alone() -> None:
    kernel = _kernel(without_argument)

    assert (kernel.parts, kernel.data) == ((), ())
    assert _print(kernel.work) == (
        "(client -> (let constant0=client[0][0],v0=( -> 3)(),v2=<v0,constant0>,"
        "v4=(v3 -> v3[0])(v2) in <v4>))"
    )


@pytest.mark.parametrize(
    ("comp", "reason"),
    [
        (summing_sequences, "`sequence_sum` at clients"),
        (broadcasting_a_sequence, "a value of type `int32*` for all clients"),
        (selecting_by_much, TOO_MUCH),
        (nothing_aggregated, "not of the form that the compiler writes"),
    ],
    ids=["sequence intrinsic", "sequence for all", "much to hand on", "no aggregation"],
)
def test_what_is_not_fused_says_why(comp: Any, reason: str) -> None:
    assert _fuse(comp) == plans.Fallback(reason)


def test_form_that_nobody_compiled_is_not_fused() -> None:
    by_hand: Any = with_a_report

    assert fuse(by_hand) == plans.Fallback("not of the form that the compiler writes")
