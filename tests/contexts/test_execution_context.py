"""Calls on the contexts that `create_context` builds, local and on real Ray."""

import collections
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray
from numpy.typing import NDArray

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.tensorflow.tensors import devices
from tests.fixtures import ContextFactory, Seen, report_of
from tests.result_bits import bits

import tensorflow as tf  # isort: skip


VECTOR = fl.TensorType(np.float32, [50])
NUM_CLIENTS = 23


@rtf.computation(VECTOR, VECTOR)
def client_work(data: Any, model: Any) -> Any:
    return tf.math.tanh(data * model) + tf.reduce_sum(data), tf.reduce_max(data)


@rtf.computation(VECTOR, np.float32)
def weight_of(update: Any, largest: Any) -> Any:
    del update
    return tf.abs(largest) + 1.0


@rtf.computation(np.float32)
def is_slow_for_zero(x: Any) -> Any:
    count = tf.where(tf.equal(x, 0.0), 200_000, 1)
    total = x
    for _ in tf.range(count):
        total = total + 1.0
    return total - tf.cast(count, tf.float32)


@fl.federated_computation(
    fl.FederatedType(VECTOR, fl.CLIENTS), fl.FederatedType(VECTOR, fl.SERVER)
)
def one_round(data: Any, model: Any) -> Any:
    placed = fl.federated_broadcast(model)
    updates = fl.federated_map(client_work, (data, placed))
    weights = fl.federated_map(weight_of, updates)
    return collections.OrderedDict(
        model=fl.federated_mean(updates[0], weights),
        total=fl.federated_sum(updates[0]),
        largest=fl.federated_max(updates[1]),
    )


def client_data(num_clients: int = NUM_CLIENTS) -> list[NDArray[np.float32]]:
    generator = np.random.default_rng(7)
    return list(generator.normal(size=(num_clients, 50)).astype(np.float32))


MODEL = np.linspace(-1, 1, 50, dtype=np.float32)


@pytest.fixture(scope="session")
def expected_bits() -> list[bytes]:
    config = ray_fed.Config(backend="local", workers=1, subrounds=1)
    with ray_fed.create_context(config) as context:
        return bits(context.invoke(one_round, [client_data(), MODEL]))


@pytest.mark.parametrize(("workers", "subrounds"), [(1, 4), (2, 1), (3, 7), (20, 40)])
def test_bits_do_not_depend_on_the_cut_locally(
    local_contexts: ContextFactory,
    expected_bits: list[bytes],
    workers: int,
    subrounds: int,
) -> None:
    context = local_contexts(workers=workers, subrounds=subrounds)

    result = context.invoke(one_round, [client_data(), MODEL])

    assert bits(result) == expected_bits


@pytest.mark.claim("semantics.60")
@pytest.mark.ray
@pytest.mark.parametrize("subrounds", [1, 7])
def test_bits_on_ray_equal_local_ones(
    ray_contexts: ContextFactory,
    expected_bits: list[bytes],
    subrounds: int,
) -> None:
    context = ray_contexts(workers=2, subrounds=subrounds)

    result = context.invoke(one_round, [client_data(), MODEL])

    assert bits(result) == expected_bits


def test_leaf_size_decides_the_bits(
    local_contexts: ContextFactory, expected_bits: list[bytes]
) -> None:
    context = local_contexts(workers=1, clients_per_leaf=NUM_CLIENTS)

    result = context.invoke(one_round, [client_data(), MODEL])

    assert bits(result) != expected_bits


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def context(request: pytest.FixtureRequest) -> ExecutionContext:
    factory: ContextFactory = request.getfixturevalue(f"{request.param}_contexts")
    return factory(workers=2, subrounds=4)


AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@fl.federated_computation(AT_CLIENTS)
def sum_of_clients(values: Any) -> Any:
    return fl.federated_sum(values)


@fl.federated_computation(AT_CLIENTS, fl.FederatedType(np.float32, fl.SERVER))
def slow_values_and_sum(values: Any, total: Any) -> Any:
    return fl.federated_map(is_slow_for_zero, values), total


