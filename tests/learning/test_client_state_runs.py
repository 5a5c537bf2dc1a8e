"""Runs of processes whose clients keep values: `learning.run` holds and saves them."""

# pyright: reportPrivateUsage=false

import asyncio
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.learning.run_loop as run_loop
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.data import ClientData
from ray_fed.learning import (
    ClientStates,
    History,
    LearningProcess,
    Model,
    TrainingResult,
)
from ray_fed.program import FileProgramStateManager, UniformSampler

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


@pytest.fixture(scope="module")
def whole(
    process: LearningProcess, make_batches: BatchMaker, thread_context: ExecutionContext
) -> tuple[bytes, bytes, list[Any]]:
    """The outcome of a run in one go."""
    clients = [make_batches([4, 2], seed) for seed in range(NUM_CLIENTS)]
    with fl.framework.get_context_stack().install(thread_context):
        return outcome(run(process, clients))


def test_next_without_client_states_says_what_it_takes(
    process: LearningProcess, clients: list[Any]
) -> None:
    with pytest.raises(
        errors.ValueMismatchError, match="`state`, `kept`, `data`, found 2: "
    ):
        process.next(process.initialize(), clients)


def test_run_is_the_loop_that_calls_next(
    process: LearningProcess, clients: list[Any], whole: Any
) -> None:
    sampler = UniformSampler(SEED)
    state, states = process.initialize(), ClientStates(process.initial_client_state)
    for index in range(ROUNDS):
        cohort = sampler.sample(index, NUM_CLIENTS, 3)
        data = [clients[client] for client in cohort]
        state, kept, _ = process.next(state, states.take(cohort), data)
        states.put(cohort, kept)

    server, kept, _ = whole

    assert server == bits(state)
    assert kept == bits(states.take(range(NUM_CLIENTS)))
    assert len({value[0].tobytes() for value in states.take(range(NUM_CLIENTS))}) > 3


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "file":
        return str(tmp_path / "run")
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return f"{request.param}://bucket/{uuid.uuid4().hex}"


def test_resumed_run_has_the_bits_of_one_in_one_go(
    process: LearningProcess, clients: list[Any], storage: str, whole: Any
) -> None:
    run(process, clients, 2, storage_path=storage)
    run(process, clients, 3, storage_path=storage)

    assert outcome(run(process, clients, storage_path=storage)) == whole
    assert outcome(run(process, clients, storage_path=storage)) == whole


