"""Calls with arguments of TensorFlow Federated say what to pass instead."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import ray_fed
import ray_fed.tff_names as tff_names
from ray_fed import learning
from ray_fed.data import ClientData
from ray_fed.learning import aggregators

_PUBLIC: list[Any] = [
    ray_fed.init,
    learning.Model.from_keras,
    *(vars(learning)[name] for name in learning.__all__),
    *(vars(aggregators)[name] for name in aggregators.__all__),
    *(getattr(ClientData, name) for name in dir(ClientData) if name[0] != "_"),
]


@pytest.mark.parametrize(
    ("call", "names", "new"),
    [
        (learning.build_fed_avg, ["model_fn", "client_optimizer_fn"], "model="),
        (learning.build_fed_avg, ["client_optimizer_fn"], "client_optimizer="),
        (learning.build_fed_prox, ["proximal_strength"], "proximal="),
        (learning.build_mime_lite, ["base_optimizer"], "optimizer="),
        (learning.build_process, ["model_aggregator"], "aggregator="),
        (learning.Model.from_keras, ["input_spec"], "label_type="),
        (learning.run, ["total_rounds"], "num_rounds="),
        (aggregators.clipped, ["clipping_norm"], "norm="),
        (ClientData.from_function, ["client_ids"], "ids="),
        (ray_fed.init, ["default_num_clients"], "default_num_clients="),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(
    call: Callable[..., Any], names: list[str], new: str
) -> None:
    with pytest.raises(TypeError, match=f"found names of .*: for `{names[0]}`") as info:
        call(**dict.fromkeys(names))

    assert f"{new}" in str(info.value)
    assert all(f"for `{name}`, " in str(info.value) for name in names)


def test_other_errors_of_a_call_stay() -> None:
    wrong: Any = {"rate": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        learning.build_fed_avg(**wrong)


def test_a_name_that_the_function_has_is_no_old_name() -> None:
    def load(model_fn: Any) -> None:
        raise AssertionError(model_fn)

    assert tff_names.explain(load, ["model_fn"]) == ""


def test_new_names_exist() -> None:
    known = {
        name
        for each in _PUBLIC
        if callable(each)
        for name in inspect.signature(each).parameters
    }
    new = re.findall(r"`([a-z_]+)=", " ".join(tff_names.HERE.values()))

    assert len(new) > 25
    assert [name for name in new if name not in known] == []
