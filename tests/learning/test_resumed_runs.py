"""Runs that are saved: resumed to the same bits, or refused with what differs."""

import asyncio
import logging
import os
import pathlib
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import (
    EarlyStopping,
    History,
    LearningProcess,
    Model,
    RoundRecord,
    build_fed_avg,
    build_fed_eval,
    run,
)
from ray_fed.learning.checkpoints import FolderLock
from ray_fed.program import FileProgramStateManager
from tests.learning.counting import CLIENTS, Tally, build_counter, build_tally

SIZE = 8


def build_noisy() -> LearningProcess:
    """Return a process whose rounds draw random numbers, at clients and server."""

    @rtf.computation
    def initial() -> Any:
        return {"model": tf.zeros([SIZE]), "count": tf.constant(0)}

    state_type = initial.type_signature.result

    @rtf.computation(state_type, np.float32)
    def work(state: Any, x: Any) -> Any:
        return tf.math.tanh(state["model"] * x) + tf.random.normal([SIZE])

    @rtf.computation(state_type, fl.TensorType(np.float32, [SIZE]))
    def update(state: Any, mean: Any) -> Any:
        model = state["model"] + mean + tf.random.normal([SIZE])
        return {"model": model, "count": state["count"] + 1}

    @rtf.computation(state_type)
    def measure(state: Any) -> Any:
        return {"norm": tf.norm(state["model"])}

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(initial, fl.SERVER)

    @fl.federated_computation(
        fl.FederatedType(state_type, fl.SERVER),
        fl.FederatedType(np.float32, fl.CLIENTS),
    )
    def run_round(state: Any, data: Any) -> Any:
        found = fl.federated_map(work, (fl.federated_broadcast(state), data))
        new_state = fl.federated_map(update, (state, fl.federated_mean(found)))
        return new_state, fl.federated_map(measure, new_state)

    return LearningProcess(initialize, run_round)


@rtf.computation(fl.TensorType(np.float32, [SIZE]))
def perturb(model: Any) -> Any:
    return tf.norm(model + tf.random.normal([SIZE]))


@fl.federated_computation(
    fl.FederatedType(fl.TensorType(np.float32, [SIZE]), fl.SERVER)
)
def evaluate_noisy(model: Any) -> Any:
    return fl.federated_map(perturb, model)


def evaluate(state: Any) -> dict[str, Any]:
    return {"perturbed": evaluate_noisy(state["model"])}


NUMBERS: Any = [np.float32(n) for n in range(1, 7)]


def same(one: Any, other: Any) -> bool:
    """Return whether two results have the same bits, but for what they cost."""
    return one.state["model"].tobytes() == other.state["model"].tobytes() and [
        (r.round_index, r.clients, dict(r.training), r.evaluation) for r in one.history
    ] == [
        (r.round_index, r.clients, dict(r.training), r.evaluation)
        for r in other.history
    ]


def run_noisy(place: Any, num_rounds: int, **arguments: Any) -> Any:
    """Run as a new program does: the context has counted no call before it."""
    context: Any = fl.framework.get_context_stack().current
    context.resume_at(0)
    return run(
        build_noisy(),
        NUMBERS,
        num_rounds=num_rounds,
        cohort_size=3,
        storage_path=place,
        evaluate=evaluate,
        evaluate_every=2,
        **arguments,
    )


def test_resumed_run_has_the_bits_and_the_history_of_one_in_one_go(
    tmp_path: pathlib.Path,
) -> None:
    whole = run_noisy(None, 6)
    for num_rounds in (1, 2, 5):
        part = run_noisy(tmp_path, num_rounds)
        assert len(part.history) == num_rounds

    rest = run_noisy(tmp_path, 6)

    assert same(whole, rest)
    assert rest.history[3].evaluation is not None
    assert type(rest.history[0].training["norm"]) is np.float32
    again = run_noisy(tmp_path, 6)
    assert same(whole, again)  # nothing is left to run