def test_run_goes_on_from_a_result(
    process: LearningProcess,
    clients: list[Any],
    tmp_path: pathlib.Path,
    whole: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = run(process, clients, 3)
    before = outcome(first)
    given: dict[str, Any] = {
        "state": first.state,
        "client_states": first.client_states,
    }

    for storage in (None, tmp_path, tmp_path):
        rest = outcome(run(process, clients, storage_path=storage, **given))
        assert rest[:2] == whole[:2]
    assert not caplog.messages
    assert outcome(first) == before
    given["client_states"].put([0], given["client_states"].take([1]))
    again = outcome(run(process, clients, storage_path=tmp_path, **given))

    assert again == rest
    assert "are not used, because" in caplog.text


def test_little_memory_changes_no_bit(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path, whole: Any
) -> None:
    initial = process.initial_client_state
    row_bytes = sum(array.nbytes for array in initial)
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
    whole: Any,
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
    left = run(
        process, clients, evaluate=evaluate, storage_path=tmp_path, on_signal="return"
    )
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
    manager = FileProgramStateManager(tmp_path, "round_")
    saved, _ = asyncio.run(manager.load_latest({"state": process.initialize()}))
    assert saved["state"].round_index == 1


@pytest.mark.slow
def test_damaged_values_of_clients_end_a_resume_and_the_error_says_what_to_do(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path, whole: Any
) -> None:
    run(process, clients, 2, storage_path=tmp_path, checkpoint_every=1)
    path = tmp_path / "clients" / "1.zip"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(errors.SavedStateError, match=r"clients/1\.zip.*damaged") as why:
        run(process, clients, storage_path=tmp_path)
    assert "state after 2 rounds" in why.value.__notes__[0]
    (tmp_path / "round_2.zip").unlink()
    assert outcome(run(process, clients, storage_path=tmp_path)) == whole


def test_states_that_do_not_go_with_the_run_are_refused(
    process: LearningProcess, clients: list[Any], averaging: LearningProcess
) -> None:
    first = run(process, clients, 1)
    unknown = ClientStates(process.initial_client_state)
    unknown.put([0, 77, "x", -1], [process.initial_client_state] * 4)
    others = (ClientStates(np.zeros(1)), ClientStates({"a": np.zeros(1)}))
    kept = first.client_states

    for built, given, match in (
        (process, {"state": first.state}, "`client_states` beside `state`"),
        (process, {"client_states": kept}, "`state` beside `client_states`"),
        (averaging, {"client_states": others[0]}, "no `client_states`"),
        (process, {"client_states": 3}, "found 3"),
        (process, {"client_states": others[0]}, "states of another process"),
        (process, {"client_states": others[1]}, "states of another process"),
        (process, {"client_states": unknown}, "values of 77, 'x', -1: pass"),
    ):
        options: dict[str, Any] = {**given}
        with pytest.raises(errors.UserError, match=match):
            run(built, clients, **options)


IDS: dict[str, list[Any]] = {
    "whole numbers": [5, 4, 3, 2, 1, 0, 77],
    "text": ["anna", "bert", "c", "d", "e", "f", "7"],
    "tuples": [("a", number) for number in range(NUM_CLIENTS)],
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_client_states_go_by_id(
    process: LearningProcess,
    clients: list[Any],
    whole: Any,
    tmp_path: pathlib.Path,
    ids: list[Any],
) -> None:
    data = ClientData.from_values(
        dict(zip(ids, clients, strict=True)), process.model.data_type.member
    )
    initial = process.initial_client_state

    first = run(process, data, 3, storage_path=tmp_path / "run")
    first.client_states.save(str(tmp_path / "kept"))
    kept = ClientStates.load(str(tmp_path / "kept"), initial)
    options: dict[str, Any] = {"state": first.state, "client_states": kept}
    rest = run(process, list(data), **options).client_states
    resumed = run(process, data, storage_path=tmp_path / "run").client_states

    for states in (rest, resumed):
        assert set(states.ids) <= set(ids)
        taken = states.take(ids)
        assert taken.ids == tuple(ids)
        assert bits(*taken) == whole[1]
    data = data.select(ids[::-1])
    backwards = run(process, tuple(data), 3, **options).client_states
    assert bits(*backwards.take(ids)) == bits(*kept.take(ids))
    backwards.put(ids[:1], [initial])
    assert bits(backwards.take(ids[:1])) == bits(initial)


def test_whole_number_that_is_no_id_is_an_index_with_a_warning(
    process: LearningProcess, clients: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    data = dict(zip(IDS["whole numbers"], clients, strict=True))
    states = run(process, data, 1).client_states

    taken = states.take([6, 5])

    assert taken.ids == (77, 5)
    assert [record.args for record in caplog.records] == [(6, 77)]


@pytest.mark.parametrize(
    ("ids", "unknown", "nearest"),
    [
        ("whole numbers", 78, "77"),
        ("whole numbers", "77", "77"),
        ("whole numbers", -50, "0"),
        ("text", "ana", "anna"),
        ("text", 7, "'7'"),
        ("text", np.zeros(1), None),
    ],
)
def test_unknown_client_is_refused_and_the_nearest_is_named(
    process: LearningProcess, ids: str, unknown: Any, nearest: str | None
) -> None:
    states = ClientStates(process.initial_client_state)
    states._limit_to(IDS[ids])
    then = rf" Did you mean `{nearest}`\?$" if nearest else r"\.$"

    for call in (
        lambda: states.take([unknown]),
        lambda: states.put([unknown], [process.initial_client_state]),
    ):
        with pytest.raises(
            errors.ConfigError, match=rf"the id of one of the 7.*{then}"
        ):
            call()


def test_run_whose_clients_keep_values_has_each_client_once(
    process: LearningProcess,
) -> None:
    states = ClientStates(process.initial_client_state)

    with pytest.raises(errors.ConfigError, match=r"client once .*the id 'b' twice"):
        states._limit_to(["a", "b", "c", "b"])
