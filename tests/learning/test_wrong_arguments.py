"""What builders and `learning.run` are given of another kind is told in words."""

# pyright: reportUnknownLambdaType=false

import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.data import ClientData
from ray_fed.learning import Model


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "fed_avg": lambda model: learning.build_fed_avg(model, sgd()),
    "fed_prox": lambda model: learning.build_fed_prox(model, sgd(), proximal=0.1),
    "fed_sgd": lambda model: learning.build_fed_sgd(model, sgd()),
    "mime_lite": lambda model: learning.build_mime_lite(model, sgd()),
    "scaffold": lambda model: learning.build_scaffold(model, 0.1, num_clients=3),
    "fed_eval": learning.build_fed_eval,
    "client_eval": learning.build_client_eval,
}


def test_a_model_of_keras_is_told_from_one_of_learning() -> None:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    for build in BUILDERS.values():
        with pytest.raises(
            errors.ValueMismatchError, match=r"Model\.from_keras\(model, loss"
        ):
            build(made)


def test_rates_are_numbers_of_any_kind(linear_model: Model) -> None:
    scaffold, fed_prox = learning.build_scaffold, learning.build_fed_prox
    for rate in (np.int64(1), np.float32(0.5)):
        given: Any = rate
        scaffold(linear_model, given, num_clients=3)
        fed_prox(linear_model, sgd(), proximal=given)
    for other in ("0.1", True, [0.1]):
        given = other
        with pytest.raises(errors.ConfigError, match="above 0 and finite, a number, f"):
            scaffold(linear_model, given, num_clients=3)
        with pytest.raises(errors.ConfigError, match="to be at least 0, a number, fou"):
            fed_prox(linear_model, sgd(), proximal=given)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({1, 2}, "a sequence or a dictionary"),
        ({}, "Expected clients in `data`, found none"),
        (pd.DataFrame({"x": [1.0]}), r"`DataFrame`: pass `ClientData\.from_table"),
    ],
    ids=["set", "none", "table"],
)
def test_a_run_takes_clients_by_index_or_id(
    averaging: Any, data: Any, text: str
) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        learning.run(averaging, data, num_rounds=1)


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (pd.DataFrame({"x": [1.0]}), "client `data.0.`, found a table .*from_table"),
        (
            (np.ones((4, 3), "f4"), np.ones((4, 1), "f4")),
            r"found a tuple of 2 arrays: `\[\(x, y\)\]` has one batch",
        ),
        ([{"x": pd.DataFrame({"x": [1.0]}), "y": 0}], r"such as by `\.to_numpy\(\)`"),
    ],
    ids=["table", "pair", "column"],
)
def test_what_is_no_list_of_batches_is_told(
    averaging: Any, client: Any, text: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=text):
        learning.run(averaging, [client], num_rounds=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"callbacks": [keras.callbacks.EarlyStopping()]}, "callbacks of Keras follow"),
        ({"callbacks": [learning.callbacks.CSV]}, r"of the class, `CSV\(\.\.\.\)`"),
        ({"callbacks": [print]}, r"`types\.SimpleNamespace\(on_round=function\)`"),
        ({"validation_data": (1,)}, "found a tuple of 1"),
        ({"evaluate": lambda _: [{"loss": 0.5}]}, r"`learning\.spread` makes of the"),
    ],
    ids=["callback of Keras", "class", "function", "no pair", "metrics of clients"],
)
def test_what_keras_has_otherwise_is_told(
    averaging: Any, make_batches: Any, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(errors.RayFedError, match=text):
        learning.run(averaging, [make_batches([3], 0)], num_rounds=1, **arguments)


def test_a_result_where_its_state_belongs_is_told(
    averaging: Any, make_batches: Any
) -> None:
    data = [make_batches([3], 0)]
    result = learning.run(averaging, data, num_rounds=1)

    given: Any = result
    for pass_result in (
        lambda: averaging.next(given, data),
        lambda: learning.run(averaging, data, num_rounds=2, state=given),
    ):
        with pytest.raises(errors.ValueMismatchError, match=r"such as `result\.state`"):
            pass_result()


def test_swapped_arguments_and_a_forgotten_list_are_told(
    averaging: Any, make_batches: Any
) -> None:
    (batch,) = make_batches([3], 0)
    state = averaging.initialize()

    with pytest.raises(errors.ValueMismatchError, match=r"as in `next\(state, data\)`"):
        averaging.next([[batch]] * 3, state)
    with pytest.raises(errors.ValueMismatchError, match=r"single batch is `\[batch\]`"):
        averaging.next(state, [batch])
    for data in ([batch], batch):
        with pytest.raises(
            errors.ValueMismatchError, match=r"`\[batch\]` is a client w"
        ):
            learning.run(averaging, data, num_rounds=1)


def test_clients_of_another_type_are_refused_before_a_folder_is_made(
    linear_model: Model, tmp_path: pathlib.Path
) -> None:
    process = learning.build_fed_avg(linear_model, sgd())
    table = {"who": ["a"], "x": [1.0], "y": [1.0]}
    data = ClientData.from_table(table, client="who", x=["x"] * 3, y=["y"]).batch(1)

    with pytest.raises(errors.ValueMismatchError, match="`x` to float32, `y` to flo"):
        learning.run(process, data, num_rounds=1, storage_path=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _given(inner: Any) -> Any:
    return 0 if inner is None else inner


LABELS = np.arange(20) % 4
CLIENTS = [{"loss": 1.0, "num_examples": 2}]
PARTS = [np.arange(10), np.arange(10, 20)]
partition, aggregators = learning.partition, learning.aggregators
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dirichlet": (
        partition.dirichlet,
        {"labels": LABELS, "num_clients": 3, "alpha": 1.0, "seed": 0,
         "min_examples": 1},
    ),
    "shards": (
        partition.shards,
        {"labels": LABELS, "num_clients": 3, "shards_per_client": 2, "seed": 0},
    ),
    "log_normal": (
        partition.log_normal,
        {"num_examples": 20, "num_clients": 3, "sigma": 1.0, "seed": 0},
    ),
    "natural": (partition.natural, {"owners": LABELS}),
    "draw_labels": (
        partition.draw_labels, {"parts": PARTS, "labels": LABELS, "path": "parts.png"}
    ),
    "split_by_label": (
        learning.split_by_label,
        {"labels": LABELS, "num_clients": 3, "alpha": 1.0, "seed": 0},
    ),
    "EarlyStopping": (learning.EarlyStopping, {"monitor": "loss", "patience": 2}),
    "Guards": (learning.Guards, {"non_finite": "error", "empty_round": "skip"}),
    "ClientStates": (
        lambda memory_bytes: learning.ClientStates(
            np.zeros(2), memory_bytes=memory_bytes
        ),
        {"memory_bytes": 100},
    ),
    "spread": (
        lambda share: learning.spread(CLIENTS, share=share), {"share": 0.1}
    ),
    "clipped": (
        lambda norm, inner: aggregators.clipped(norm, _given(inner)),
        {"norm": 1.0, "inner": aggregators.mean()},
    ),
    "quantized": (
        lambda bits, inner: aggregators.quantized(bits, _given(inner)),
        {"bits": 4, "inner": aggregators.mean()},
    ),
    "trimmed_mean": (
        aggregators.trimmed_mean, {"trimmed_share": 0.1, "max_clients": 3}
    ),
    "CSV": (learning.callbacks.CSV, {"path": "log.csv"}),
}  # fmt: skip
"""A function, and arguments that it takes."""
OTHER_KINDS: list[Any] = [
    None, "x", -1, True, object(), [], {}, float("nan"), np.zeros((2, 2)), b"b",
    10**400, lambda: 0.1, np.array(["a", 1, None], object),
]  # fmt: skip
FITTING = {
    ("EarlyStopping", "monitor"): ["x"],
    ("EarlyStopping", "patience"): [10**400],
    ("CSV", "path"): ["x"],
    ("draw_labels", "path"): ["x"],
    ("draw_labels", "parts"): [[]],
    ("ClientStates", "memory_bytes"): [10**400],
    ("trimmed_mean", "max_clients"): [10**400],
}
"""Of these, by function and argument, those that are of the right kind; any seed is."""


