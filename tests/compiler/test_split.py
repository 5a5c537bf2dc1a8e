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
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)


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


@fl.federated_computation(AT_CLIENTS, FLOAT_AT_CLIENTS)
def two_of_one_each(x: Any, y: Any) -> Any:
    return fl.federated_sum(x), fl.federated_max(y)


@fl.federated_computation(FLOAT_AT_CLIENTS)
def averaged(x: Any) -> Any:
    return fl.federated_mean(x)


@fl.federated_computation(FLOAT_AT_CLIENTS, AT_CLIENTS)
def weighted(x: Any, weight: Any) -> Any:
    return fl.federated_mean(x, weight)


@fl.federated_computation(AT_CLIENTS)
def aggregated(x: Any) -> Any:
    return fl.federated_aggregate(x, 0, left, left, double_up)


@fl.federated_computation(AT_CLIENTS)
def mapped_before_and_after(x: Any) -> Any:
    total = fl.federated_sum(fl.federated_map(double_up, x))
    return fl.federated_map(left, total)


@fl.federated_computation(AT_CLIENTS)
def broadcast_back(x: Any) -> Any:
    return fl.federated_broadcast(fl.federated_min(x)), x


@fl.federated_computation
def of_no_argument() -> Any:
    return fl.federated_sum(fl.federated_value(1, fl.CLIENTS))


@fl.federated_computation(AT_SERVER)
def without_aggregation(x: Any) -> Any:
    return fl.federated_broadcast(x)


@fl.federated_computation(AT_CLIENTS)
def clients_only(x: Any) -> Any:
    return fl.federated_map(double_up, x)


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


def test_independent_aggregations_are_zipped() -> None:
    form = _compile(two_of_one_each)

    assert _print(form.up_to_merge) == (
        "(argument -> (let v0_zero=ray_fed_zeros(),"
        "v0=federated_aggregate(<argument[0],v0_zero,generic_plus,generic_plus,"
        "(id_arg -> id_arg)>),"
        "v1_zero=ray_fed_lowest(),"
        "v1=federated_aggregate(<argument[1],v1_zero,ray_fed_maximum,ray_fed_maximum,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v0,v1>)))"
    )
    assert _print(form.merge) == (
        "(pair -> (let v0=generic_plus(<pair[0][0],pair[1][0]>),"
        "v1=ray_fed_maximum(<pair[0][1],pair[1][1]>) in <v0,v1>))"
    )
    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v0=federated_apply(<(v0_partials -> v0_partials[0]),merged>),"
        "v1=federated_apply(<(v1_partials -> v1_partials[1]),merged>)"
        " in <v0,v1>))"
    )


def test_mean_carries_its_divisor_and_reports_after_the_merge() -> None:
    form = _compile(averaged)

    assert _types(form)[:2] == [
        "({float32}@CLIENTS -> <<float32,int32>>@SERVER)",
        "(<<<float32,int32>>,<<float32,int32>>> -> <<float32,int32>>)",
    ]
    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v0=federated_apply(<(v0_partials -> ray_fed_average(v0_partials[0])),merged>)"
        " in v0))"
    )


def test_weighted_mean_zips_values_and_weights() -> None:
    form = _compile(weighted)

    assert _print(form.up_to_merge) == (
        "(argument -> (let"
        " v0_zipped=federated_zip_at_clients(<argument[0],argument[1]>),"
        "v0_zero=ray_fed_zeros(),"
        "v0=federated_aggregate(<v0_zipped,v0_zero,ray_fed_add_weighted,generic_plus,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v0>)))"
    )
    assert _types(form)[0] == (
        "(<x={float32}@CLIENTS,weight={int32}@CLIENTS> ->"
        " <<float32,int32,int32>>@SERVER)"
    )


def test_report_of_an_aggregate_moves_after_the_merge() -> None:
    form = _compile(aggregated)

    assert _print(form.up_to_merge) == (
        "(argument -> (let v3=federated_aggregate(<argument,0,(v0 -> v0[0]),"
        "(v1 -> v1[0]),(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v3>)))"
    )
    assert _print(form.merge) == (
        "(pair -> (let v3=(v1 -> v1[0])(<pair[0][0],pair[1][0]>) in <v3>))"
    )
    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v3=federated_apply(<(v3_partials -> (v2 -> <v2,v2>)(v3_partials[0])),merged>)"
        " in v3))"
    )


