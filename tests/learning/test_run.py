import dataclasses
import operator
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning import (
    EarlyStopping,
    History,
    LearningProcess,
    Model,
    RoundRecord,
    build_fed_avg,
    build_fed_eval,
    build_fed_per,
    run,
)
from ray_fed.program import ClientData, PoissonSampler, UniformSampler
from tests.learning.counting import CLIENTS, Counter, build_counter, build_tally


def test_all_clients_take_part_without_a_cohort_size() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=2)

    assert result.state.seen == (tuple(CLIENTS), tuple(CLIENTS))
    assert [record.clients for record in result.history] == [tuple(range(6))] * 2


def test_each_round_has_the_cohort_of_its_sampler() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=3, cohort_size=2, seed=9)

    sampler = UniformSampler(9)
    for index, (record, seen) in enumerate(
        zip(result.history, result.state.seen, strict=True)
    ):
        assert record.round_index == index
        assert list(record.clients) == sampler.sample(index, 6, 2)
        assert seen == tuple(CLIENTS[client] for client in record.clients)


class Reads(Sequence[Any]):
    """Clients' batches; notes which clients were asked for, and lacks some."""

    def __init__(self, data: Sequence[Any], lacks: int | None = None) -> None:
        self._data, self._lacks = data, lacks
        self.asked = [threading.Event() for _ in data]

    @override
    def __len__(self) -> int:
        return len(self._data)

    @override
    def __getitem__(self, index: Any) -> Any:
        if index == self._lacks:
            raise OSError("no such client")
        self.asked[index].set()
        return self._data[index]


class OneByOne:
    """Draws one client after another."""

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        del num_clients, k
        return [round_index]


def test_the_next_round_is_called_while_one_runs(
    averaging: LearningProcess, make_batches: Callable[..., list[Any]]
) -> None:
    data = [make_batches([3], seed) for seed in range(3)]
    expected = run(averaging, data, num_rounds=3, sampler=OneByOne())
    waited: list[bool] = []

    def load(client: int) -> Any:  # on a worker's thread, in the client's round
        following = reads.asked[min(client + 1, 2)]  # of three rounds
        waited.append(following.wait(timeout=60))
        return data[client]

    member = averaging.next.type_signature.parameter[1].member
    reads = Reads(ClientData.from_function(range(3), load, member))

    result = run(averaging, reads, num_rounds=3, sampler=OneByOne())

    assert waited == [True] * 3
    assert [record.clients for record in result.history] == [(0,), (1,), (2,)]
    assert result.history.values("loss") == expected.history.values("loss")
    assert all(record.seconds < 60 for record in result.history)


def test_what_fails_ahead_is_raised_in_its_turn(
    averaging: LearningProcess, make_batches: Callable[..., list[Any]]
) -> None:
    data = Reads([make_batches([3], seed) for seed in range(4)], lacks=2)
    told = Told()

    with pytest.raises(OSError, match="no such client") as raised:
        run(averaging, data, num_rounds=4, sampler=OneByOne(), callbacks=[told])

    assert [record.clients for record in told.records] == [(0,), (1,)]
    assert "In round 3 of the run" in raised.value.__notes__[0]


