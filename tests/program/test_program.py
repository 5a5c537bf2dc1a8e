"""One federated program, run every way: its bits, its releases, what it moves.

As a script it is the program alone, for a test that kills it:
python test_program.py FOLDER
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.program import FileProgramStateManager, RayFederatedContext

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from ray._private import worker
from typing_extensions import override

SIZE = 100_000
NUM_ROUNDS, SAVE_EVERY = 20, 5
STATE_BYTES = 4 * SIZE
MODEL = fl.TensorType(np.float32, [SIZE])


class State(NamedTuple):
    model: Any
    round_index: Any


@rtf.computation
def initial_state() -> State:
    return State(tf.zeros([SIZE]), tf.constant(0))


STATE = initial_state.type_signature.result


@rtf.computation(STATE, np.float32)
def train(state: State, x: Any) -> Any:
    noise = tf.random.normal([SIZE])  # keyed by the call's number: a run must resume it
    return tf.math.tanh(state.model * x) + 0.01 * noise


@rtf.computation(STATE, MODEL)
def update(state: State, mean: Any) -> State:
    return State(state.model + mean, state.round_index + 1)


@rtf.computation(STATE)
def measure(state: State) -> Any:
    return {"norm": tf.norm(state.model), "round": state.round_index}


@fl.federated_computation
def initialize() -> Any:
    return fl.federated_eval(initial_state, fl.SERVER)


@fl.federated_computation(
    fl.FederatedType(STATE, fl.SERVER), fl.FederatedType(np.float32, fl.CLIENTS)
)
def run_round(state: Any, data: Any) -> Any:
    deltas = fl.federated_map(train, (fl.federated_broadcast(state), data))
    new_state = fl.federated_map(update, (state, fl.federated_mean(deltas)))
    return new_state, fl.federated_map(measure, new_state)


def cohort(round_index: int) -> list[float]:
    return [float(round_index + client) / 7 for client in range(5)]


class Seen(fl.program.ReleaseManager[Any, int]):
    """Keeps each key as often as it is released."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    @override
    async def release(self, value: Any, key: int) -> None:
        self.keys.append(key)


async def run_program(
    context: RayFederatedContext,
    folder: pathlib.Path,
    releases: Any,
    on_round: Callable[[int], None],
    num_rounds: int = NUM_ROUNDS,
) -> Any:
    """Run from the last saved round on; return the last state, as references."""
    manager = FileProgramStateManager(folder, keep_total=2)
    state = context.invoke(initialize)
    saved, version = await manager.load_latest((state, 0))
    if saved is not None:
        state, num_invocations = saved
        context.resume_at(num_invocations)
    for round_index in range(version, num_rounds):
        state, metrics = run_round(state, cohort(round_index))
        await releases.release(metrics, round_index)
        if (round_index + 1) % SAVE_EVERY == 0:
            await manager.save((state, context.num_invocations), round_index + 1)
        on_round(round_index)
    return state


def run_plainly(
    context: ray_fed.ExecutionContext, num_rounds: int = NUM_ROUNDS
) -> tuple[Any, list[Any]]:
    """Run the same rounds by plain synchronous calls."""
    state = context.invoke(initialize)
    metrics: list[Any] = []
    for round_index in range(num_rounds):
        state, measured = context.invoke(run_round, (state, cohort(round_index)))
        metrics.append(measured)
    return state, metrics


@contextlib.contextmanager
def read_sizes() -> Generator[list[int]]:
    """Note the size of every object that this process reads out of Ray."""
    sizes: list[int] = []
    original = worker.Worker.deserialize_objects

    def count(self: Any, objects: Any, *args: Any) -> Any:
        objects = list(objects)
        sizes.extend(len(data) for data, *_ in objects if data is not None)
        return original(self, objects, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Worker, "deserialize_objects", count)
        yield sizes