def test_debugged_run_has_the_bits_of_others_and_is_resumed_to_them(
    tmp_path: pathlib.Path,
) -> None:
    whole = run_noisy(None, 6)
    config = ray_fed.Config(backend="local", debug=True)
    with ray_fed.create_context(config) as context:
        fl.framework.set_default_context(context)
        part = run_noisy(tmp_path, 3)
        rest = run_noisy(tmp_path, 6)
        calls = context.num_calls

    assert len(part.history) == 3
    assert same(whole, rest)
    assert calls == 7  # the initial state, and six rounds


class Crash:
    def on_round(self, record: RoundRecord) -> None:
        if record.round_index == 3:
            raise KeyError("gone")


def test_run_that_broke_goes_on_in_memory_too() -> None:
    place = f"memory://runs/{uuid.uuid4().hex}"
    whole = run_noisy(None, 6)
    with pytest.raises(errors.CallbackError, match="Crash"):
        run_noisy(place, 6, callbacks=[Crash()])

    assert same(whole, run_noisy(place, 6))


class WaitForFile:
    """Waits in a round until an earlier one is saved: rounds are shorter than saves."""

    def __init__(self, round_index: int, path: pathlib.Path) -> None:
        self._round_index, self._path = round_index, path

    def on_round(self, record: RoundRecord) -> None:
        until = time.monotonic() + 10
        while record.round_index == self._round_index and not self._path.exists():
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("num_to_keep", "kept"), [(2, (6, 7)), (None, (2, 4, 6, 7))], ids=["last", "all"]
)
def test_so_many_states_are_kept(
    tmp_path: pathlib.Path, num_to_keep: int | None, kept: tuple[int, ...]
) -> None:
    run(
        build_tally(),
        CLIENTS,
        num_rounds=7,
        storage_path=tmp_path,
        checkpoint_every=2,
        num_to_keep=num_to_keep,
    )

    names = {path.name for path in tmp_path.iterdir()}
    states = {f"round_{rounds}.zip" for rounds in kept}
    assert names == {*states, "run_0.zip", "history_0.log"}


def test_each_round_is_saved_where_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    arguments: dict[str, Any] = {"num_rounds": 5, "num_to_keep": None}
    place = tmp_path / "each"
    run(build_tally(), CLIENTS, storage_path=place, checkpoint_every=1, **arguments)

    saved = {path.name for path in place.glob("round_*")}
    assert saved == {f"round_{number}.zip" for number in range(1, 6)}

    place = tmp_path / "spaced"
    run(
        build_tally(), CLIENTS, storage_path=place, checkpoint_spacing_s=60, **arguments
    )

    assert len(list(place.glob("round_*"))) <= 2


def test_checkpoint_cut_anywhere_costs_its_rounds_only(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"storage_path": tmp_path, "cohort_size": 2}
    wait = WaitForFile(1, tmp_path / "round_1.zip")
    whole = run(build_tally(), CLIENTS, num_rounds=4, callbacks=[wait], **arguments)
    path = tmp_path / "round_4.zip"
    content = path.read_bytes()

    for length in range(0, len(content), 100):
        path.write_bytes(content[:length])
        with caplog.at_level(logging.CRITICAL):
            found = run(build_tally(), CLIENTS, num_rounds=4, **arguments)
        assert found.state == whole.state
        assert found.history.values("loss") == whole.history.values("loss")


@pytest.mark.parametrize("cut", range(8))
def test_damaged_record_costs_the_rounds_after_it_or_is_told(
    tmp_path: pathlib.Path, cut: int
) -> None:
    arguments: dict[str, Any] = {"storage_path": tmp_path, "cohort_size": 2}
    every: Any = {"checkpoint_every": 1, "num_to_keep": 2}
    whole = run(build_tally(), CLIENTS, num_rounds=4, **arguments, **every)
    path = tmp_path / "history_0.log"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    # The file ends in the midst of a record, or one byte of it is another one.
    record = lines[cut % 4]
    lines[cut % 4 :] = [record[:20]] if cut < 4 else [record[:9] + b"!" + record[10:]]
    path.write_bytes(b"".join(lines))

    if cut % 4 < 3:
        with pytest.raises(errors.SavedStateError, match="records of at least 3 round"):
            run(build_tally(), CLIENTS, num_rounds=4, **arguments)
        path.write_bytes(b"")
        with pytest.raises(errors.SavedStateError, match="none that is whole"):
            History.load(tmp_path)
        return
    assert len(History.load(tmp_path)) == 3
    found = run(build_tally(), CLIENTS, num_rounds=4, **arguments)
    assert found.state == whole.state
    assert found.history.values("loss") == whole.history.values("loss")


