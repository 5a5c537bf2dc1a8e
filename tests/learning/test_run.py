import pathlib
import re
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning import (
    CohortSampler,
    EarlyStopping,
    LearningProcess,
    Model,
    RoundRecord,
    build_fed_avg,
    build_fed_eval,
    run,
)
from ray_fed.learning.cohorts import say_who
from ray_fed.program import ClientData
from tests.learning.counting import CLIENTS, Counter, build_counter, build_tally


def test_all_clients_take_part_without_a_cohort_size() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=2)

    assert result.state.seen == (tuple(CLIENTS), tuple(CLIENTS))
    assert [record.clients for record in result.history] == [tuple(range(6))] * 2


def test_each_round_has_the_cohort_of_its_sampler() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=3, cohort_size=2, seed=9)

    sampler = CohortSampler(6, 2, 9)
    for index, (record, seen) in enumerate(
        zip(result.history, result.state.seen, strict=True)
    ):
        assert record.round_index == index
        assert list(record.clients) == sampler.sample(index)
        assert seen == tuple(CLIENTS[client] for client in record.clients)


def test_resumed_run_equals_one_in_one_go() -> None:
    whole = run(build_counter(), CLIENTS, num_rounds=5, cohort_size=3, seed=1)
    first = run(build_counter(), CLIENTS, num_rounds=2, cohort_size=3, seed=1)

    rest = run(
        build_counter(),
        CLIENTS,
        num_rounds=5,
        cohort_size=3,
        seed=1,
        state=first.state,
    )

    assert rest.state == whole.state
    assert [record.round_index for record in rest.history] == [2, 3, 4]


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


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "in memory"])
@pytest.mark.parametrize(
    "returned",
    [3.0, [("loss", 3.0)], {"loss": object()}],
    ids=["a number", "a list", "an object"],
)
def test_evaluation_that_is_no_metrics_by_name_is_told(
    tmp_path: pathlib.Path, returned: Any, saves: bool
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"Expected .*metrics"):
        run(
            build_tally(),
            CLIENTS,
            num_rounds=2,
            evaluate=lambda _: returned,
            storage_path=tmp_path if saves else None,
        )


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "in memory"])
def test_metric_may_be_a_tensor(tmp_path: pathlib.Path, saves: bool) -> None:
    result = run(
        build_tally(),
        CLIENTS,
        num_rounds=8,
        evaluate=lambda _: {"loss": tf.constant(0.5)},
        storage_path=tmp_path if saves else None,
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
        stop=EarlyStopping("loss", patience=3),
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

    assert [value["training"] for value in manager.values().values()] == [
        {"num_clients": 6},
        {"num_clients": 6},
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_rounds": -1}, "`num_rounds`"),
        ({"num_rounds": 2.0}, "`num_rounds`"),
        ({"checkpoint_every": 0}, "`checkpoint_every`"),
        ({"evaluate_every": 0}, "`evaluate_every`"),
        ({"num_to_keep": 0}, "`num_to_keep`"),
        ({"on_error": "ignore"}, "`on_error`"),
        ({"callbacks": [3]}, "`callbacks`"),
        ({"cohort_size": 0}, "`cohort_size`"),
        ({"cohort_size": 2.0}, "`cohort_size`"),
        ({"seed": "a"}, "`seed`"),
        ({"seed": -1}, "`seed`"),
        ({"callbacks": Told()}, "a list of callbacks.*`callbacks`"),
        ({"callbacks": None}, "`callbacks`"),
        ({"evaluate": 3}, "`evaluate`"),
        ({"stop": 3}, "`stop`"),
        ({"storage_path": 3}, "`storage_path`"),
        ({"progress": "yes"}, "`progress`"),
        ({"data": None}, "`data`"),
        ({"process": 3}, "`process`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_argument_out_of_range_is_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(errors.ConfigError, match=told):
        run(
            **cast(
                "Any",
                {
                    "process": build_counter(),
                    "data": CLIENTS,
                    "num_rounds": 1,
                    **arguments,
                },
            )
        )


def test_evaluation_is_no_process_to_run(linear_model: Model) -> None:
    training = build_fed_avg(linear_model, keras.optimizers.SGD(0.01))

    with pytest.raises(errors.ConfigError, match="passed as `evaluate`"):
        run(build_fed_eval(linear_model, training), CLIENTS, num_rounds=1)


def test_no_rounds_return_the_initial_state() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=0)

    assert result.state == Counter(0, ())
    assert list(result.history) == []


def test_cohort_larger_than_all_clients_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="from 1 to 6"):
        run(build_counter(), CLIENTS, num_rounds=1, cohort_size=7)


def test_resumed_training_has_the_same_bits(
    linear_model: Model, make_batches: Callable[..., list[Any]]
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(4)]
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        keras.optimizers.SGD(1.0, momentum=0.9),
    )
    whole = run(process, clients, num_rounds=3, cohort_size=2)

    first = run(process, clients, num_rounds=1, cohort_size=2)
    rest = run(process, clients, num_rounds=3, cohort_size=2, state=first.state)

    for one, other in zip(
        whole.state.weights.trainable, rest.state.weights.trainable, strict=True
    ):
        np.testing.assert_array_equal(one, other)


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

    cohort = CohortSampler(6, 3, 9).sample(1)
    expected = who.replace("{[1]}", str(cohort[1])).replace(
        "{}", ", ".join(map(str, cohort))
    )
    assert caught.value.__notes__ == [f"In round 2 of the run, the {expected}"]


def test_error_of_a_round_names_clients_by_their_ids() -> None:
    data = ClientData.from_values({"anna": 1.0, "bert": 2.0}, np.float32)
    error = errors.ComputationError("no", errors.Location(client_index=1))
    whole = ValueError("no")

    say_who(error, 3, [1, 0], data)
    say_who(whole, 3, [1, 0], data)

    assert error.__notes__ == [
        "In round 4 of the run, the client is the one with the id 'anna'."
    ]
    (note,) = whole.__notes__
    assert note.endswith("the clients with the ids 'bert', 'anna'.")
