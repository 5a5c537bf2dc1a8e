"""A resume continues the same run, or is refused with the name of what differs."""

import dataclasses
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed.learning import (
    LearningProcess,
    LocalTraining,
    Model,
    build_fed_avg,
    build_process,
    run,
)
from ray_fed.learning.aggregators import clipped
from ray_fed.program import ClientData, PoissonSampler, WeightedSampler
from tests.learning.counting import CLIENTS, build_tally

ROWS = [{"x": np.array([n, 0], "f"), "y": np.float32(n)} for n in range(6)]
ROW_TYPE = fl.StructWithPythonType(
    [("x", fl.TensorType(np.float32, [2])), ("y", np.float32)], dict
)
TABLE = {"who": [0, 0, 1], "a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, 2.0]}
DATA = ClientData.from_values([ROWS[:4], ROWS], fl.SequenceType(ROW_TYPE))


def from_table(**changes: Any) -> ClientData:
    options: Any = {"client": "who", "x": ["a", "b"], **changes}
    return ClientData.from_table(TABLE, **options)


def batches_of(*sizes: int) -> ClientData:
    batch = fl.StructType(
        [
            ("x", fl.TensorType(np.float32, [None, 2])),
            ("y", fl.TensorType(np.float32, [None])),
        ]
    )
    client = [
        {"x": np.ones((size, 2), np.float32), "y": np.ones(size, np.float32)}
        for size in sizes
    ]
    return ClientData.from_values([client], fl.SequenceType(batch))


def scale(factor: float) -> Callable[[Any], Any]:
    return lambda row: {"x": row["x"] * factor, "y": row["y"]}


def refuse(folder: pathlib.Path, first: Any, second: Any, **arguments: Any) -> str:
    """Return why a run with the data `second` does not resume that of `first`."""
    for _ in range(2):  # the same arguments are no other run
        run(build_tally(), first, num_rounds=0, storage_path=folder, **arguments)
    with pytest.raises(errors.ConfigError) as told:
        run(build_tally(), second, num_rounds=0, storage_path=folder, **arguments)
    return str(told.value)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (DATA.batch(2), DATA.batch(3), "`batch_size` of `data`: 2 there, 3 here"),
        (DATA.epochs(2), DATA.epochs(3), "`epochs` of `data`: 2 there, 3 here"),
        (DATA, DATA.shuffle(), "`shuffle` of `data`"),
        (DATA.shuffle(1), DATA.shuffle(2), "`shuffle` of `data`: 1 there, 2 here"),
        (DATA.take(2), DATA.take(1), "`take` of `data`: 2 there, 1 here"),
        (DATA.map(scale(2.0)), DATA.map(scale(3.0)), "`map` of `data`"),
        (DATA, DATA.map(scale(1.0)), "`map` of `data`"),
        (*DATA.hold_out_rows(0.5), "`hold_out_rows` of `data`"),
        (DATA, DATA.select([1, 0]), "the clients"),
        (
            DATA,
            ClientData.from_values([ROWS[:3], ROWS], fl.SequenceType(ROW_TYPE)),
            "`numbers of rows` of `data`",
        ),
        (batches_of(2, 2), batches_of(3, 1), "`numbers of rows` of `data`"),
        (from_table(), from_table(x=["b", "a"]), "`columns` of `data`"),
        (list(DATA.batch(2)), list(DATA.batch(3)), "`batch_size` of `data`"),
        ({"a": ROWS[:1], "b": ROWS}, {"a": ROWS[:2], "b": ROWS}, "numbers of"),
    ],
)  # fmt: skip
def test_other_data_is_refused(
    tmp_path: pathlib.Path, first: Any, second: Any, told: str
) -> None:
    assert told in refuse(tmp_path, first, second)