class Start:
    """Begins another run with the same arguments after a round."""

    def __init__(self, place: Any, round_index: int) -> None:
        self._place, self._round_index = place, round_index
        self.errors: list[BaseException] = []

    def on_round(self, record: RoundRecord) -> None:
        if record.round_index == self._round_index:
            try:
                run_tally(self._place, 2)
            except errors.StorageError as error:
                self.errors.append(error)


def run_tally(place: Any, num_rounds: int, *callbacks: Any) -> Any:
    return run(
        build_tally(),
        CLIENTS,
        num_rounds=num_rounds,
        storage_path=place,
        checkpoint_every=1,
        callbacks=callbacks,
    )


def test_second_run_in_a_folder_is_refused(tmp_path: pathlib.Path) -> None:
    start = Start(tmp_path, 1)
    whole = run_tally(tmp_path, 4, start)

    (error,) = start.errors
    assert "Expected to be the only run that saves in" in str(error)
    assert f"the process {os.getpid()} on" in str(error)
    assert len(whole.history) == 4
    assert run_tally(tmp_path, 4).history == whole.history  # the lock ended with it


def test_run_elsewhere_ends_once_another_one_began_in_its_place() -> None:
    place = f"memory://runs/{uuid.uuid4().hex}"

    with pytest.raises(errors.StorageError, match="the only run that saves in"):
        run_tally(place, 6, Start(place, 3))
    again = run_tally(place, 6)

    assert again.history.values("loss") == run_tally(None, 6).history.values("loss")


def test_folder_of_a_killed_program_is_not_locked(tmp_path: pathlib.Path) -> None:
    lock = (
        "import sys; from ray_fed.learning.checkpoints import FolderLock;"
        "print(FolderLock(sys.argv[1]).take()); sys.stdout.flush(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", lock, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        mine = FolderLock(str(tmp_path))
        assert not mine.take()
        other.kill()
        other.wait()

    assert mine.take()
    assert not FolderLock(str(tmp_path)).take()
    mine.release()


def count_fields(state: Any) -> dict[str, int]:
    return {"fields": len(state)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cohort_size": 4}, "`cohort_size`: 3 there, 4 here"),
        ({"seed": 1}, "`seed`: 0 there, 1 here"),
        ({"evaluate_every": 3}, "`evaluate_every`"),
        ({"data": CLIENTS[:5]}, "number of clients: 6 there, 5 here"),
        ({"data": [*CLIENTS[:5], ["f", "g"]]}, "numbers of elements"),
    ],
    ids=["cohort size", "seed", "evaluate_every", "fewer clients", "more elements"],
)
def test_resume_with_other_arguments_is_refused(
    tmp_path: pathlib.Path, changed: dict[str, Any], told: str
) -> None:
    arguments: dict[str, Any] = {
        "data": CLIENTS,
        "storage_path": tmp_path,
        "cohort_size": 3,
        "evaluate": count_fields,
    }
    run(build_tally(), num_rounds=1, **arguments)

    with pytest.raises(errors.ConfigError, match=told):
        run(build_tally(), num_rounds=2, **arguments | changed)


class LazyClients(Sequence[Any]):
    """Notes the place of each client that is read."""

    def __init__(self, read: set[int]) -> None:
        self._read = read

    @override
    def __len__(self) -> int:
        return 50

    @override
    def __getitem__(self, index: Any) -> list[str]:
        if index >= len(self):
            raise IndexError(index)
        self._read.add(index)
        return ["a"]


