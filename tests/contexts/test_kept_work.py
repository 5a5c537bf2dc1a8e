"""What a stage has done for a client is not done again by a later one."""

import os
import pathlib
import signal
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.observability import events
from tests.fixtures import EACH_BACKEND, ContextFactory, report_of
from tests.result_bits import bits
from tests.waiting_work import count_marks, mark

VECTOR = fl.TensorType(np.float32, [3])
VECTORS = fl.FederatedType(VECTOR, fl.CLIENTS)
NUM_CLIENTS = 9
CLIENTS = [np.array([i, 1, 0], np.float32) for i in range(NUM_CLIENTS)]
MEMBER_BYTES = 12
"""Of what is kept of a client: a vector."""


@rtf.computation(VECTOR)
def length(vector: Any) -> Any:
    return tf.norm(vector)


@rtf.computation(VECTOR, np.float32)
def clip(vector: Any, bound: Any) -> Any:
    return tf.clip_by_norm(vector, bound)


def noted_work(folder: pathlib.Path) -> Any:
    """Work that leaves a file in a folder for each time that a client does it."""

    @rtf.computation(VECTOR)
    def work(vector: Any) -> Any:
        client = tf.strings.as_string(tf.cast(vector[0], tf.int32))
        return mark(vector, folder, client) + tf.random.normal([3])

    return work


def clipped_mean(folder: pathlib.Path) -> Any:
    """Two stages of the same work."""
    work = noted_work(folder)

    @fl.federated_computation(VECTORS)
    def run(vectors: Any) -> Any:
        worked = fl.federated_map(work, vectors)
        bound = fl.federated_mean(fl.federated_map(length, worked))
        pairs = (worked, fl.federated_broadcast(bound))
        return fl.federated_mean(fl.federated_map(clip, pairs)), bound

    return run


def own_results(folder: pathlib.Path) -> Any:
    """Work whose outcome clients have in the result, beside what the server has."""
    work = noted_work(folder)

    @fl.federated_computation(VECTORS, fl.FederatedType(np.float32, fl.SERVER))
    def run(vectors: Any, bound: Any) -> Any:
        worked = fl.federated_map(work, vectors)
        own = fl.federated_map(clip, (worked, fl.federated_broadcast(bound)))
        lengths = fl.federated_map(length, worked)
        return (own, fl.federated_mean(own)), fl.federated_sum(lengths), lengths

    return run


def work_alone(folder: pathlib.Path) -> Any:
    """Work of which nothing is aggregated."""
    work = noted_work(folder)

    @fl.federated_computation(VECTORS)
    def run(vectors: Any) -> Any:
        return fl.federated_map(work, vectors)

    return run


SETTINGS = {"workers": 2, "subrounds": 3, "clients_per_leaf": 1}
"""Of what `build` builds."""


@pytest.mark.parametrize(
    ("build", "enabled"),
    [
        ("local", True),
        ("local", False),
        pytest.param("ray", True, marks=pytest.mark.ray),
    ],
    indirect=["build"],
)
def test_each_client_does_its_work_once(
    build: ContextFactory, tmp_path: pathlib.Path, enabled: bool
) -> None:
    context = build(kernels={"enabled": enabled})

    context.invoke(clipped_mean(tmp_path), CLIENTS)

    report = report_of(context)
    assert report.kernel_leaves == 2 * NUM_CLIENTS * enabled
    assert count_marks(tmp_path, NUM_CLIENTS) == [1] * NUM_CLIENTS


def test_bits_are_those_of_work_that_is_done_again(
    build: ContextFactory, tmp_path: pathlib.Path
) -> None:
    comp = clipped_mean(tmp_path)
    found: list[list[bytes]] = []

    for kept_bytes in (2**20, 0):
        for enabled in (True, False):
            context = build(kernels={"enabled": enabled}, kept_bytes=kept_bytes)
            context.resume_at(0)
            found.append(bits(context.invoke(comp, CLIENTS)))

    assert all(result == found[0] for result in found)
    assert count_marks(tmp_path, NUM_CLIENTS) == [1 + 1 + 2 + 2] * NUM_CLIENTS


def test_clients_past_the_limit_do_their_work_again(
    build: ContextFactory, tmp_path: pathlib.Path
) -> None:
    comp = clipped_mean(tmp_path)

    build(kept_bytes=7 * MEMBER_BYTES).invoke(comp, CLIENTS)

    assert count_marks(tmp_path, NUM_CLIENTS) == [1] * 6 + [2] * 3  # subrounds of three