@pytest.mark.claim("semantics.81")
def test_hand_written_form_keeps_client_order(context: ExecutionContext) -> None:
    parts: tuple[Any, Any, Any] = (sum_of_clients, add, slow_values_and_sum)
    form = MergeableCompForm(*parts)

    values, total = context.invoke(form, [float(index) for index in range(10)])

    assert values == [float(index) for index in range(10)]
    assert total == 45.0


@pytest.mark.claim("semantics.54")
def test_mean_over_no_clients_is_a_clear_error(context: ExecutionContext) -> None:
    @fl.federated_computation(AT_CLIENTS)
    def mean(values: Any) -> Any:
        return fl.federated_mean(values)

    with pytest.raises(errors.CardinalityError, match="at least one client"):
        context.invoke(mean, [])


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        pytest.param(
            [client_data(2), MODEL.astype(np.float64)],
            errors.ValueMismatchError,
            r"Expected the argument.model to be of type `float32\[50\]`, found an array"
            " of dtype float64",
            id="dtype",
        ),
        pytest.param(
            [client_data(2), MODEL[:49]],
            errors.ValueMismatchError,
            r"found an array of shape \(49,\)",
            id="shape",
        ),
        pytest.param(
            [3, MODEL],
            errors.ValueMismatchError,
            "to be a list with a value for each client",
            id="no list",
        ),
        pytest.param(
            [{"a": client_data(2)[0]}, MODEL],
            errors.ValueMismatchError,
            r"`dict`: pass `list\(clients\.values\(\)\)`",
            id="dictionary",
        ),
        pytest.param(
            [np.zeros((2, 50)), MODEL],
            errors.ValueMismatchError,
            r": pass a list, such as `list\(clients\)`",
            id="array",
        ),
        pytest.param(
            [client_data(2)],
            errors.ValueMismatchError,
            "to have 2 elements",
            id="missing element",
        ),
    ],
)
def test_bad_argument_is_refused_and_leaves_the_context_usable(
    local_contexts: ContextFactory,
    argument: Any,
    error: type[Exception],
    message: str,
) -> None:
    context = local_contexts(workers=2, subrounds=4)

    with pytest.raises(error, match=message):
        context.invoke(one_round, argument)

    assert context.invoke(add, [1.0, 1.0]) == 2.0