def test_ids_of_numpy_are_those_of_python(tmp_path: pathlib.Path) -> None:
    for ids in ((4, 2), np.array([4, 2])):
        named: Any = dict(zip(ids, (ROWS[:2], ROWS), strict=True))
        loaded = ClientData.from_function(ids, named.get, fl.SequenceType(ROW_TYPE))
        for data in (named, loaded, types.MappingProxyType(named)):
            place = tmp_path / type(data).__name__
            run(build_tally(), data, num_rounds=0, storage_path=place)


class Plain:
    """A sampler that has no text of its own."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        del round_index, k
        return list(range(num_clients))


@dataclasses.dataclass
class Weighing(Plain):
    """A sampler whose text leaves out the middle of its weights."""

    weights: Any = None


class Inherited(PoissonSampler):
    """A sampler with a parameter that is no field."""

    def __init__(self, share: float) -> None:
        super().__init__(0.2)
        object.__setattr__(self, "share", share)


def inside(source: str) -> Plain:
    """Return a sampler with a function in which another one is defined."""
    return Plain(by=eval(f"lambda k: (lambda n: {source})(k)"))


def keyword(default: int) -> Plain:
    return Plain(by=eval(f"lambda k, *, n={default}: n"))


def of_module(rate: Any) -> Plain:
    return Plain(by=eval("lambda k: (lambda: k * RATES[0])()", {"RATES": rate}))


def circle(size: int) -> Plain:
    sampler = Plain(size=size)
    sampler.inner = Plain(outer=sampler)  # pyright: ignore[reportAttributeAccessIssue]
    return sampler


def series(value: float) -> Any:
    return pd.Series(middle(value))


def middle(value: float) -> Any:
    weights = np.ones(5000)
    weights[2500] = value
    return weights


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (PoissonSampler(0.2), PoissonSampler(0.3), "`rate` of the `sampler`: '0.2'"),
        (WeightedSampler([1.0] * 6), WeightedSampler([2.0] * 6), "`weights` of the"),
        (Plain(size=2), Plain(size=3), "`size` of the `sampler`: 2 there, 3 here"),
        (Plain(by=scale(1.0)), Plain(by=scale(2.0)), "`by` of the `sampler`"),
        (Weighing(middle(1)), Weighing(middle(2)), "`weights` of the `sampler`"),
        (None, PoissonSampler(0.2), "the `sampler`: None there"),
        (Inherited(0.1), Inherited(0.3), "`share` of the `sampler`: '0.1' there"),
        (inside("2 * n"), inside("3 * n"), "`by` of the `sampler`"),
        (keyword(1), keyword(2), "`by` of the `sampler`"),
        (of_module([1.0]), of_module([2.0]), "`by` of the `sampler`"),
        (Plain(w=series(1)), Plain(w=series(2)), "`w` of the `sampler`"),
        (circle(2), circle(3), "`size` of the `sampler`: 2 there, 3 here"),
    ],
)
def test_other_sampler_is_refused(
    tmp_path: pathlib.Path, first: Any, second: Any, told: str
) -> None:
    arguments: Any = {"num_rounds": 0, "storage_path": tmp_path}
    for _ in range(2):
        run(build_tally(), CLIENTS, sampler=first, **arguments)

    with pytest.raises(errors.ConfigError) as error:
        run(build_tally(), CLIENTS, sampler=second, **arguments)
    assert told in str(error.value)


class Scaled(NamedTuple):
    """A state with a setting of the user's own."""

    round_index: int
    rates: dict[str, Any]


def build_plain(rate: Any, kept: Any = 0.0) -> LearningProcess:
    def advance(state: Any, kept: Any, data: Any) -> Any:
        del data
        return state, kept, {"loss": 0.0}

    return LearningProcess(
        lambda: Scaled(0, {"rate": rate}),
        advance,
        initial_client_state={"own": np.asarray(kept)},
    )


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (build_plain(0.2), "the initial value of `rates/rate` in the process's state"),
        (build_plain(0.1, 1.0), "the initial value of `own` in the state of clients"),
        (build_plain(np.array([0.1, 0.2], "f")), "`rates/rate`"),
    ],
)
def test_other_initial_value_of_a_state_of_ones_own_is_refused(
    tmp_path: pathlib.Path, other: LearningProcess, told: str
) -> None:
    arguments: Any = {"num_rounds": 0, "storage_path": tmp_path}
    for _ in range(2):
        run(build_plain(0.1), CLIENTS, **arguments)

    with pytest.raises(errors.ConfigError) as error:
        run(other, CLIENTS, **arguments)
    assert told in str(error.value)


