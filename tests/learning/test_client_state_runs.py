"""Runs of processes whose clients keep values: `learning.run` holds and saves them."""

import os
import pathlib
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.learning.run_loop as run_loop
from ray_fed import learning
from ray_fed.learning import (
    ClientStates,
    History,
    LearningProcess,
    Model,
    TrainingResult,
)
from ray_fed.program import UniformSampler

BatchMaker = Callable[..., list[Any]]

NUM_CLIENTS = 7
ROUNDS = 6
SEED = 4


@pytest.fixture(scope="module")
def process(linear_model: Model) -> LearningProcess:
    return learning.build_scaffold(linear_model, 0.05, num_clients=NUM_CLIENTS)


@pytest.fixture
def clients(make_batches: BatchMaker) -> list[Any]:
    return [make_batches([4, 2], seed) for seed in range(NUM_CLIENTS)]


def bits(*values: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(values))


def outcome(result: TrainingResult) -> tuple[bytes, bytes, list[Any]]:
    """Return the bits of the server's state and of the clients', and the metrics."""
    assert result.client_states is not None
    kept = result.client_states.take(range(NUM_CLIENTS))
    metrics = [dict(record.training) for record in result.history]
    return bits(result.state), bits(kept), metrics


def run(process: Any, clients: Any, num_rounds: int = ROUNDS, **more: Any) -> Any:
    return learning.run(
        process, clients, num_rounds=num_rounds, cohort_size=3, seed=SEED, **more
    )


def test_next_without_client_states_says_what_it_takes(
    process: LearningProcess, clients: list[Any]
) -> None:
    with pytest.raises(
        errors.ValueMismatchError, match="`state`, `kept`, `data`, found 2: "
    ):
        process.next(process.initialize(), clients)


def test_run_is_the_loop_that_calls_next(
    process: LearningProcess, clients: list[Any]
) -> None:
    sampler = UniformSampler(SEED)
    state, states = process.initialize(), ClientStates(process.initial_client_state)
    for index in range(ROUNDS):
        cohort = sampler.sample(index, NUM_CLIENTS, 3)
        data = [clients[client] for client in cohort]
        state, kept, _ = process.next(state, states.take(cohort), data)
        states.put(cohort, kept)

    server, kept, _ = outcome(run(process, clients))

    assert server == bits(state)
    assert kept == bits(states.take(range(NUM_CLIENTS)))
    assert len({value[0].tobytes() for value in states.take(range(NUM_CLIENTS))}) > 3


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4().hex}"


def test_resumed_run_has_the_bits_of_one_in_one_go(
    process: LearningProcess, clients: list[Any], storage: str
) -> None:
    whole = outcome(run(process, clients))

    run(process, clients, 2, storage_path=storage)
    run(process, clients, 3, storage_path=storage)

    assert outcome(run(process, clients, storage_path=storage)) == whole
    assert outcome(run(process, clients, storage_path=storage)) == whole


@pytest.mark.slow
def test_run_in_an_object_store_is_resumed(
    process: LearningProcess, clients: list[Any], s3_server: str
) -> None:
    storage = f"s3://bucket/{uuid.uuid4().hex}"
    whole = outcome(run(process, clients))

    run(process, clients, 3, storage_path=storage)

    assert outcome(run(process, clients, storage_path=storage)) == whole


