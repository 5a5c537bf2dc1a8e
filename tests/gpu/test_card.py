"""Workers on a real card: where they compute, who has how much of it, what is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from benchmarks.workloads import WORKLOADS, build_round, make_datasets
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.observability.report import SubroundReport

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(300)]

MATRIX = fl.TensorType(np.float32, [64, 64])
CLIENTS = [np.random.default_rng(k).random((64, 64), np.float32) for k in range(8)]
START_MIB = 1_024
"""What CUDA, cuBLAS and the like take of a card for each process, at most."""


def open_context(num_gpus: float, count: int = 1, **settings: Any) -> ExecutionContext:
    workers = ray_fed.Workers(count=count, num_gpus=num_gpus)
    config = ray_fed.Config(
        workers=workers, seed=3, **{"clients_per_leaf": 2, **settings}
    )
    return ray_fed.create_context(config, address="local")


@rtf.computation(MATRIX)
def powers(x: Any) -> Any:
    noise = tf.random.normal([64, 64])
    return tf.linalg.matmul(x, x) / 64 + noise


@rtf.computation(MATRIX)
def grows(x: Any) -> Any:
    """Fills ten gigabytes of whatever it is run on."""
    size = tf.cast(tf.reduce_sum(x) * 0, tf.int32) + 50_000
    return tf.reduce_max(tf.random.stateless_uniform(tf.stack([size, size]), (1, 2)))


@fl.federated_computation(fl.FederatedType(MATRIX, fl.CLIENTS))
def mean_of_powers(clients: Any) -> Any:
    return fl.federated_mean(fl.federated_map(powers, clients))


@fl.federated_computation(fl.FederatedType(MATRIX, fl.CLIENTS))
def ten_gigabytes(clients: Any) -> Any:
    return fl.federated_mean(fl.federated_map(grows, clients))


def smi(query: str) -> list[list[str]]:
    found = subprocess.run(
        ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split(", ") for line in found.stdout.splitlines()]


def used_mib() -> int:
    return int(smi("gpu=memory.used")[0][0])


def total_mib() -> int:
    return int(smi("gpu=memory.total")[0][0])


def subrounds(context: ExecutionContext) -> tuple[SubroundReport, ...]:
    assert context.last_report is not None
    return context.last_report.subrounds


def devices_of(context: ExecutionContext) -> set[str]:
    found = [subround.fingerprint for subround in subrounds(context)]
    return {one.device for one in found if one is not None}


def run_on_all(context: ExecutionContext, count: int) -> None:
    """Run rounds until so many workers are ready and have worked."""
    workers: set[int] = set()
    deadline = time.monotonic() + 60
    while len(workers) < count:
        assert time.monotonic() < deadline
        run(context)
        workers |= {subround.worker_pid for subround in subrounds(context)}


def run(context: ExecutionContext) -> bytes:
    return np.asarray(context.invoke(mean_of_powers, CLIENTS)).tobytes()


def test_worker_computes_on_the_card_that_it_was_given() -> None:
    before = used_mib()
    with open_context(1) as context:
        on_card = context.invoke(mean_of_powers, CLIENTS)
        named = devices_of(context)
        during = used_mib()
    with open_context(0) as context:
        on_cpu = context.invoke(mean_of_powers, CLIENTS)

    assert named == {smi("gpu=name")[0][0]}
    assert during - before > 300
    np.testing.assert_allclose(on_card, on_cpu, rtol=1e-2, atol=1e-2)


def test_worker_without_a_card_leaves_it_alone() -> None:
    before = used_mib()

    with open_context(0) as context:
        run(context)
        named = devices_of(context)
        during = used_mib()

    assert named == {"CPU"}
    assert during - before < 50


def test_local_workers_are_cpus_beside_a_card() -> None:
    with ray_fed.create_context(
        ray_fed.Config(backend="local", seed=3, clients_per_leaf=2, workers=2)
    ) as context:
        local = run(context)
        named = devices_of(context)
    with open_context(0, 2) as context:
        on_ray = run(context)

    assert named == {"CPU"}
    assert local == on_ray


def test_bits_do_not_depend_on_parts_of_a_card_or_on_a_killed_worker() -> None:
    bits: list[bytes] = []
    for num_gpus, count in ((1, 1), (0.5, 2), (0.25, 4)):
        with open_context(num_gpus, count, subrounds=4) as context:
            bits.append(run(context))
    with open_context(0.5, 2, subrounds=4) as context:
        run(context)
        pid = subrounds(context)[0].worker_pid
        os.kill(pid, signal.SIGKILL)
        after = [run(context), run(context)]
    with open_context(1, 1, subrounds=4) as context:
        undisturbed = [run(context) for _ in range(3)]

    assert len(set(bits)) == 1
    assert undisturbed == [bits[0], *after]


def test_bits_of_xla_do_not_depend_on_parts_of_a_card() -> None:
    workload = WORKLOADS["mlp"]
    training = build_round(workload)
    bits: list[bytes] = []
    for num_gpus, count in ((1, 1), (0.25, 4), (1, 1)):
        settings: Any = {"subrounds": 4, "clients_per_leaf": 16}
        with open_context(num_gpus, count, **settings) as context:
            clients = make_datasets(workload, 64, 64, "placed")
            weights = context.invoke(training, (workload.initial(), clients))
            bits.append(b"".join(np.asarray(tensor).tobytes() for tensor in weights))
            assert context.last_report is not None
            assert {one.jit for one in context.last_report.jit_decisions} == {True}

    assert len(set(bits)) == 1


def test_workers_of_fractions_share_a_card_and_none_takes_more() -> None:
    before, share_mib = used_mib(), 4_000

    with open_context(share_mib / total_mib(), 2, subrounds=2) as context:
        run_on_all(context, 2)
        during = used_mib()

    assert 500 < during - before < 2 * share_mib


def test_work_that_fills_its_part_of_a_card_is_a_clear_error() -> None:
    retry = {"memory": 1}
    with open_context(4_000 / total_mib(), 1, retry=retry) as context:
        with pytest.raises(errors.RetryBudgetError) as raised:
            context.invoke(ten_gigabytes, CLIENTS[:1])
        again = run(context)

    assert raised.value.failure_class == "memory"
    assert "ResourceExhaustedError" in str(raised.value)
    assert again


def test_workers_of_all_parts_of_a_card_have_room_for_its_libraries() -> None:
    with open_context(0.25, 4, subrounds=4) as context:
        run_on_all(context, 4)


def test_card_is_free_again_once_the_context_is_closed() -> None:
    before = used_mib()
    with open_context(0.5, 2) as context:
        run(context)
    deadline = time.monotonic() + 30
    while used_mib() - before > 50 and time.monotonic() < deadline:
        time.sleep(0.2)

    assert used_mib() - before <= 50


DRIVER = """
import subprocess, sys
import numpy as np
import ray_fed
from ray_fed import learning
import keras