class Told:
    """The least that a callback is."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)


def test_rounds_are_evaluated_and_told() -> None:
    told = Told()

    result = run(
        build_counter(),
        CLIENTS,
        num_rounds=4,
        evaluate=lambda state: {"rounds": state.round_index},
        evaluate_every=2,
        callbacks=[told],
    )

    found = [record.evaluation for record in result.history]
    assert found == [None, {"rounds": 2}, None, {"rounds": 4}]
    assert told.records == list(result.history)
    assert result.reason == "finished"


@pytest.mark.parametrize(
    "returned",
    [3.0, [("loss", 3.0)], {"loss": object()}],
    ids=["a number", "a list", "an object"],
)
def test_evaluation_that_is_no_metrics_by_name_is_told(
    tmp_path: pathlib.Path, returned: Any
) -> None:
    for place in (None, tmp_path):
        with pytest.raises(errors.ValueMismatchError, match=r"Expected .*metrics"):
            run(
                build_tally(),
                CLIENTS,
                num_rounds=2,
                evaluate=lambda _: returned,
                storage_path=place,
            )


def test_metric_may_be_a_tensor(tmp_path: pathlib.Path) -> None:
    for place in (None, tmp_path):
        result = run(
            build_tally(),
            CLIENTS,
            num_rounds=8,
            evaluate=lambda _: {"loss": tf.constant(0.5)},
            storage_path=place,
            stop=EarlyStopping("evaluation.loss"),
        )

        assert result.reason == "stopped early"
        assert result.history.values("loss") == [0.5, 0.5]


def test_run_stops_early_with_the_state_of_its_last_round() -> None:
    result = run(
        build_counter(), CLIENTS, num_rounds=9, stop=lambda history: len(history) == 4
    )

    assert result.reason == "stopped early"
    assert [record.round_index for record in result.history] == [0, 1, 2, 3]
    assert result.state.round_index == 4


def test_early_stopping_waits_for_its_patience() -> None:
    losses = iter([5.0, 4.0, 4.5, 4.2, 4.1, 1.0])

    result = run(
        build_counter(),
        CLIENTS,
        num_rounds=6,
        evaluate=lambda _: {"loss": next(losses)},
        callbacks=[EarlyStopping("loss", patience=3)],
    )

    assert result.reason == "stopped early"
    assert result.history.values("loss") == [5.0, 4.0, 4.5, 4.2, 4.1]


class Boom:
    """Raises after a round, as somebody's callback does."""

    def on_round(self, record: RoundRecord) -> None:
        if record.round_index == 1:
            raise ValueError("no disk")


def test_callback_that_raises_ends_the_run_saved_and_is_named(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(errors.CallbackError, match=r"`Boom` .*round 2.*no disk"):
        run(
            build_tally(),
            CLIENTS,
            num_rounds=9,
            storage_path=tmp_path,
            checkpoint_every=5,
            callbacks=[Boom()],
        )

    saved = run(build_tally(), CLIENTS, num_rounds=2, storage_path=tmp_path)
    assert saved.state.round_index == len(saved.history) == 2


def test_callback_that_raises_may_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    result = run(
        build_counter(), CLIENTS, num_rounds=4, callbacks=[Boom(), told], on_error="log"
    )

    assert len(result.history) == len(told.records) == 4
    assert "The callback Boom raised after round 2" in caplog.text


def test_release_managers_are_callbacks() -> None:
    manager: Any = fl.program.MemoryReleaseManager()

    run(build_counter(), CLIENTS, num_rounds=2, callbacks=[manager])

    released = {number: each["training"] for number, each in manager.values().items()}
    assert released == {1: {"num_clients": 6}, 2: {"num_clients": 6}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_rounds", -1),
        ("num_rounds", 2.0),
        ("checkpoint_every", 0),
        ("checkpoint_spacing_s", -1),
        ("evaluate_every", 0),
        ("num_to_keep", 0),
        ("on_error", "ignore"),
        ("callbacks", [3]),
        pytest.param("callbacks", Told(), id="no list"),
        ("callbacks", None),
        ("cohort_size", 0),
        ("cohort_size", 7),
        ("cohort_size", 2.0),
        ("seed", "a"),
        ("seed", -1),
        ("evaluate", 3),
        ("stop", 3),
        ("storage_path", 3),
        ("progress", "yes"),
        ("data", None),
        ("process", 3),
    ],
    ids=str,
)
def test_argument_out_of_range_is_told(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {
        "process": build_counter(),
        "data": CLIENTS,
        "num_rounds": 1,
        name: value,
    }
    told = "from 1 to 6" if value == 7 else f"`{name}`"
    with pytest.raises(errors.ConfigError, match=told):
        run(**arguments)


def test_evaluation_is_no_process_to_run(linear_model: Model) -> None:
    with pytest.raises(errors.ConfigError, match="passed as `evaluate`"):
        run(build_fed_eval(linear_model), CLIENTS, num_rounds=1)


def test_no_rounds_return_the_initial_state() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=0)

    assert result.state == Counter(0, ())
    assert list(result.history) == []