def test_calls_stay_on_their_side_of_the_aggregation() -> None:
    form = _compile(mapped_before_and_after)

    up_to_merge, after_merge = _print(form.up_to_merge), _print(form.after_merge)
    assert "federated_map(<(v0 -> <v0,v0>),argument>)" in up_to_merge
    assert "federated_apply" not in up_to_merge
    assert "federated_map" not in after_merge
    assert after_merge.count("federated_apply") == 2


def test_clients_results_are_made_after_the_merge() -> None:
    form = _compile(broadcast_back)

    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v0=federated_apply(<(v0_partials -> v0_partials[0]),merged>),"
        "v1=federated_broadcast(v0)"
        " in <v1,argument>))"
    )
    assert str(form.after_merge.type_signature.result) == (
        "<int32@CLIENTS,{int32}@CLIENTS>"
    )


def test_computation_of_no_argument_merges_to_its_result() -> None:
    form = _compile(of_no_argument)

    assert _types(form) == [
        "( -> <int32>@SERVER)",
        "(<<int32>,<int32>> -> <int32>)",
        "(<int32>@SERVER -> int32@SERVER)",
    ]
    assert _print(form.up_to_merge).startswith(
        "( -> (let v0=federated_value_at_clients(1),"
    )
    assert _print(form.after_merge) == (
        "(merged -> (let"
        " v1=federated_apply(<(v1_partials -> v1_partials[0]),merged>)"
        " in v1))"
    )


@pytest.mark.parametrize(
    "comp",
    [
        pytest.param(without_aggregation, id="server"),
        pytest.param(clients_only, id="clients"),
        pytest.param(double_up, id="unplaced"),
    ],
)
def test_computation_without_aggregation_merges_nothing(
    comp: Any,
) -> None:
    form = _compile(comp)

    assert _print(form.up_to_merge) == "(argument -> federated_value_at_server(<>))"
    assert _print(form.merge) == "(pair -> <>)"
    assert "merged=pair[1]" in _print(form.after_merge)


def test_client_work_of_a_result_runs_after_the_merge() -> None:
    form = _compile(clients_only)

    assert _print(form.after_merge) == (
        "(pair -> (let argument=pair[0],merged=pair[1],"
        "v1=federated_map(<(v0 -> <v0,v0>),argument>)"
        " in v1))"
    )


def test_function_of_the_clients_may_capture_the_argument() -> None:
    form = _compile(capturing)

    assert "(v0 -> <v0,argument[0]>)" in _print(form.up_to_merge)
    assert str(form.up_to_merge.type_signature.result) == "<<int32,int32>>@SERVER"


def test_merge_may_capture_what_does_not_depend_on_the_argument() -> None:
    int_type = fl.TensorType(np.int32)
    plus = flf.Intrinsic(flf.GENERIC_PLUS.uri, fl.FunctionType(INT_PAIR, int_type))
    one, k = flf.Literal(1, int_type), flf.Reference("k", int_type)
    pair = flf.Reference("p", INT_PAIR)
    merge = flf.Call(plus, flf.Struct([flf.Selection(pair, index=0), k]))
    aggregate = flf.create_federated_aggregate(
        flf.Reference("x", AT_CLIENTS),
        one,
        plus,
        flf.Lambda("p", INT_PAIR, merge),
        flf.create_identity(int_type),
    )
    body = flf.Block([("k", flf.Call(plus, flf.Struct([one, one])))], aggregate)
    block = flf.Lambda("x", AT_CLIENTS, body)

    form = _compile(flf.ConcreteComputation.from_building_block(block))

    assert _print(form.merge) == (
        "(pair -> (let v0=generic_plus(<1,1>),"
        "v4=(v1 -> (let v2=generic_plus(<v1[0],v0>) in v2))(<pair[0][0],pair[1][0]>)"
        " in <v4>))"
    )


