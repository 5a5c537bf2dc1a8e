"""What a program writes to an array later changes neither clients nor calls."""

import asyncio
import operator
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.data import ClientData
from ray_fed.learning import History, LearningProcess, RoundRecord, run
from ray_fed.learning.client_states import ClientStates
from ray_fed.program import RayFederatedContext

BATCHES = fl.SequenceType(
    fl.StructWithPythonType([("x", fl.TensorType(np.float32, [None, 3]))], dict)
)
VECTOR = fl.TensorType(np.float32, [16])
NAMES: Any = {"client": "who", "x": "x"}


@rtf.computation(BATCHES)
def add(batches: Any) -> Any:
    def add_batch(total: Any, batch: Any) -> Any:
        return total + tf.reduce_sum(batch["x"])

    return batches.reduce(0.0, add_batch)


@fl.federated_computation(fl.FederatedType(BATCHES, fl.CLIENTS))
def add_each(clients: Any) -> Any:
    return fl.federated_map(add, clients)


class OneBuffer(Sequence[Any]):
    """Clients that are read into the same batch."""

    def __init__(self, num_clients: int, wrap: Callable[[Any], Any]) -> None:
        self._batch = {"x": np.zeros((4, 3), np.float32)}
        self._num_clients, self._wrap = num_clients, wrap

    @override
    def __len__(self) -> int:
        return self._num_clients

    @override
    def __getitem__(self, index: Any) -> Any:
        if index >= self._num_clients:
            raise IndexError
        self._batch["x"][:] = index
        return self._wrap(self._batch)


def yield_batches(first: int, count: int = 70) -> Iterator[Any]:
    batch = {"x": np.zeros((1, 3), np.float32)}
    for number in range(count):
        batch["x"][:] = first + number
        yield batch