def test_error_of_a_round_lists_at_most_ten_clients() -> None:
    def fail(state: Counter, data: list[Any]) -> Any:
        del state, data
        raise ValueError("no")

    process = LearningProcess(lambda: Counter(0, ()), fail)

    with pytest.raises(ValueError, match="no") as caught:
        run(process, [[]] * 1000, num_rounds=1)

    (note,) = caught.value.__notes__
    assert len(re.findall(r"\d+", note)) == 12
    assert note.endswith(" and 990 others.")


@pytest.mark.parametrize(
    ("error", "who"),
    [
        (ValueError("data[0]"), "cohort is, in order, `data[i]` for i in {}."),
        (
            errors.ComputationError("no", errors.Location(client_index=1)),
            "client at position 1 of the cohort is `data[{[1]}]`.",
        ),
    ],
    ids=["no place", "a place"],
)
def test_error_of_a_round_says_which_clients_its_cohort_has(
    error: Exception, who: str
) -> None:
    counter = build_counter()

    def fail_later(state: Counter, data: list[Any]) -> Any:
        if state.seen:
            raise error
        return counter.next(state, data)

    process = LearningProcess(counter.initialize, fail_later)

    with pytest.raises(type(error)) as caught:
        run(process, CLIENTS, num_rounds=2, cohort_size=3, seed=9)

    cohort = UniformSampler(9).sample(1, 6, 3)
    expected = who.replace("{[1]}", str(cohort[1])).replace(
        "{}", ", ".join(map(str, cohort))
    )
    assert caught.value.__notes__ == [f"In round 2 of the run, the {expected}"]


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        ({"x": np.ones((4, 3), np.float32)}, errors.ValueMismatchError, "the id 'bo'."),
        (
            {"x": np.array([[0, 0]] * 3 + [[0, np.nan]], np.float32)},
            errors.ComputationError,
            "the id 'bo'. Its batch 1 has a NaN in `x`, in row 3, column 1.",
        ),
    ],
    ids=["shape", "NaN"],
)
def test_a_wrong_input_is_told_with_its_client_and_batch(
    process: LearningProcess, batch: dict[str, Any], error: type[Exception], said: str
) -> None:
    (first,), (second,), (third,) = small_clients("f4", "i4")
    clients = {"ann": [first], "bo": [second, third | batch]}

    with pytest.raises(error) as caught:
        run(process, clients, num_rounds=1)

    assert caught.value.__notes__[0].endswith(said)


@pytest.mark.parametrize(
    ("validation_data", "error", "said"),
    [
        (
            [{"x": np.zeros((4, 2), "f4"), "y": np.zeros((4, 1), "i4")}],
            errors.ValueMismatchError,
            "`y` of batch 0 of .*have a column",
        ),
        *(
            (
                [{"x": np.zeros((4, 2), "f4"), "y": labels}],
                errors.ValueMismatchError,
                said,
            )
            for labels, said in (
                (np.eye(2)[[0, 1, 1, 0]], r"`y\.argmax\(axis=-1\)\.astype\('int32'\)`"),
                (np.eye(2, dtype="i4")[[0, 1, 1, 0]], "or take `CategoricalCross"),
                (np.ones((4, 2), "i4"), ": reshape `y`, or have a model of such"),
            )
        ),
        (
            ClientData.from_values([[1, 2]], fl.SequenceType(np.int32)),
            errors.ValueMismatchError,
            "found `int32",
        ),
        (pd.DataFrame({"x": [1.0]}), errors.ConfigError, "found a table of"),
        (
            [{"x": np.zeros(2, "f4"), "y": 1}] * 2,
            errors.ValueMismatchError,
            "this is one row, so put .* together in batches",
        ),
        (
            (np.zeros((4, 2), "f4"), np.zeros(3, "i4")),
            errors.ValueMismatchError,
            "one number of rows .* found `x` 4, `y` 3",
        ),
    ],
    ids=[
        *("list", "one-hot", "one-hot of int32", "rows of two"),
        *("ClientData", "table", "rows", "pair"),
    ],
)
def test_wrong_validation_data_are_told_before_the_first_round(
    process: LearningProcess,
    validation_data: Any,
    error: type[Exception],
    said: str,
) -> None:
    rounds: list[Any] = []

    def stop(history: History) -> bool:
        rounds.append(history)
        return False

    with pytest.raises(error, match=said) as caught:
        run(
            process,
            small_clients("f4", "i4"),
            num_rounds=1,
            validation_data=validation_data,
            stop=stop,
        )

    assert rounds == []
    assert "`validation_data`" in caught.value.__notes__[0]