@pytest.mark.ray
@pytest.mark.slow
def test_state_stays_in_the_store_through_ten_invocations(
    ray_contexts: Any, local_contexts: Any, tmp_path: pathlib.Path, ray_memory: Any
) -> None:
    seen = Seen()
    memory: Any = fl.program.MemoryReleaseManager()
    by_round: list[list[int]] = []
    references: list[int] = []
    # Workers of other tests may hold what an interrupted client was loaded by.
    own_pool = ray_fed.Workers(count=2, client_bytes=2**29)
    with RayFederatedContext(ray_contexts(workers=own_pool, seed=3)) as context:
        fl.framework.set_default_context(context)
        before = ray_memory.stored_bytes()  # what pools of other tests hold stays
        with read_sizes() as sizes:

            def on_round(_: int) -> None:
                by_round.append(sizes.copy())
                sizes.clear()
                first = references[0] if references else sys.maxsize
                count = ray_memory.num_references
                references.append(ray_memory.settle(count, first))

            releases = fl.program.GroupingReleaseManager([memory, seen])
            program = run_program(context, tmp_path, releases, on_round, num_rounds=10)
            state = asyncio.run(program)
            final: Any = asyncio.run(fl.program.materialize_value(state))
        found = final.model.tobytes()
        del state, final  # what was read is not copied out of the store
        left = ray_memory.settle(ray_memory.stored_bytes, before)
    expected, metrics = run_plainly(local_contexts(workers=2, seed=3), 10)

    assert found == expected.model.tobytes()
    assert seen.keys == list(range(10))
    assert list(memory.values().values()) == metrics
    state_reads = [sum(size >= STATE_BYTES for size in read) for read in by_round]
    assert state_reads == [0, 0, 0, 0, 1] * 2
    assert all(
        0 < sum(size for size in read if size < STATE_BYTES) < 20_000
        for read in by_round
    )
    assert max(references) == references[0]
    assert left <= before


@pytest.mark.ray
@pytest.mark.slow
def test_worker_that_dies_costs_no_state(
    ray_contexts: Any, local_contexts: Any, tmp_path: pathlib.Path
) -> None:
    execution_context = ray_contexts(workers=2, seed=3)
    with RayFederatedContext(execution_context) as context:
        fl.framework.set_default_context(context)

        def kill(round_index: int) -> None:
            if round_index == 2:
                (*_, finish) = execution_context.last_report.subrounds
                os.kill(finish.worker_pid, signal.SIGKILL)

        releases: Any = fl.program.MemoryReleaseManager()
        program = run_program(context, tmp_path, releases, kill, num_rounds=4)
        final: Any = asyncio.run(fl.program.materialize_value(asyncio.run(program)))

    plain_context = local_contexts(workers=2, seed=3)
    expected, _ = run_plainly(plain_context, num_rounds=4)
    assert final.model.tobytes() == expected.model.tobytes()


def test_program_gives_the_bits_of_plain_calls(
    local_contexts: Any, tmp_path: pathlib.Path
) -> None:
    seen = Seen()
    memory: Any = fl.program.MemoryReleaseManager()
    releases = fl.program.GroupingReleaseManager([memory, seen])
    with RayFederatedContext(local_contexts(workers=2, seed=3)) as context:
        fl.framework.set_default_context(context)

        program = run_program(context, tmp_path, releases, lambda _: None)
        final: Any = asyncio.run(fl.program.materialize_value(asyncio.run(program)))

    expected, metrics = run_plainly(local_contexts(workers=1, seed=3))
    assert final.model.tobytes() == expected.model.tobytes()
    assert final.round_index == NUM_ROUNDS
    assert seen.keys == list(range(NUM_ROUNDS))
    assert list(memory.values().values()) == metrics


def start_script(folder: pathlib.Path) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_program_ends_with_the_bits_of_one_that_lived(
    local_contexts: Any, tmp_path: pathlib.Path
) -> None:
    with start_script(tmp_path) as script:
        assert script.stdout is not None
        for line in script.stdout:
            if line == "round 12\n":
                os.kill(script.pid, signal.SIGKILL)
                break
    assert script.returncode == -signal.SIGKILL
    versions = asyncio.run(FileProgramStateManager(tmp_path).get_versions())

    with start_script(tmp_path) as script:
        assert script.stdout is not None
        lines = script.stdout.read().splitlines()

    assert script.returncode == 0
    assert versions is not None
    assert versions[-1] in (10, 15)  # the kill takes its time
    assert lines[0] == f"round {versions[-1]}"
    assert lines[-1] == f"round {NUM_ROUNDS - 1}"
    expected, _ = run_plainly(local_contexts(workers=2))
    found: NDArray[np.float32] = np.load(tmp_path / "result.npy")
    assert found.tobytes() == expected.model.tobytes()


def main(folder: str) -> None:
    """Run the program, with a line after each round, and leave its last model."""

    def show(round_index: int) -> None:
        sys.stdout.write(f"round {round_index}\n")
        sys.stdout.flush()

    config = ray_fed.Config(backend="local", workers=1)
    path = pathlib.Path(folder)
    with (
        ray_fed.create_context(config) as execution_context,
        RayFederatedContext(execution_context) as context,
    ):
        fl.framework.set_default_context(context)
        releases: Any = fl.program.MemoryReleaseManager()
        state = asyncio.run(run_program(context, path, releases, show))
        np.save(path / "result.npy", asyncio.run(state.model.get_value()))


if __name__ == "__main__":
    main(*sys.argv[1:])