@pytest.mark.parametrize("function", CALLS)
def test_arguments_of_another_kind_are_told_in_words(
    function: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, arguments = CALLS[function]
    found: list[str] = []

    for name in arguments:
        fitting = FITTING.get((function, name), [10**400] if name == "seed" else [])
        for value in OTHER_KINDS:
            if any(value is fit or value == fit for fit in fitting if _is_plain(value)):
                continue
            try:
                call(**{**arguments, name: value})
            except errors.RayFedError:
                continue
            except Exception as error:  # noqa: BLE001 (what is looked for)
                found.append(f"{name}={value!r}: {type(error).__name__}: {error}")
            else:
                found.append(f"{name}={value!r}: taken")

    assert found == []


def _is_plain(value: Any) -> bool:
    return not isinstance(value, np.ndarray)


class _Branching(keras.optimizers.schedules.LearningRateSchedule):
    @override
    def __call__(self, step: Any) -> Any:
        return 0.1 if step < 2 else 0.01


class _OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Without `get_config`, of keras.ops."""

    @override
    def __call__(self, step: Any) -> Any:
        return keras.ops.where(step < 1, 0.25, 0.5)


def test_schedules_of_ones_own_are_traced_or_refused(linear_model: Model) -> None:
    def build(schedule: Any) -> Any:
        return learning.build_fed_avg(
            linear_model, keras.optimizers.SGD(1.0), client_learning_rate=schedule
        )

    with pytest.raises(errors.CompileError, match=r"keras\.ops\.where"):
        build(_Branching())
    with pytest.raises(errors.ValueMismatchError, match="LearningRateSchedule, found"):
        build(lambda _: 0.1)
    x, y = np.ones((1, 3), np.float32), np.zeros((1, 1), np.float32)
    process = build(_OwnSchedule())
    states = [process.initialize()]
    for _ in range(2):
        states.append(process.next(states[-1], [[{"x": x, "y": y}]])[0])

    biases = [float(state.weights.trainable[1][0]) for state in states]
    assert biases == [0.5, 0.5 - 0.25 * 2 * 6.5, pytest.approx(-2.75 + 0.5 * 2 * 6.5)]


def test_parts_of_another_kind_are_told_in_words(linear_model: Model) -> None:
    part: Any = object()

    with pytest.raises(errors.ValueMismatchError, match="Expected an aggregator"):
        learning.build_process(linear_model, client=part, server="sgd", aggregator=part)
    with pytest.raises(errors.ValueMismatchError, match="Expected an agg") as raised:
        learning.build_fed_avg(linear_model, sgd(), aggregator=part)
    advice = re.findall(r"such as `(.+)`", str(raised.value))[-1]
    learning.build_fed_avg(linear_model, sgd(), aggregator=eval(advice))
    with pytest.raises(errors.ValueMismatchError, match="of Guards as `guards`"):
        learning.build_fed_avg(linear_model, sgd(), guards=part)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, value: Model.from_keras(model, loss="mse", label_type=value),
        lambda model, value: learning.build_fed_eval(made(model), value),
        lambda model, value: learning.build_client_eval(made(model), value),
        lambda model, value: learning.build_fed_eval({"a": made(model), "b": value}),
        lambda model, value: made(model).to_keras(value),
    ],
    ids=["labels", "training", "training of clients", "model", "state"],
)
def test_values_of_another_kind_are_told_in_words(call: Any) -> None:
    keras_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    for value in (3, "x", {"a": 1}, keras.optimizers.SGD):
        with pytest.raises(errors.ValueMismatchError, match="Expected"):
            call(keras_model, value)


def made(keras_model: keras.Model) -> Model:
    return Model.from_keras(keras_model, loss="mse")