def test_an_error_while_evaluating_says_that_it_is_of_validation_data(
    process: LearningProcess,
) -> None:
    clients = small_clients("f4", "i4")
    wrong = clients[0][0] | {"y": np.full(4, 99, "i4")}

    with pytest.raises(errors.ComputationError) as caught:
        run(process, clients, num_rounds=1, validation_data=[wrong])

    assert "`validation_data`" in caught.value.__notes__[0]


@dataclasses.dataclass(frozen=True)
class ByRegion:
    """A region of clients a round."""

    regions: tuple[str, ...]

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        names = sorted(set(self.regions))
        chosen = names[round_index % len(names)]
        return [i for i in range(num_clients) if self.regions[i] == chosen][:k]


def test_cohorts_are_those_of_a_sampler_of_ones_own(tmp_path: pathlib.Path) -> None:
    sampler = ByRegion(("north", "south", "south", "north", "south", "north"))
    arguments: dict[str, Any] = {"cohort_size": 2, "storage_path": tmp_path}

    run(build_tally(), CLIENTS, num_rounds=2, sampler=sampler, **arguments)
    resumed = run(build_tally(), CLIENTS, num_rounds=3, sampler=sampler, **arguments)

    cohorts = [record.clients for record in resumed.history]
    assert cohorts == [(0, 3), (1, 2), (0, 3)]
    for other in (ByRegion(("south",) * 6), None):
        with pytest.raises(errors.ConfigError, match="the `sampler`"):
            run(build_tally(), CLIENTS, num_rounds=3, sampler=other, **arguments)


def test_records_share_the_integers_of_their_clients() -> None:
    result = run(build_tally(), [["a"]] * 600, num_rounds=2)

    first, second = (record.clients for record in result.history)
    assert all(map(operator.is_, first, second))


def test_a_sampler_that_cannot_be_compared_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    class First:
        def sample(self, *_: Any) -> list[int]:
            return [0]

    samplers: list[Any] = [First(), ByRegion(("north",) * 6)]
    for sampler in samplers:
        path = tmp_path / type(sampler).__name__
        run(build_tally(), CLIENTS, num_rounds=1, sampler=sampler, storage_path=path)

    (message,) = [r.message for r in caplog.records if "sampler" in r.message]
    assert "First object>`, whose text does not show its parameters" in message


def test_samplers_of_programs_are_those_of_runs() -> None:
    sampler = PoissonSampler(0.5, seed=2)

    result = run(build_counter(), CLIENTS, num_rounds=4, sampler=sampler)

    cohorts = [list(record.clients) for record in result.history]
    assert cohorts == [sampler.sample(index, 6, None) for index in range(4)]


@pytest.mark.parametrize(
    "drawn", [[6], [-1], [1, 1], ["anna"], [True, False], [1.0], [np.True_]], ids=repr
)
def test_sampler_that_draws_no_clients_is_refused(drawn: list[Any]) -> None:
    class Other:
        def sample(self, *_: object) -> list[Any]:
            return drawn

    with pytest.raises(errors.ConfigError, match=r"different indices .*from 0 to 5"):
        run(build_counter(), CLIENTS, num_rounds=1, sampler=cast("Any", Other()))
    with pytest.raises(errors.ConfigError, match="with a method `sample"):
        run(build_counter(), CLIENTS, num_rounds=1, sampler=cast("Any", drawn))


def test_clients_of_a_dictionary_have_its_ids() -> None:
    named = dict(zip("abcdef", CLIENTS, strict=True))
    counter = build_counter()

    def fail(state: Counter, data: Any) -> Any:
        raise ValueError(len(data))

    result = run(counter, named, num_rounds=2, cohort_size=2)
    with pytest.raises(ValueError, match="6") as caught:
        run(LearningProcess(counter.initialize, fail), named, num_rounds=1)

    plain = run(counter, CLIENTS, num_rounds=2, cohort_size=2)
    assert result.state == plain.state
    assert "with the ids 'a', 'b', 'c'" in caught.value.__notes__[0]


