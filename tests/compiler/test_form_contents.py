"""What each part of a mergeable form may contain: the list, entry by entry."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import errors
from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import MergeableCompForm
from tests.forms import sum_parts

flf = fl.framework


federated_computation = cast("Callable[..., Any]", fl.federated_computation)

INT = fl.TensorType(np.int32)
AT_CLIENTS = fl.FederatedType(INT, fl.CLIENTS)
AT_SERVER = fl.FederatedType(INT, fl.SERVER)


total, add, merged_alone = sum_parts(np.int32)


@rtf.computation(np.int32)
def negate(x: Any) -> Any:
    return -x


@rtf.computation(np.int32)
def to_float(x: Any) -> Any:
    return tf.cast(x, tf.float32)


@rtf.computation(np.int32)
def to_keys(x: Any) -> Any:
    return tf.stack([x, x])


@rtf.computation
def one() -> Any:
    return np.int32(1)


def plus_own(clients: Any, added: Any) -> Any:
    return fl.federated_map(add, (clients, fl.federated_broadcast(added)))


def chosen(clients: Any, state: Any) -> Any:
    largest = fl.federated_value(9, fl.SERVER)
    return fl.federated_select(fl.federated_map(to_keys, clients), largest, state, add)


def unknown_aggregation(clients: Any) -> Any:
    """Return a call of an aggregation that no table has."""
    function = flf.Intrinsic("someones_median", fl.FunctionType(AT_CLIENTS, AT_SERVER))
    return fl.federated_map(negate, fl.Value(flf.Call(function, clients.comp)))


def modular_sum(clients: Any) -> Any:
    type_spec = fl.FunctionType([AT_CLIENTS, INT], AT_SERVER)
    function = flf.Intrinsic("federated_secure_modular_sum", type_spec)
    argument = flf.Struct([clients.comp, flf.Literal(np.int32(7), INT)])
    return fl.federated_map(negate, fl.Value(flf.Call(function, argument)))


AGGREGATIONS = {
    "federated_aggregate": lambda x: fl.federated_aggregate(x, 0, add, add, negate),
    "federated_mean": lambda x: fl.federated_mean(fl.federated_map(to_float, x)),
    "federated_weighted_mean": lambda x: fl.federated_mean(
        fl.federated_map(to_float, x), x
    ),
    "federated_min": fl.federated_min,
    "federated_max": fl.federated_max,
    "federated_sum": fl.federated_sum,
    "federated_secure_sum": lambda x: fl.federated_secure_sum(x, 100),
    "federated_secure_sum_bitwidth": lambda x: fl.federated_secure_sum_bitwidth(x, 8),
    "federated_secure_modular_sum": modular_sum,
    "someones_median": unknown_aggregation,
}


@rtf.computation(fl.SequenceType(np.int32))
def first_of(values: Any) -> Any:
    return values.reduce(np.int32(0), lambda total, x: total + x)


def form(
    up_to_merge: Any = total, merge: Any = add, after_merge: Any = merged_alone
) -> MergeableCompForm:
    return MergeableCompForm(up_to_merge, merge, after_merge)


def form_of_first(up_to_merge: Any) -> MergeableCompForm:
    """Return a form that returns the first partial."""
    partial = up_to_merge.type_signature.result.member
    merged = fl.FederatedType(partial, fl.SERVER)
    return MergeableCompForm(
        up_to_merge,
        federated_computation(lambda x, _y: x, partial, partial),
        federated_computation(lambda _x, y: y, AT_CLIENTS, merged),
    )


def test_the_list_of_aggregations_is_whole() -> None:
    known = {intrinsic.uri for intrinsic in flf.get_aggregation_intrinsics()}

    assert known <= AGGREGATIONS.keys()


def ended_by(finish: Callable[..., Any], uri: str) -> Any:
    """Return what comes after the merge, with an aggregation of its own."""

    @federated_computation(AT_CLIENTS, AT_SERVER)
    def after_merge(clients: Any, merged: Any) -> Any:
        return finish(clients, AGGREGATIONS[uri](clients), merged)

    return after_merge


@pytest.mark.parametrize("uri", AGGREGATIONS)
class TestAggregations:
    def test_may_stand_in_up_to_merge(self, uri: str) -> None:
        @federated_computation(AT_CLIENTS)
        def up_to_merge(clients: Any) -> Any:
            return fl.federated_zip((AGGREGATIONS[uri](clients), total(clients)))

        made = form_of_first(up_to_merge)

        assert made.up_to_merge is up_to_merge

    def test_may_not_take_what_another_returned(self, uri: str) -> None:
        @federated_computation(AT_CLIENTS)
        def up_to_merge(clients: Any) -> Any:
            again = AGGREGATIONS[uri](plus_own(clients, total(clients)))
            return fl.federated_zip((again, fl.federated_max(clients)))

        with pytest.raises(
            errors.CompileError,
            match=f"`up_to_merge` .*, found `{uri}` of the result of `federated_sum`",
        ):
            form_of_first(up_to_merge)

    def test_may_not_stand_in_merge(self, uri: str) -> None:
        @federated_computation(INT, INT)
        def merge(x: Any, y: Any) -> Any:
            AGGREGATIONS[uri](fl.federated_eval(one, fl.CLIENTS))
            return add(x, y)

        with pytest.raises(
            errors.CompileError,
            match=f"no aggregation in `merge`, .*, found the intrinsic `{uri}`",
        ):
            form(merge=merge)

    def test_may_not_stand_in_after_merge(self, uri: str) -> None:
        finishes: list[Callable[..., Any]] = [
            lambda x, total, _: fl.federated_zip((x, fl.federated_broadcast(total))),
            lambda _x, _total, merged: merged,  # for nothing
        ]
        told = f"no aggregation in `after_merge`, .*, found the intrinsic `{uri}`"

        for finish in finishes:
            after_merge = ended_by(finish, uri)
            with pytest.raises(errors.CompileError, match=told):
                form(after_merge=after_merge)


AT_HAND: dict[str, Callable[[Any, Any], Any]] = {
    "clients": lambda x, _m: x,
    "map": plus_own,
    "zip": lambda x, m: fl.federated_zip((x, fl.federated_broadcast(m))),
    "broadcast": lambda _x, m: fl.federated_broadcast(m),
    "select": chosen,
    "eval at clients": lambda _x, _m: fl.federated_eval(one, fl.CLIENTS),
    "value at clients": lambda _x, _m: fl.federated_value(3, fl.CLIENTS),
    "apply": lambda _x, m: fl.federated_map(negate, m),
    "eval at the server": lambda _x, _m: fl.federated_eval(one, fl.SERVER),
    "value at the server": lambda _x, _m: fl.federated_value(3, fl.SERVER),
    "zip at the server": lambda _x, m: fl.federated_zip((m, m)),
    "unplaced": lambda _x, _m: one(),
}
"""What after_merge may do with clients and what was merged."""


@pytest.mark.parametrize("name", AT_HAND)
def test_after_merge_may_do_without_aggregation(name: str) -> None:
    after_merge = federated_computation(AT_HAND[name], AT_CLIENTS, AT_SERVER)

    made = form(after_merge=after_merge)

    assert made.after_merge is after_merge


@pytest.mark.parametrize(
    ("placed", "uri"),
    [
        (lambda x: fl.federated_value(x, fl.SERVER), "federated_value_at_server"),
        (lambda x: fl.federated_value(x, fl.CLIENTS), "federated_value_at_clients"),
        (lambda _: fl.federated_eval(one, fl.SERVER), "federated_eval_at_server"),
        (lambda _: fl.federated_eval(one, fl.CLIENTS), "federated_eval_at_clients"),
    ],
)
def test_merge_may_place_nothing(placed: Callable[[Any], Any], uri: str) -> None:
    @federated_computation(INT, INT)
    def merge(x: Any, y: Any) -> Any:
        placed(2)
        return add(x, y)

    with pytest.raises(errors.CompileError, match=f"found the intrinsic `{uri}`: move"):
        form(merge=merge)


@pytest.mark.parametrize(
    "depends",
    [
        pytest.param(plus_own, id="by broadcast"),
        pytest.param(
            lambda x, m: plus_own(x, fl.federated_map(negate, m)), id="through work"
        ),
        pytest.param(
            lambda x, m: fl.federated_map(first_of, chosen(x, m)), id="by select"
        ),
        pytest.param(
            lambda x, m: fl.federated_map(add, (x, fl.federated_broadcast(m))),
            id="by zip",
        ),
    ],
)
def test_aggregation_is_refused_however_it_depends_on_another(
    depends: Callable[[Any, Any], Any],
) -> None:
    @federated_computation(AT_CLIENTS)
    def up_to_merge(clients: Any) -> Any:
        return fl.federated_sum(depends(clients, fl.federated_min(clients)))

    with pytest.raises(
        errors.CompileError, match=r"`federated_sum` of the result of `federated_min`"
    ):
        form(up_to_merge)


def test_types_are_checked_before_contents() -> None:
    @federated_computation(AT_CLIENTS)
    def at_clients(clients: Any) -> Any:
        return plus_own(clients, total(clients))

    with pytest.raises(errors.UpToMergeTypeError):
        form(at_clients)