@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "interpreted"])
def test_results_of_clients_come_from_the_stage_that_did_the_work(
    build: ContextFactory, tmp_path: pathlib.Path, enabled: bool
) -> None:
    context = build(kernels={"enabled": enabled})

    (own, mean), total, lengths = context.invoke(own_results(tmp_path), [CLIENTS, 2.0])

    report = report_of(context)
    assert report.kernel_leaves == NUM_CLIENTS * enabled
    assert len(report.subrounds) == 3 + 1  # and the finish
    assert count_marks(tmp_path, NUM_CLIENTS) == [1] * NUM_CLIENTS
    clipped = np.stack(own)
    norms = np.linalg.norm(clipped, axis=1)
    np.testing.assert_allclose(norms, np.minimum(lengths, 2), rtol=1e-5)
    np.testing.assert_allclose(clipped.mean(0), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.sum(lengths), total, rtol=1e-5)
    assert len({vector.tobytes() for vector in own}) == NUM_CLIENTS  # each drew its own


@pytest.mark.slow
@EACH_BACKEND
def test_results_of_clients_are_those_of_work_that_is_done_again(
    build: ContextFactory, tmp_path: pathlib.Path
) -> None:
    comp = own_results(tmp_path)
    found: list[list[bytes]] = []

    for kept_bytes in (2**20, 7 * (MEMBER_BYTES + 4), 0):
        context = build(kept_bytes=kept_bytes)
        context.resume_at(0)
        found.append(bits(context.invoke(comp, [CLIENTS, 2.0])))

    assert found[1:] == [found[0]] * 2
    assert count_marks(tmp_path, NUM_CLIENTS) == [1 + 1 + 2] * 6 + [1 + 2 + 2] * 3


@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "interpreted"])
def test_work_of_which_nothing_is_aggregated_is_folded_too(
    build: ContextFactory, tmp_path: pathlib.Path, enabled: bool
) -> None:
    context = build(kernels={"enabled": enabled})

    own = context.invoke(work_alone(tmp_path), CLIENTS)

    report = report_of(context)
    assert report.kernel_leaves == NUM_CLIENTS * enabled
    assert len(report.subrounds) == 3
    assert count_marks(tmp_path, NUM_CLIENTS) == [1] * NUM_CLIENTS
    noise = np.stack(own) - np.stack(CLIENTS)
    assert len(np.unique(noise)) == noise.size  # each drew its own


@pytest.mark.parametrize("kept_bytes", [2**20, 0])
def test_work_alone_has_the_bits_of_the_interpreter(
    build: ContextFactory, tmp_path: pathlib.Path, kept_bytes: int
) -> None:
    comp = work_alone(tmp_path)
    found: list[list[bytes]] = []

    for enabled in (True, False):
        context = build(kernels={"enabled": enabled}, kept_bytes=kept_bytes)
        context.resume_at(0)
        found.append(bits(context.invoke(comp, CLIENTS)))

    assert found[0] == found[1]
    assert count_marks(tmp_path, NUM_CLIENTS) == [2] * NUM_CLIENTS


class Killer:
    """Ends the processes of all workers once the first stage is merged."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.SubroundFinished(num_clients=0, subround_index=3):
                for pid in self.pids:
                    os.kill(pid, signal.SIGKILL)
            case events.SubroundFinished(subround_index=0 | 1 | 2):
                self.pids.add(event.worker_pid)
            case _:
                pass


@pytest.mark.ray
@pytest.mark.slow
def test_work_outlives_the_workers_that_did_it(
    ray_contexts: ContextFactory, local_contexts: ContextFactory, tmp_path: pathlib.Path
) -> None:
    comp = clipped_mean(tmp_path)
    expected = bits(local_contexts().invoke(comp, CLIENTS))
    done_before = count_marks(tmp_path, NUM_CLIENTS)
    context = ray_contexts(workers=2, subrounds=3, clients_per_leaf=1)
    context.resume_at(0)
    killer = Killer()
    context.subscribe(killer)

    found = bits(context.invoke(comp, CLIENTS))

    report = report_of(context)
    assert killer.pids
    assert report.num_retries > 0
    assert found == expected
    assert [1 + n for n in done_before] == count_marks(tmp_path, NUM_CLIENTS)


@pytest.mark.ray
def test_nothing_stays_in_the_store(
    ray_contexts: ContextFactory, ray_memory: Any, tmp_path: pathlib.Path
) -> None:
    context = ray_contexts(workers=2, subrounds=3, clients_per_leaf=1)

    context.invoke(clipped_mean(tmp_path), CLIENTS)
    context.invoke(own_results(tmp_path), [CLIENTS, 2.0])

    assert ray_memory.left() == (0, 0)