class LazyTable(Mapping[str, Any]):
    """The same by id."""

    def __init__(self, read: set[int]) -> None:
        self._clients = LazyClients(read)

    @override
    def __len__(self) -> int:
        return len(self._clients)

    @override
    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))

    @override
    def __getitem__(self, name: str) -> list[str]:
        return self._clients[int(name)]


@pytest.mark.parametrize("kind", [LazyClients, LazyTable])
def test_only_clients_of_a_cohort_are_read(
    tmp_path: pathlib.Path, kind: Callable[[set[int]], Any]
) -> None:
    read = set[int]()
    arguments: Any = {"cohort_size": 2, "storage_path": tmp_path}

    first = run(build_tally(), kind(read), num_rounds=2, **arguments)
    result = run(build_tally(), kind(read), num_rounds=3, **arguments)

    assert first.history == result.history[:2]
    assert read == {client for record in result.history for client in record.clients}


def test_resume_with_half_the_rows_is_refused(
    tmp_path: pathlib.Path,
    averaging: LearningProcess,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([4, 2], seed) for seed in range(2)]
    run(averaging, clients, num_rounds=1, storage_path=tmp_path)
    halved = [make_batches([2, 1], seed) for seed in range(2)]

    with pytest.raises(errors.ConfigError, match="elements and of rows"):
        run(averaging, halved, num_rounds=2, storage_path=tmp_path)


def test_resume_with_another_process_is_refused(
    tmp_path: pathlib.Path,
    averaging: LearningProcess,
    linear_model: Model,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(2)]
    run(averaging, clients, num_rounds=1, storage_path=tmp_path)
    adam = keras.optimizers.Adam(0.1)
    other = build_fed_avg(linear_model, keras.optimizers.SGD(0.05), adam)

    with pytest.raises(errors.ConfigError, match="type of the process's state"):
        run(other, clients, num_rounds=2, storage_path=tmp_path)


@pytest.mark.slow
def test_resume_with_another_learning_rate_is_refused(
    tmp_path: pathlib.Path,
    averaging: LearningProcess,
    linear_model: Model,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(2)]
    other, again = (
        build_fed_avg(linear_model, keras.optimizers.SGD(r)) for r in (0.1, 0.05)
    )
    run(averaging, clients, num_rounds=1, storage_path=tmp_path)
    run(again, clients, num_rounds=2, storage_path=tmp_path)

    with pytest.raises(errors.ConfigError, match="`next` computes, by a hash") as told:
        run(other, clients, num_rounds=3, storage_path=tmp_path)
    assert "Another version of ray_fed, TensorFlow or Keras" in str(told.value)
    (recipe,) = re.findall(r"`(FileProgramStateManager\(.*?\}\))`", str(told.value))
    saved, _ = asyncio.run(eval(recipe, {**globals(), "process": other}))
    place = tmp_path / "anew"
    anew = run(other, clients, num_rounds=3, state=saved["state"], storage_path=place)
    assert [record.round_index for record in anew.history] == [2]


def test_run_of_a_newer_version_is_told(tmp_path: pathlib.Path) -> None:
    manager = FileProgramStateManager(tmp_path, "run_", 1)
    asyncio.run(manager.save('{"format": 9}', 3))

    with pytest.raises(errors.SavedStateError, match="found format 9"):
        run(build_tally(), CLIENTS, num_rounds=1, storage_path=tmp_path)


def test_run_of_another_version_is_told_and_its_model_taken_over(
    tmp_path: pathlib.Path,
) -> None:
    process, place = build_tally(), str(tmp_path / "former")
    reached = Tally(3, 7.5)
    note = FileProgramStateManager(place, "run_", 1)
    rounds = FileProgramStateManager(place, "round_")
    asyncio.run(note.save('{"format": 1, "identity": {}, "first_number": 1}', 0))
    asyncio.run(rounds.save({"state": reached}, 3))
    before = {path: path.read_bytes() for path in pathlib.Path(place).iterdir()}

    with pytest.raises(errors.StateFormatError, match="found format 1") as told:
        run(process, CLIENTS, num_rounds=5, storage_path=place)
    # What the error says to do.
    (recipe,) = re.findall(r"`(FileProgramStateManager\(.*?\}\))`", str(told.value))
    saved, version = asyncio.run(eval(recipe))
    again = run(
        process,
        CLIENTS,
        num_rounds=5,
        state=saved["state"],
        storage_path=tmp_path / "anew",
    )

    assert (saved["state"], version) == (reached, 3)
    assert again.state.round_index == 5
    assert {p: p.read_bytes() for p in pathlib.Path(place).iterdir()} == before