def small_clients(dtype: str, kind: str) -> list[list[Any]]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(3, 4, 2)).astype(np.float32)
    y = (x[..., 0] > 0).astype(kind)
    pairs = zip(x.astype(dtype), y, strict=True)
    return [[{"x": rows, "y": labels}] for rows, labels in pairs]


@pytest.fixture(scope="module")
def classifier() -> Model:
    keras_model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    return Model.from_keras(
        keras_model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


@pytest.fixture(scope="module")
def process(classifier: Model) -> LearningProcess:
    return build_fed_avg(classifier, "sgd")


def test_numpys_own_dtypes_are_cast_and_said_once(
    process: LearningProcess, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run(process, small_clients("f4", "i4"), num_rounds=2)
    wide = small_clients("f8", "i8")

    found = run(process, wide, num_rounds=2)
    told = [record.message for record in caplog.records]
    silent = run(process, wide, num_rounds=2, cast=True)

    for result in (found, silent):
        np.testing.assert_equal(
            result.state.weights.trainable, plain.state.weights.trainable
        )
    assert len(told) == len(caplog.records) == 1
    assert "arrays of float64 where the model takes float32" in told[0]
    with pytest.raises(errors.ValueMismatchError, match="float32"):
        run(process, wide, num_rounds=1, cast=False)
    wide[0][0]["y"][0] = 2**40
    with pytest.raises(errors.ValueMismatchError, match="int32"):
        run(process, wide, num_rounds=1)


@pytest.mark.parametrize("kind", ["i8", "u1", "?"])
def test_whole_numbers_are_labels_of_a_binary_loss(kind: str) -> None:
    layers = [keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")]
    model = Model.from_keras(keras.Sequential(layers), loss="binary_crossentropy")
    process = build_fed_avg(model, "sgd")
    floats, classes = small_clients("f4", "f4"), small_clients("f4", kind)

    plain = run(process, floats, num_rounds=1)
    found = run(process, classes, num_rounds=1)

    assert found.history[0].training == plain.history[0].training
    if kind == "i8":
        classes[0][0]["y"][0] = 2**24 + 1
        with pytest.raises(errors.ValueMismatchError, match="convert it first"):
            run(process, classes, num_rounds=1)


def test_validation_data_are_evaluated(
    process: LearningProcess, classifier: Model
) -> None:
    clients = small_clients("f4", "i4")
    (batch,) = clients[2]
    evaluation = build_fed_eval(classifier, process)
    of_weights = build_fed_eval(classifier)

    def evaluate(state: Any) -> Any:
        return evaluation.next(state, clients[2:])

    at_clients = ClientData.from_values(clients, classifier.data_type.member)
    signature = {"x": tf.TensorSpec([None, 2]), "y": tf.TensorSpec([None], tf.int32)}
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([batch]), output_signature=signature
    )
    ways: list[dict[str, Any]] = [
        {"evaluate": evaluate},
        {"validation_data": [at_clients[2]]},
        {"validation_data": at_clients[2:]},
        {"validation_data": at_clients[2]},
        {"validation_data": dataset},
        {"validation_data": [dataset]},
        {"validation_data": [at_clients[2], []]},
        {"validation_data": (batch["x"].astype("f8"), batch["y"])},
        {"validation_data": [batch]},
        {"validation_data": {"c": [batch]}, "evaluate": evaluation},
        {"validation_data": clients[2:], "evaluate": of_weights},
        {"validation_data": ([batch], []), "evaluate": evaluation},
    ]
    found = [
        run(process, clients[:2], num_rounds=1, **way).history[0].evaluation
        for way in ways
    ]

    assert found[0] is not None
    assert found == found[:1] * len(found)
    plain = LearningProcess(process.initialize, process.next)
    for arguments, said in [
        ({"evaluate": evaluation}, "without the other: no data"),
        ({"validation_data": 3}, "without the other: None"),
        ({"validation_data": [batch], "evaluate": evaluate}, "has its own data"),
        ({"validation_data": batch["x"], "evaluate": evaluation}, "a pair `"),
        ({"validation_data": batch, "evaluate": evaluation}, "put it in a list"),
        ({"validation_data": (batch["x"], None), "evaluate": evaluation}, "with None"),
        ({"validation_data": 3, "evaluate": evaluation}, "found 3"),
        ({"validation_data": "a.csv", "evaluate": evaluation}, "found 'a.csv'"),
    ]:
        with pytest.raises(errors.ConfigError, match=said):
            run(plain, clients, num_rounds=1, **cast("Any", arguments))


def test_a_pair_is_evaluated_in_batches_as_it_was_passed(
    process: LearningProcess,
) -> None:
    clients = small_clients("f4", "i4")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 2)).astype(np.float32)
    y = rng.integers(0, 2, 70, np.int32)
    starts = (0, 32, 64)
    batches = [{"x": x[s : s + 32].copy(), "y": y[s : s + 32]} for s in starts]
    read: list[Any] = []

    class Overwrite:
        def on_round(self, record: RoundRecord) -> None:
            read.append(record)
            x[:] = 0

    def evaluations(data: Any) -> list[Any]:
        result = run(
            process,
            clients,
            num_rounds=2,
            validation_data=data,
            callbacks=[Overwrite()],
        )
        return [record.evaluation for record in result.history]

    found = evaluations((x, y))

    assert len(read) == 2
    assert found == evaluations(batches)