def used():
    return int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used",
        "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout)

before = used()
rng = np.random.default_rng(0)
labels = np.arange(20, dtype=np.int32) % 10
clients = [[{"x": rng.random((20, 784), np.float32), "y": labels}] for _ in range(8)]
keras.utils.set_random_seed(0)
made = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
model = learning.Model.from_keras(
    made, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
training = learning.build_fed_avg(model, keras.optimizers.SGD(0.1))
driver = used() - before
workers = ray_fed.Workers(count=2, num_gpus=0.5)
ray_fed.init("local", config=ray_fed.Config(workers=workers, seed=1))
result = learning.run(training, clients, num_rounds=3, progress=False)
print("DRIVER_MIB", driver, "LOSSES", *result.history.values("loss"))
"""


def test_driver_with_keras_leaves_the_card_to_the_workers() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert ran.returncode == 0, ran.stderr
    driver, *losses = (word for word in ran.stdout.split() if word[0].isdigit())
    assert int(driver) < START_MIB
    assert float(losses[-1]) < float(losses[0])


def test_killed_worker_gives_its_part_of_the_card_to_the_next() -> None:
    with open_context(0.5, 2, subrounds=4) as context:
        first = run(context)
        for _ in range(3):
            pid = subrounds(context)[0].worker_pid
            killing = threading.Timer(0.01, os.kill, [pid, signal.SIGKILL])
            killing.start()
            assert len(run(context)) == len(first)
            killing.join()
            run_on_all(context, 2)