def build_unseeded(bias: float) -> Model:
    """Return a model of the same layers as another one, with other initial weights."""
    dense = keras.layers.Dense(1)
    keras_model = keras.Sequential([keras.Input((3,)), dense])
    dense.set_weights([np.full((3, 1), bias, "f"), np.array([bias], "f")])
    return Model.from_keras(
        keras_model,
        loss=keras.losses.MeanSquaredError(),
        label_type=fl.TensorType(np.float32, [None, 1]),
    )


def test_model_with_other_initial_weights_is_resumed_and_other_settings_refused(
    tmp_path: pathlib.Path, make_batches: Callable[..., list[Any]]
) -> None:
    def build(bias: float, norm: float) -> LearningProcess:
        model = build_unseeded(bias)
        sgd = keras.optimizers.SGD(0.05)
        return build_fed_avg(model, sgd, aggregator=clipped(norm))

    data = [make_batches([3], seed) for seed in range(2)]
    first = run(build(0.1, 1.0), data, num_rounds=1, storage_path=tmp_path)

    again = run(build(0.2, 1.0), data, num_rounds=1, storage_path=tmp_path)
    with pytest.raises(errors.ConfigError) as told:
        run(build(0.1, 0.5), data, num_rounds=2, storage_path=tmp_path)

    assert np.array_equal(
        again.state.weights.trainable[0], first.state.weights.trainable[0]
    )
    assert "in the process's state: '1.0' there, '0.5' here" in str(told.value)
    assert "next` computes" not in str(told.value)


def test_other_server_state_of_a_process_of_ones_own_is_refused(
    tmp_path: pathlib.Path,
    linear_model: Model,
    make_batches: Callable[..., list[Any]],
) -> None:
    def build(rate: float) -> LearningProcess:
        train = LocalTraining(linear_model, keras.optimizers.SGD(0.05))

        def client(server: Any, batches: Any) -> Any:
            trained = train(server.weights, batches)
            delta = linear_model.delta(server.weights, trained.weights)
            return delta, trained.num_examples, trained.totals

        def server(weights: Any, state: Any, delta: Any) -> Any:
            scaled = [part * state["rate"] for part in tf.nest.flatten(delta)]
            moved = tf.nest.pack_sequence_as(delta, scaled)
            return linear_model.move(weights, moved), state

        return build_process(
            linear_model,
            client=client,
            server=server,
            server_state={"rate": np.float32(rate)},
        )

    data = [make_batches([3], seed) for seed in range(2)]
    run(build(1.0), data, num_rounds=0, storage_path=tmp_path)

    with pytest.raises(errors.ConfigError, match="initial value of `server/rate`"):
        run(build(0.5), data, num_rounds=0, storage_path=tmp_path)


def test_other_settings_are_refused(
    tmp_path: pathlib.Path, averaging: LearningProcess
) -> None:
    data = [[{"x": np.ones((1, 3), "f"), "y": np.ones((1, 1), "f")}]]
    run(averaging, data, num_rounds=0, storage_path=tmp_path)

    config = ray_fed.Config.load(backend="local", kernels={"jit": "on"})
    with ray_fed.create_context(config) as context:
        fl.framework.set_default_context(context)
        with pytest.raises(errors.ConfigError, match=r"`Config\.kernels\.jit`: 'auto'"):
            run(averaging, data, num_rounds=0, storage_path=tmp_path)