def test_metrics_of_an_evaluation_are_known_before_the_first_round(
    process: LearningProcess,
) -> None:
    clients = small_clients("f4", "i4")

    def run_with(monitor: str) -> History:
        stopping = EarlyStopping(monitor, patience=9)
        return run(
            process,
            clients,
            num_rounds=1,
            validation_data=clients,
            evaluate_every=2,
            callbacks=[told, stopping],
        ).history

    told = Told()
    for wrong in ("acuracy", "evaluation.acuracy", "training.acuracy"):
        with pytest.raises(errors.ConfigError, match=r"'evaluation\.loss'.*acuracy`"):
            run_with(wrong)
    assert told.records == []
    for right in ("loss", "evaluation.loss", "training.loss", "num_examples"):
        history = run_with(right)
    with pytest.raises(errors.ConfigError, match=r"evaluation\.acuracy`"):
        History(history).values("evaluation.acuracy")


def test_weights_of_clients_are_not_what_validation_data_are_evaluated_with(
    classifier: Model, caplog: pytest.LogCaptureFixture
) -> None:
    clients = small_clients("f4", "i4")
    process = build_fed_per(classifier, "sgd", personal=["bias"])

    run(process, clients, num_rounds=1)
    assert "weights of their own" not in caplog.text
    run(process, clients, num_rounds=1, validation_data=clients)

    assert "weights of their own (bias)" in caplog.text


def test_history_is_loaded_from_a_path_alone(tmp_path: pathlib.Path) -> None:
    result = run(
        build_tally(),
        CLIENTS,
        num_rounds=3,
        evaluate=lambda _: {"a": 1.5},
        storage_path=tmp_path / "run",
        checkpoint_every=1,
    )

    loaded = History.load(tmp_path / "run")
    assert loaded == result.history
    assert loaded.values("a") == [1.5] * 3
    with pytest.raises(errors.ConfigError, match="found none: pass its"):
        History.load(tmp_path / "none")
    path = tmp_path / "run" / "history_0.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(History.load(tmp_path / "run")) == 2


def test_runs_beside_one_another_have_their_own_records(
    averaging: LearningProcess, make_batches: Any, local_contexts: Any
) -> None:
    context = local_contexts(workers=2, max_dropped_clients=1)
    fl.framework.set_default_context(context)
    is_going, is_done = threading.Event(), threading.Event()
    failures: list[int] = []

    def load(client: int) -> Any:
        if client < 2:
            return make_batches([2], client)
        failures.append(client)
        if len(failures) == 2:
            is_going.set()
            is_done.wait(60)
        raise ValueError("no data")

    def run_beside() -> None:
        is_going.wait(60)
        fl.framework.set_default_context(context)
        try:
            run(averaging, [make_batches([2], 7)], num_rounds=3)
        finally:
            is_done.set()

    member: Any = averaging.next.type_signature.parameter[1].member
    data = ClientData.from_function(range(3), load, member)
    beside = threading.Thread(target=run_beside)
    beside.start()
    history = run(averaging, data, num_rounds=3).history
    beside.join()

    assert [record.dropped for record in history] == [(2,)] * 3