def test_state_that_is_given_gives_way_to_a_saved_one(tmp_path: pathlib.Path) -> None:
    first = run(build_tally(), CLIENTS, num_rounds=2, storage_path=tmp_path)

    again = run(
        build_tally(),
        CLIENTS,
        num_rounds=2,
        storage_path=tmp_path,
        state=build_tally().initialize(),
    )

    assert again.state == first.state
    assert again.history == first.history


def test_state_that_what_is_saved_goes_before_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"num_rounds": 2, "storage_path": tmp_path}
    first = run(build_tally(), CLIENTS, **options)
    other = run(build_tally(), [["z"]] * 6, num_rounds=2).state

    for state in (build_tally().initialize(), first.state):
        run(build_tally(), CLIENTS, **options, state=state)
    assert not caplog.messages
    again = run(build_tally(), CLIENTS, **options, state=other)

    assert again.state == first.state != other
    (told,) = caplog.messages
    assert "saved state after round 2. The arguments" in told


def test_run_with_more_rounds_behind_it_is_returned_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(build_tally(), CLIENTS, num_rounds=3, storage_path=tmp_path)
    caplog.clear()

    again = run(build_tally(), CLIENTS, num_rounds=1, storage_path=tmp_path)

    assert again.history == whole.history
    (told,) = caplog.messages
    assert "3 rounds behind it, more than `num_rounds`, which is 1" in told


def test_metric_that_training_lacks_is_told_before_the_first_round() -> None:
    with pytest.raises(errors.ConfigError, match=r"\['norm'\].*found `los`"):
        run(build_noisy(), NUMBERS, num_rounds=1, stop=EarlyStopping("los"))


def test_metric_that_evaluation_lacks_ends_the_run_saved(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(errors.ConfigError, match=r"found `evaluation\.los`"):
        run_noisy(tmp_path, 6, stop=EarlyStopping("evaluation.los"))

    assert len(run_noisy(tmp_path, 2).history) == 2


def test_context_counts_rounds_as_in_a_loop_of_plain_calls(
    thread_context: ExecutionContext,
) -> None:
    process = build_noisy()
    result = run_noisy(None, 3)
    counted = thread_context.num_calls
    thread_context.resume_at(0)
    state = process.initialize()
    for record in result.history:
        data = [NUMBERS[client] for client in record.clients]
        state, metrics = process.next(state, data)
        assert dict(metrics) == dict(record.training)

    assert counted == thread_context.num_calls == 4
    assert state["model"].tobytes() == result.state["model"].tobytes()


def test_evaluation_takes_the_state_in_computations_and_in_numpy(
    averaging: LearningProcess,
    linear_model: Model,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(2)]
    evaluation = build_fed_eval(linear_model, averaging)

    def evaluate(state: Any) -> dict[str, Any]:
        found = evaluation.next(state, clients)
        model = linear_model.to_keras(state)
        return {**found, "bias": np.asarray(model.trainable_variables[1])}

    result = run(averaging, clients, num_rounds=2, evaluate=evaluate)

    last = result.history[-1].evaluation
    assert last is not None
    np.testing.assert_array_equal(last["bias"], result.state.weights.trainable[1])
    assert last["num_examples"] == 10


def test_counter_cannot_be_saved_as_its_structure_changes(
    tmp_path: pathlib.Path,
) -> None:
    run(build_counter(), CLIENTS, num_rounds=1, storage_path=tmp_path)

    with pytest.raises(errors.ValueMismatchError, match="Expected a structure"):
        run(build_counter(), CLIENTS, num_rounds=2, storage_path=tmp_path)
