"""The cut at the aggregations: what goes up, what merges, what comes after."""

from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest

from ray_fed import errors
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.compiler.split import compile_to_chain, compile_to_mergeable_comp_form

flf = fl.framework

INT_PAIR = fl.StructType([np.int32, np.int32])
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
FLOAT_AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)


@fl.federated_computation(np.int32)
def double_up(x: Any) -> Any:
    return (x, x)


@fl.federated_computation(INT_PAIR)
def left(pair: Any) -> Any:
    return pair[0]


@fl.federated_computation(np.int32)
def same(x: Any) -> Any:
    return x


def _compile(comp: Any) -> MergeableCompForm:
    return compile_to_mergeable_comp_form(comp)


def _print(comp: flf.ConcreteComputation) -> str:
    return comp.to_building_block().compact_representation()


def _types(form: MergeableCompForm) -> list[str]:
    return [
        str(comp.type_signature)
        for comp in (form.up_to_merge, form.merge, form.after_merge)
    ]


@fl.federated_computation(AT_CLIENTS)
def summed(x: Any) -> Any:
    return fl.federated_sum(x)


@fl.federated_computation(FLOAT_AT_CLIENTS, AT_CLIENTS)
def weighted(x: Any, weight: Any) -> Any:
    return fl.federated_mean(x, weight)


@fl.federated_computation(AT_CLIENTS)
def aggregated(x: Any) -> Any:
    return fl.federated_aggregate(x, 0, left, left, double_up)


@fl.federated_computation(np.int32, AT_CLIENTS)
def capturing(k: Any, x: Any) -> Any:
    @fl.federated_computation(np.int32)
    def pair_up(v: Any) -> Any:
        return (v, k)

    return fl.federated_sum(fl.federated_map(pair_up, x))


def test_aggregation_becomes_three_parts() -> None:
    form = _compile(summed)

    assert _print(form.up_to_merge) == (
        "(argument -> (let v0_zero=ray_fed_zeros(),"
        "v0=federated_aggregate(<argument,v0_zero,generic_plus,generic_plus,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v0>)))"
    )
    assert _print(form.merge) == (
        "(pair -> (let v0=generic_plus(<pair[0][0],pair[1][0]>) in <v0>))"
    )
    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v0=federated_apply(<(v0_partials -> v0_partials[0]),merged>)"
        " in v0))"
    )
    assert _types(form) == [
        "({int32}@CLIENTS -> <int32>@SERVER)",
        "(<<int32>,<int32>> -> <int32>)",
        "(<{int32}@CLIENTS,<int32>@SERVER> -> int32@SERVER)",
    ]


def test_merge_that_captures_the_argument_is_refused() -> None:
    @fl.federated_computation(np.int32, AT_CLIENTS)
    def comp(k: Any, x: Any) -> Any:
        @fl.federated_computation(INT_PAIR)
        def merge(_: Any) -> Any:
            return k

        return fl.federated_aggregate(x, 0, left, merge, same)

    with pytest.raises(errors.CompileError, match="put the value into the accumulator"):
        _compile(comp)


@fl.federated_computation(AT_CLIENTS)
def max_of_value_and_sum(x: Any) -> Any:
    total = fl.federated_broadcast(fl.federated_sum(x))
    return fl.federated_max(fl.federated_map(left, (x, total)))


def test_aggregation_of_another_aggregation_has_no_mergeable_form() -> None:
    with pytest.raises(errors.CompileError, match="found 2 stages, each of which"):
        _compile(max_of_value_and_sum)


def test_aggregation_of_another_aggregation_is_a_later_stage() -> None:
    chain = compile_to_chain(cast("Any", max_of_value_and_sum))

    first, second = chain.stages
    assert _print(first.up_to_merge) == (
        "(argument -> (let v0_zero=ray_fed_zeros(),"
        "v0=federated_aggregate(<argument,v0_zero,generic_plus,generic_plus,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v0>)))"
    )
    assert _print(second.up_to_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v0=federated_apply(<(v0_partials -> v0_partials[0]),merged>),"
        "v1=federated_broadcast(v0),"
        "v2=federated_zip_at_clients(<argument,v1>),"
        "v4=federated_map(<(v3 -> v3[0]),v2>),"
        "v5_zero=ray_fed_lowest(),"
        "v5=federated_aggregate(<v4,v5_zero,ray_fed_maximum,ray_fed_maximum,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v5>)))"
    )
    assert _print(second.merge) == (
        "(pair -> (let v5=ray_fed_maximum(<pair[0][0],pair[1][0]>) in <v5>))"
    )
    assert _print(chain.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],merged_1=pair[2],"
        "v5=federated_apply(<(v5_partials -> v5_partials[0]),merged_1>)"
        " in v5))"
    )


def test_aggregations_of_one_depth_share_a_stage() -> None:
    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        total = fl.federated_broadcast(fl.federated_sum(x))
        later = fl.federated_map(left, (x, total))
        return fl.federated_max(later), fl.federated_min(later), fl.federated_max(x)

    chain = compile_to_chain(cast("Any", comp))

    assert [str(stage.merge.type_signature.result) for stage in chain.stages] == [
        "<int32,int32>",
        "<int32,int32>",
    ]


def test_aggregation_that_nothing_needs_is_left_out() -> None:
    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        return (fl.federated_sum(x), fl.federated_max(x))[1]

    form = _compile(comp)

    assert "generic_plus" not in _print(form.up_to_merge)


@pytest.mark.parametrize(
    "comp",
    [
        pytest.param(summed, id="summed"),
        pytest.param(weighted, id="weighted"),
        pytest.param(aggregated, id="aggregated"),
        pytest.param(capturing, id="capturing"),
    ],
)
def test_same_computation_compiles_to_the_same_bytes(
    comp: Any,
) -> None:
    forms = [_compile(comp) for _ in range(2)]

    first, second = (
        [
            part.to_proto().SerializeToString(deterministic=True)
            for part in (form.up_to_merge, form.merge, form.after_merge)
        ]
        for form in forms
    )
    assert first == second


@pytest.mark.parametrize("comp", [None, 3, b"", len])
def test_what_is_no_computation_is_refused(comp: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match="`comp` to be of the class"):
        compile_to_mergeable_comp_form(comp)
