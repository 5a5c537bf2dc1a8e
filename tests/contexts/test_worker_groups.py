"""Calls on groups of workers; here each group is a thread with a name of its own."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ray._private import state as ray_state

import ray_fed
import ray_fed.worker.stacks as stacks
from ray_fed import learning
from ray_fed import tensorflow as rtf
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import Backend, ExecutionContext
from ray_fed.contexts.runners import LocalRunner
from ray_fed.observability import events
from ray_fed.tensorflow.tensors import devices
from ray_fed.values import read_limits
from tests.fixtures import Seen, report_of


@rtf.computation(np.float32)
def add_noise(x: Any) -> Any:
    return x + tf.random.normal([])


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def noisy_total(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(add_noise, values))


@pytest.fixture
def context() -> Iterator[ExecutionContext]:
    """A context with the workers "main", and the groups "first" and "second"."""
    with contextlib.ExitStack() as opened:

        def build(name: str, **options: Any) -> Backend:
            (stack,) = stacks.threaded_stacks(1)
            about = devices.read_fingerprint(devices.split_cpu(1)[0])
            runner = LocalRunner(stack, name, about, read_limits.Limits())
            opened.callback(runner.close)
            return Backend([runner], 1, lambda: None, **options)

        groups = {name: build(name) for name in ("first", "second")}
        config = ray_fed.Config(backend="local")
        yield opened.enter_context(
            ExecutionContext(config, build("main", groups=groups))
        )


def run(context: ExecutionContext) -> tuple[str, np.float32]:
    """Run a call with the random numbers of the first; return its worker and result."""
    result = context.invoke_at(0, noisy_total, [1.0, 2.0, 3.0])
    (worker,) = {subround.worker for subround in report_of(context).subrounds}
    return worker, result


def test_call_runs_on_one_group_with_the_same_bits(context: ExecutionContext) -> None:
    found = [run(context)]
    with context.on_workers("first"):
        found.append(run(context))
        with context.on_workers("second"):
            found.append(run(context))
        found.append(run(context))
    found.append(run(context))

    workers, results = zip(*found, strict=True)
    assert workers == ("main", "first", "second", "first", "main")
    assert {result.tobytes() for result in results} == {results[0].tobytes()}


def test_calls_of_all_groups_are_counted_together(context: ExecutionContext) -> None:
    for name in ("first", "second"):
        with context.on_workers(name):
            context.invoke(noisy_total, [1.0])
    context.invoke(noisy_total, [1.0])

    assert context.num_calls == 3


def test_group_is_of_the_thread_that_named_it(context: ExecutionContext) -> None:
    workers: list[str] = []
    with context.on_workers("first"):
        other = threading.Thread(target=lambda: workers.append(run(context)[0]))
        other.start()
        other.join()

    assert workers == ["main"]


def test_text_of_the_context_names_its_groups(context: ExecutionContext) -> None:
    assert "groups first, second" in str(context)


def test_error_ends_the_choice_of_a_group(context: ExecutionContext) -> None:
    with pytest.raises(ZeroDivisionError), context.on_workers("first"):
        raise ZeroDivisionError

    assert run(context)[0] == "main"


def test_unknown_group_is_refused_with_the_known_ones(
    context: ExecutionContext,
) -> None:
    with (
        pytest.raises(ray_fed.errors.ConfigError, match=r"\['first', 'second'\]"),
        context.on_workers("third"),
    ):
        pass


def test_run_trains_on_one_group_and_evaluates_on_another(
    context: ExecutionContext,
) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 5, 2)).astype(np.float32)
    clients = [[{"x": x, "y": x[:, 0]}] for x in rows]
    keras.utils.set_random_seed(0)
    model = learning.Model.from_keras(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        loss=keras.losses.MeanSquaredError(),
    )
    training = learning.build_fed_avg(model, keras.optimizers.SGD(0.1))
    evaluation = learning.build_fed_eval(model, training)

    def evaluate(state: Any) -> Any:
        with context.on_workers("second"):
            return evaluation.next(state, clients)

    seen = Seen()
    context.subscribe(seen)
    fl.framework.set_default_context(context)
    with context.on_workers("first"):
        result = learning.run(training, clients, num_rounds=2, evaluate=evaluate)
    context.unsubscribe(seen)

    ran = [e for e in seen if isinstance(e, events.SubroundFinished) and e.num_clients]
    assert sorted(event.worker for event in ran) == ["first"] * 2 + ["second"] * 2
    assert None not in result.history.values("evaluation.loss")


def test_pool_of_its_own_has_no_groups() -> None:
    config = ray_fed.Config(workers=1, worker_groups={"cpu": 1})

    with pytest.raises(ray_fed.errors.ConfigError, match="no `worker_groups`"):
        Session("local", config)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_groups_are_pools_on_one_ray() -> None:
    workers = ray_fed.Workers(count=1, num_cpus=0.5)
    config = ray_fed.Config(
        workers=workers, worker_groups={"other": workers}, name="digits"
    )
    with ray_fed.create_context(config) as opened:
        main = opened.invoke_at(0, noisy_total, [1.0, 2.0])
        (first,) = {s.worker_pid for s in report_of(opened).subrounds}
        with opened.on_workers("other"):
            other = opened.invoke_at(0, noisy_total, [1.0, 2.0])
        (second,) = {s.worker_pid for s in report_of(opened).subrounds}
        actors: Any = cast("Any", ray_state).actors().values()
        names = {a["Pid"]: a["Name"] for a in actors if a["State"] == "ALIVE"}

    assert names[first].startswith("ray_fed worker 0 of digits (")
    assert names[second].startswith("ray_fed worker 0 of digits other (")
    assert main.tobytes() == other.tobytes()