def test_run_goes_on_from_a_result(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    whole = outcome(run(process, clients))
    first = run(process, clients, 3)
    before = outcome(first)
    given: dict[str, Any] = {
        "state": first.state,
        "client_states": first.client_states,
    }

    for storage in (None, tmp_path):
        rest = outcome(run(process, clients, storage_path=storage, **given))
        assert rest[:2] == whole[:2]

    assert outcome(first) == before


def test_little_memory_changes_no_bit(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    initial = process.initial_client_state
    row_bytes = sum(array.nbytes for array in initial)
    whole = outcome(run(process, clients))

    for storage in (None, tmp_path / "run"):
        little = ClientStates(
            initial, str(tmp_path / "spilled"), memory_bytes=2 * row_bytes
        )
        result = run(process, clients, client_states=little, storage_path=storage)
        assert outcome(result) == whole
        assert result.client_states is not None
        assert result.client_states.memory_bytes <= 2 * row_bytes


def test_clients_keep_what_the_last_round_that_counts_gave_them(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    def has_three(history: History) -> bool:
        return len(history) == 3

    stopped = run(process, clients, stop=has_three)

    assert stopped.reason == "stopped early"
    assert outcome(stopped) == outcome(run(process, clients, 3))


def test_round_that_a_signal_left_out_leaves_clients_as_they_were(
    process: LearningProcess,
    clients: list[Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_loop, "_FOLLOW_S", 0.1)

    def count(state: Any) -> dict[str, int]:
        return {"rounds": int(np.asarray(state.round_index))}

    def evaluate(state: Any) -> dict[str, int]:
        rounds = count(state)
        if rounds["rounds"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # longer than what follows a round may take
        return rounds

    two = outcome(run(process, clients, 2))
    whole = outcome(run(process, clients))

    left = run(process, clients, evaluate=evaluate, storage_path=tmp_path)
    monkeypatch.undo()

    assert (left.reason, len(left.history)) == ("interrupted", 2)
    assert outcome(left) == two
    finished = run(process, clients, evaluate=count, storage_path=tmp_path)
    assert outcome(finished) == whole


@pytest.mark.slow
def test_files_of_old_rounds_go(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    run(process, clients, 40, storage_path=tmp_path, num_to_keep=2)

    archives = list((tmp_path / "clients").iterdir())

    assert 1 <= len(archives) <= NUM_CLIENTS + 4  # one client's last row, at the least


def test_files_of_a_run_that_was_killed_before_its_first_save_go(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "clients").mkdir()
    for name in ("7.zip", ".8.zip.abc.tmp"):
        (tmp_path / "clients" / name).write_bytes(b"half an archive")

    run(process, clients, 1, storage_path=tmp_path)

    (left,) = (tmp_path / "clients").iterdir()
    assert left.name == "8.zip"


@pytest.mark.slow
def test_damaged_values_of_clients_end_a_resume_and_the_error_says_what_to_do(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    whole = outcome(run(process, clients))
    run(process, clients, 2, storage_path=tmp_path, checkpoint_every=1)
    path = tmp_path / "clients" / "1.zip"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(errors.SavedStateError, match=r"clients/1\.zip.*damaged") as why:
        run(process, clients, storage_path=tmp_path)
    assert "state after 2 rounds" in why.value.__notes__[0]
    (tmp_path / "round_2.zip").unlink()
    assert outcome(run(process, clients, storage_path=tmp_path)) == whole


def test_clients_go_on_where_the_server_does(
    process: LearningProcess, clients: list[Any]
) -> None:
    first = run(process, clients, 1)

    with pytest.raises(errors.ConfigError, match="`client_states` beside `state`"):
        run(process, clients, state=first.state)


def test_states_of_clients_that_keep_nothing_are_refused(
    linear_model: Model, clients: list[Any]
) -> None:
    fed_avg = learning.build_fed_avg(linear_model, keras.optimizers.SGD(0.1))

    with pytest.raises(errors.ConfigError, match="no `client_states`"):
        run(fed_avg, clients, client_states=ClientStates(np.zeros(1)))


def test_values_of_clients_without_the_state_of_the_server_are_refused(
    process: LearningProcess, clients: list[Any]
) -> None:
    first = run(process, clients)

    with pytest.raises(errors.ConfigError, match="`state` beside `client_states`"):
        run(process, clients, client_states=first.client_states)


def test_states_are_told_from_other_objects(
    process: LearningProcess, clients: list[Any]
) -> None:
    with pytest.raises(errors.ValueMismatchError, match="found 3"):
        run(process, clients, client_states=3)


def test_states_of_another_process_are_refused_though_they_are_empty(
    process: LearningProcess, clients: list[Any]
) -> None:
    for other in (np.zeros(1), {"a": np.zeros(1)}):
        with pytest.raises(errors.ValueMismatchError, match="those of another one"):
            run(process, clients, client_states=ClientStates(other))


def test_values_go_by_index_or_id_and_no_other_client_has_one(
    process: LearningProcess, clients: list[Any]
) -> None:
    named = {f"c{index}": batches for index, batches in enumerate(clients)}
    states = run(process, named, 1).client_states
    last = max(states.ids)

    by_id, by_index = states.take([f"c{last}", last])

    assert bits(by_id) == bits(by_index)
    for client in ("nonsense", 99, -1, "c"):
        with pytest.raises(errors.ConfigError, match="from 0 to 6, or the id"):
            states.take([client])
    with pytest.raises(errors.ConfigError, match=r"found 'c3'\.$"):
        run(process, clients, 1).client_states.take(["c3"])


def test_states_of_clients_that_data_lacks_are_refused(
    process: LearningProcess, clients: list[Any]
) -> None:
    initial = process.initial_client_state
    states = ClientStates(initial)
    states.put([0, 77, "x", -1], [initial] * 4)

    with pytest.raises(errors.ValueMismatchError, match="values of 77, 'x', -1: pass"):
        run(process, clients, client_states=states)