def test_merge_that_captures_the_argument_is_refused() -> None:
    @fl.federated_computation(np.int32, AT_CLIENTS)
    def comp(k: Any, x: Any) -> Any:
        @fl.federated_computation(INT_PAIR)
        def merge(_: Any) -> Any:
            return k

        return fl.federated_aggregate(x, 0, left, merge, same)

    with pytest.raises(errors.CompileError, match="carry it in the accumulator"):
        _compile(comp)


def test_zero_and_accumulate_may_capture_the_argument() -> None:
    @fl.federated_computation(np.int32, AT_CLIENTS)
    def comp(k: Any, x: Any) -> Any:
        @fl.federated_computation(INT_PAIR)
        def accumulate(_: Any) -> Any:
            return k

        return fl.federated_aggregate(x, k, accumulate, left, same)

    form = _compile(comp)

    assert "<argument[1],argument[0],(v0 -> argument[0])," in _print(form.up_to_merge)


@fl.federated_computation(AT_CLIENTS)
def max_of_value_and_sum(x: Any) -> Any:
    total = fl.federated_broadcast(fl.federated_sum(x))
    return fl.federated_max(fl.federated_map(left, (x, total)))


def test_aggregation_of_another_aggregation_has_no_mergeable_form() -> None:
    with pytest.raises(errors.CompileError, match="found 2 stages, each of values"):
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
    ("secure_sum", "check"),
    [
        pytest.param(fl.federated_secure_sum, "ray_fed_check_maximum", id="bound"),
        pytest.param(
            fl.federated_secure_sum_bitwidth, "ray_fed_check_bitwidth", id="bits"
        ),
    ],
)
def test_secure_sum_is_a_sum_of_checked_values(secure_sum: Any, check: str) -> None:
    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        return secure_sum(x, 10)

    form = _compile(comp)

    assert _print(form.up_to_merge) == (
        "(argument -> (let v0_bound=federated_value_at_clients(10),"
        "v0_zipped=federated_zip_at_clients(<argument,v0_bound>),"
        f"v0_checked=federated_map(<{check},v0_zipped>),"
        "v0_zero=ray_fed_zeros(),"
        "v0=federated_aggregate(<v0_checked,v0_zero,generic_plus,generic_plus,"
        "(id_arg -> id_arg)>)"
        " in federated_zip_at_server(<v0>)))"
    )


@fl.federated_computation(AT_CLIENTS)
def given_as_it_came(x: Any) -> Any:
    return x


@fl.federated_computation
def all_equal_where_it_need_not_be() -> Any:
    return given_as_it_came(fl.federated_value(1, fl.CLIENTS))


@fl.federated_computation(AT_CLIENTS, AT_CLIENTS)
def named_by_an_inner_function(p: Any, q: Any) -> Any:
    @fl.federated_computation(fl.StructType([("a", AT_CLIENTS), ("b", AT_CLIENTS)]))
    def named(t: Any) -> Any:
        return t

    return named((p, q))


@pytest.mark.parametrize(
    "comp",
    [
        pytest.param(summed, id="summed"),
        pytest.param(two_of_one_each, id="two of one each"),
        pytest.param(averaged, id="averaged"),
        pytest.param(weighted, id="weighted"),
        pytest.param(aggregated, id="aggregated"),
        pytest.param(mapped_before_and_after, id="mapped before and after"),
        pytest.param(broadcast_back, id="broadcast back"),
        pytest.param(of_no_argument, id="of no argument"),
        pytest.param(without_aggregation, id="without aggregation"),
        pytest.param(clients_only, id="clients only"),
        pytest.param(capturing, id="capturing"),
        pytest.param(double_up, id="double up"),
        pytest.param(
            all_equal_where_it_need_not_be, id="all equal where it need not be"
        ),
        pytest.param(named_by_an_inner_function, id="named by an inner function"),
    ],
)
def test_form_has_the_type_of_the_computation(comp: Any) -> None:
    form = _compile(comp)

    assert str(form.type_signature) == str(comp.type_signature)


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