CLIENTS: dict[str, Callable[[], Any]] = {
    "a function": lambda: ClientData.from_function(
        range(3), OneBuffer(3, lambda batch: [batch]).__getitem__, BATCHES
    ),
    "a sequence": lambda: OneBuffer(3, lambda batch: [batch]),
    "values": lambda: ClientData.from_values(
        OneBuffer(3, lambda batch: [batch]), BATCHES
    ),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_clients_may_be_read_into_one_buffer(kind: str, local_contexts: Any) -> None:
    found = local_contexts(workers=1).invoke(add_each, CLIENTS[kind]())

    np.testing.assert_array_equal(found, [0, 12, 24])


def test_an_iterable_may_yield_one_buffer(local_contexts: Any) -> None:
    found = local_contexts(workers=1).invoke(
        add_each, [yield_batches(k) for k in (0, 1)]
    )

    np.testing.assert_array_equal(found, [3 * 2415, 3 * 2485])


def test_map_uses_arrays_as_they_were(local_contexts: Any) -> None:
    factor = np.ones(3, np.float32)
    rows = fl.SequenceType(fl.TensorType(np.float32, [3]))
    data = ClientData.from_values([[np.ones(3, np.float32)]], rows)

    mapped, same = (data.map(lambda row: row * factor) for _ in range(2))
    factor[:] = 2

    np.testing.assert_array_equal(mapped.read(0), np.ones((1, 3)))
    assert mapped.describe() == same.describe()
    other = data.map(lambda row: row * factor)
    np.testing.assert_array_equal(other.read(0), np.full((1, 3), 2))
    assert mapped.describe() != other.describe()


@fl.federated_computation(fl.FederatedType(VECTOR, fl.CLIENTS))
def add_up(clients: Any) -> Any:
    return fl.federated_sum(clients)


def test_tensors_of_clients_may_be_read_into_one_buffer(local_contexts: Any) -> None:
    def wrap(batch: Any) -> Any:
        return np.resize(batch["x"], 12)

    buffer = np.zeros(16, np.float32)

    def fill(batch: Any) -> Any:
        buffer[:12] = wrap(batch)
        return buffer

    found = local_contexts(workers=1).invoke(add_up, OneBuffer(4, fill))

    assert found[0] == 0 + 1 + 2 + 3


def from_values(array: Any) -> ClientData:
    return ClientData.from_values([array, array[:8].repeat(2)], VECTOR)


def from_batches(array: Any) -> ClientData:
    batches = [[{"x": array[:12].reshape(4, 3)}]]
    return ClientData.from_values(batches, BATCHES)


def from_frame(array: Any) -> ClientData:
    frame = pd.DataFrame({"who": np.repeat([0, 1], 8), "x": array}, copy=False)
    return ClientData.from_table(frame, **NAMES)


def from_arrow(array: Any) -> ClientData:
    return ClientData.from_table(
        pa.table({"who": np.repeat([0, 1], 8), "x": pa.array(array)}), **NAMES
    )


def from_locked(array: Any) -> ClientData:
    view = array.view()
    view.flags.writeable = False
    return ClientData.from_values([view], VECTOR)


@pytest.mark.parametrize(
    "build", [from_values, from_batches, from_frame, from_arrow, from_locked]
)
def test_clients_do_not_see_what_is_written_later(
    build: Callable[[Any], ClientData],
) -> None:
    array = np.arange(16, dtype=np.float32)
    data = build(array)
    before = str([data.read(place) for place in range(len(data))])

    array[:] = -1
    after = [data.read(place) for place in range(len(data))]
    assert str(after) == before

    for leaf in tf.nest.flatten(after):
        np.asarray(leaf)[...] = -2  # what is read is a copy
    assert str([data.read(place) for place in range(len(data))]) == before


def test_weights_are_read_only() -> None:
    weights: Any = np.ones(2)
    data = ClientData.from_values([[], []], BATCHES, weights=weights)

    weights[:] = 2
    with pytest.raises(ValueError, match="read-only"):
        data.weights[:] = 0  # pyright: ignore[reportOptionalSubscript]

    np.testing.assert_array_equal(data[:].weights, [1, 1])


def test_read_only_arrays_are_not_copied() -> None:
    array = np.frombuffer(np.arange(16, dtype=np.float32).tobytes(), np.float32)

    data = ClientData.from_values([array], VECTOR)

    assert np.shares_memory(data[0].read(), array)


@fl.federated_computation(
    fl.FederatedType(VECTOR, fl.SERVER), fl.FederatedType(VECTOR, fl.CLIENTS)
)
def pass_on(state: Any, clients: Any) -> Any:
    return state, fl.federated_sum(clients)


def test_a_call_that_returns_at_once_has_its_argument(local_contexts: Any) -> None:
    server, clients = np.zeros((2, 16), np.float32)
    with RayFederatedContext(local_contexts(workers=1)) as context:
        result = context.invoke(pass_on, (server, [clients, clients]))
        server[:], clients[:] = 1, 1
        found = asyncio.run(fl.program.materialize_value(result))

    np.testing.assert_array_equal(found, np.zeros((2, 16)))


def test_each_round_has_its_own_values() -> None:
    metrics, scores = {"loss": np.zeros(2)}, np.zeros(2)
    seen: list[float] = []

    def advance(state: Any, data: Any) -> Any:
        state["w"] += 1
        metrics["loss"] += sum(client[0]["x"][0, 0] for client in data)
        return state, metrics

    def evaluate(state: Any) -> Any:
        seen.append(float(state["w"][0]))
        scores[:] += 1
        return {"scores": scores, "w": state["w"]}

    process = LearningProcess(lambda: {"w": np.zeros(1)}, advance)
    clients = OneBuffer(3, lambda batch: [batch])
    history = run(process, clients, num_rounds=3, evaluate=evaluate).history

    assert seen == [1, 2, 3]
    assert history.values("scores/0") == history.values("w") == [1, 2, 3]
    assert history.values("training.loss/1") == [3, 6, 9]
    evaluation: Any = history[0].evaluation
    with pytest.raises(ValueError, match="read-only"):
        evaluation["scores"][:] = 5


def test_callbacks_cannot_change_a_record(tmp_path: pathlib.Path) -> None:
    refused: list[Exception] = []

    class Writer:
        def on_round(self, record: RoundRecord) -> None:
            training: Any = record.training
            evaluation: Any = record.evaluation
            for change in (
                lambda: training.update(loss=9.0),
                lambda: training.pop("loss"),
                lambda: operator.setitem(evaluation["inside"], "scores", 9),
                lambda: operator.setitem(evaluation["inside"]["scores"], 0, 9),
                lambda: operator.setitem(evaluation["table"], 0, 9),
            ):
                with pytest.raises((ValueError, TypeError)) as raised:
                    change()
                refused.append(raised.value)

    def step(state: Any, _: Any) -> Any:
        return state, {"loss": 1.0}

    result = run(
        LearningProcess(lambda: {"w": 0}, step),
        OneBuffer(3, lambda batch: [batch]),
        num_rounds=1,
        evaluate=lambda _: {"inside": {"scores": [1, 2]}, "table": np.zeros(200)},
        callbacks=[Writer()],
        storage_path=tmp_path,
    )

    assert len(refused) == 5
    for history in (result.history, History.load(tmp_path)):
        record: Any = history[0]
        assert pickle.loads(pickle.dumps(record)) == record
        assert record.training == {"loss": 1.0}
        assert record.evaluation["inside"] == {"scores": (1, 2)}
        with pytest.raises(errors.UnsupportedError, match="make a copy"):
            record.training["loss"] = 9.0
        with pytest.raises(ValueError, match="read-only"):
            record.evaluation["table"][0] = 9


def test_values_that_clients_begin_with_stay() -> None:
    initial = np.zeros(2)
    states = ClientStates((initial,))

    initial[:] = 1
    (found,) = states.take([0])
    with pytest.raises(ValueError, match="read-only"):
        found[0][:] = 2

    np.testing.assert_array_equal(states.take([0])[0][0], [0, 0])