@pytest.mark.claim("semantics.64")
def test_client_arguments_of_different_lengths_are_refused(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(workers=2, subrounds=4)

    @fl.federated_computation(AT_CLIENTS, AT_CLIENTS)
    def sums(left: Any, right: Any) -> Any:
        return fl.federated_sum(left), fl.federated_sum(right)

    with pytest.raises(errors.CardinalityError) as caught:
        context.invoke(sums, [[1.0, 2.0], [1.0, 2.0, 3.0]])

    assert str(caught.value) == (
        "Expected the same number of values in every argument placed at clients, found"
        " 2 for `{float32}@CLIENTS`, 3 for `{float32}@CLIENTS`: pass one value for each"
        " client."
    )


@rtf.computation(np.float32)
def fail_at_five(x: Any) -> Any:
    tf.debugging.assert_none_equal(x, 5.0, message="no fives")
    return x * 1.0


def test_error_of_a_client_names_it_and_is_not_retried(
    context: ExecutionContext,
) -> None:
    @fl.federated_computation(AT_CLIENTS)
    def checked_sum(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(fail_at_five, values))

    with pytest.raises(
        errors.ComputationError, match=r"no fives.*client at position 5"
    ) as caught:
        context.invoke(checked_sum, [float(index) for index in range(8)])

    assert caught.value.location.client_index == 5
    assert context.invoke(checked_sum, [1.0, 2.0]) == 3.0


def test_report_counts_the_seconds_that_an_argument_takes_to_read(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(workers=2)

    class SlowData:
        def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
            time.sleep(0.3)
            return np.ones(50, dtype or np.float32)

    started = time.monotonic()
    context.invoke(one_round, [[SlowData(), SlowData()], MODEL])
    seconds = time.monotonic() - started

    report = report_of(context)
    assert 0.6 <= report.seconds <= seconds
    assert report.clients_per_second <= 2 / 0.6


@pytest.mark.slow
@pytest.mark.ray
def test_worker_that_dies_between_rounds_costs_no_bit(
    ray_contexts: ContextFactory,
) -> None:
    context = ray_contexts(workers=2, subrounds=2)
    found = [bits(context.invoke(one_round, [client_data(), MODEL]))]
    killed: list[int] = []

    for _ in range(2):
        report = report_of(context)
        killed.append(report.subrounds[0].worker_pid)
        os.kill(killed[-1], signal.SIGKILL)  # while it may be kept for the next
        found.append(bits(context.invoke(one_round, [client_data(), MODEL])))

    assert found[1] == found[0] == found[2]
    last = report_of(context)
    assert not {subround.worker_pid for subround in last.subrounds} & {*killed}
    assert last.num_retries <= 2
    assert last.retries.keys() <= {"crash"}  # none where the pool saw the death first


def test_report_has_the_one_fingerprint_of_its_workers(
    context: ExecutionContext,
) -> None:
    context.invoke(sum_of_clients, [1.0] * 4)

    report = report_of(context)
    assert report.fingerprints == (devices.read_fingerprint(devices.cpu()),)


def test_report_counts_clients_and_subrounds(context: ExecutionContext) -> None:
    context.invoke(sum_of_clients, [1.0] * 32)

    report = report_of(context)

    assert (report.num_clients, report.num_leaves, len(report.subrounds)) == (32, 16, 5)
    assert [s.num_clients for s in report.subrounds] == [8, 8, 8, 8, 0]
    assert (report.num_retries, report.retries) == (0, {})
    assert report.seconds > 0


def test_sinks_see_events_of_a_round_in_order(context: ExecutionContext) -> None:
    seen = Seen()
    context.subscribe(seen)
    context.invoke(sum_of_clients, [1.0, 2.0])
    context.unsubscribe(seen)
    context.invoke(sum_of_clients, [1.0, 2.0])

    names = [type(event).__name__ for event in seen]
    assert [name for name in names if name != "Waiting"] == [  # of a slow call alone
        "RoundStarted",
        *["SubroundFinished"] * 3,
        "JitDecided",
        "RoundFinished",
    ]


@pytest.mark.ray
def test_client_work_runs_in_actors_and_subrounds_are_tasks(
    ray_contexts: ContextFactory,
) -> None:
    context = ray_contexts(workers=2, subrounds=4)

    context.invoke(one_round, [client_data(), MODEL])

    report = report_of(context)
    worker_pids = {subround.worker_pid for subround in report.subrounds}
    *subrounds, finish = report.subrounds
    assert finish.coordinator_pid == os.getpid()
    coordinator_pids = {subround.coordinator_pid for subround in subrounds}
    assert os.getpid() not in worker_pids | coordinator_pids
    assert not worker_pids & coordinator_pids


@pytest.mark.ray
def test_coordinating_processes_never_load_tensorflow(
    ray_contexts: ContextFactory,
) -> None:
    context = ray_contexts(workers=2, subrounds=4)
    context.invoke(one_round, [client_data(), MODEL])
    report = report_of(context)

    def has_tensorflow(pid: int) -> bool:
        return "tensorflow" in pathlib.Path(f"/proc/{pid}/maps").read_text()

    *subrounds, _ = report.subrounds  # the finish is driven from this process
    assert all(has_tensorflow(s.worker_pid) for s in subrounds)
    assert not any(has_tensorflow(s.coordinator_pid) for s in subrounds)


@pytest.mark.ray
def test_interrupted_call_leaves_the_pool_usable(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2, subrounds=4)
    context.invoke(sum_of_clients, [1.0])
    main = threading.main_thread().ident
    assert main is not None

    @fl.federated_computation(AT_CLIENTS)
    def slow(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(is_slow_for_zero, values))

    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        context.invoke(slow, [0.0] * 400)

    assert time.monotonic() - started < 10.0
    assert context.invoke(sum_of_clients, [1.0, 2.0]) == 3.0


def wait_until(is_reached: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)  # no entry where none is free


@pytest.mark.slow
@pytest.mark.ray
def test_closed_context_leaves_ray_and_no_actor(ray_contexts: ContextFactory) -> None:
    ray_contexts(workers=2, subrounds=4).invoke(sum_of_clients, [1.0])
    before = free_cpus()
    context = ray_fed.create_context(ray_fed.Config(workers=1))
    context.invoke(sum_of_clients, [1.0])

    context.close()

    assert ray.is_initialized()
    wait_until(lambda: free_cpus() == before)
