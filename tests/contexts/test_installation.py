"""`init`, `create_context` and `shutdown` on the local backend."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf

LOCAL = ray_fed.Config(backend="local", workers=2)


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean_of_halves(temperatures: Any) -> Any:
    return fl.federated_mean(fl.federated_map(half, temperatures))


TWO_AT_ONCE = """
import threading
import federated_language as fl
import numpy as np
import ray_fed
from ray_fed import tensorflow as rtf
import tensorflow as tf

both_run = threading.Barrier(2)

def meet(x):
    both_run.wait(timeout=30)
    return x

config = ray_fed.Config(backend="local", workers=2)
with ray_fed.create_context(config) as context:

    @rtf.computation(np.float32)
    def work(x):
        return tf.ensure_shape(tf.numpy_function(meet, [x], tf.float32), [])

    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def total(x):
        return fl.federated_sum(fl.federated_map(work, x))

    print(context.invoke(total, [1.0, 2.0]))
"""


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    ray_fed.shutdown()


def test_init_twice_with_the_same_config_is_one_context() -> None:
    first = ray_fed.init(config=LOCAL)

    second = ray_fed.init(config=ray_fed.Config(backend="local", workers=2))

    assert second is first


@pytest.mark.parametrize(
    ("address", "settings", "names"),
    [
        pytest.param(None, {"seed": 7}, ["`seed` is 0 there, 7 here"], id="one"),
        pytest.param(
            None,
            {"workers": {"count": 2, "num_cpus": 2}, "kernels": {"jit": "on"}},
            ["`workers.num_cpus` is 1.0 there, 2.0 here", "`kernels.jit` is 'auto'"],
            id="nested",
        ),
        pytest.param(
            "auto", {}, ["`address` is None there, 'auto' here"], id="address"
        ),
        pytest.param(
            None,
            {"backend": "ray", "runtime_env": {"env_vars": {"A": "secret"}}},
            ["`backend` is 'local' there, 'ray' here", "`runtime_env"],
            id="absent there",
        ),
    ],
)
def test_init_with_other_settings_names_those_that_differ(
    address: str | None, settings: dict[str, Any], names: list[str]
) -> None:
    ray_fed.init(config=LOCAL)
    config = ray_fed.Config(**{"backend": "local", "workers": 2, **settings})

    with pytest.raises(errors.ContextStateError) as raised:
        ray_fed.init(address, config=config)

    said = str(raised.value)
    assert all(name in said for name in names), said
    assert "Call ray_fed.shutdown()" in said
    assert "secret" not in said


@pytest.mark.parametrize("is_installed", [True, False])
def test_settings_passed_as_the_address_are_refused(is_installed: bool) -> None:
    if is_installed:
        ray_fed.init(config=LOCAL)

    with pytest.raises(errors.ConfigError, match="pass settings as `config`"):
        ray_fed.init(cast("Any", LOCAL))


def test_call_without_a_context_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"No default context.*ray_fed.init\(\)"):
        mean_of_halves([1.0])


def test_call_of_another_thread_says_what_to_do() -> None:
    ray_fed.init(config=LOCAL)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            mean_of_halves([1.0])
        except RuntimeError as error:
            raised.append(error)
        ray_fed.init(config=LOCAL)
        assert mean_of_halves([1.0]) == 0.5

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)

    assert [type(error) for error in raised] == [errors.ContextStateError]
    assert "belongs to the thread that installed it" in str(raised[0])


def test_init_after_shutdown_builds_a_new_context() -> None:
    first = ray_fed.init(config=LOCAL)
    ray_fed.shutdown()

    second = ray_fed.init(config=ray_fed.Config(backend="local", workers=1))

    assert second is not first
    assert mean_of_halves([1.0]) == 0.5


def test_shutdown_without_init_does_nothing() -> None:
    before = set(threading.enumerate())

    ray_fed.shutdown()

    assert set(threading.enumerate()) == before


def test_with_block_closes_the_context() -> None:
    with ray_fed.init(config=LOCAL) as context:
        assert context.is_open

    assert not context.is_open
    with pytest.raises(errors.ContextStateError, match="found it closed"):
        mean_of_halves([1.0])


def test_last_of_several_threads_closes_the_context() -> None:
    """Threads enter and leave in turns, so that each one leaves while others use it."""
    failed: list[BaseException] = []
    used: list[ray_fed.ExecutionContext] = []
    first_entered, first_left = threading.Event(), threading.Event()

    def work(index: int) -> None:
        try:
            if index:
                first_entered.wait(30)
            with ray_fed.init(config=LOCAL) as context:
                used.append(context)
                if not index:
                    first_entered.set()
                    while len(used) < 2:
                        mean_of_halves([1.0])
                else:
                    first_left.wait(30)
                assert mean_of_halves([1.0]) == 0.5
            if not index:
                first_left.set()
                with pytest.raises(errors.ContextStateError, match="found it closed"):
                    mean_of_halves([1.0])
        except BaseException as error:  # noqa: BLE001 (the test raises it)
            failed.append(error)
            first_left.set()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failed == []
    assert [context is used[0] for context in used] == [True] * 3
    assert not used[0].is_open


def test_threads_that_come_and_go_always_have_an_open_context() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(15):
                with ray_fed.init(config=LOCAL) as context:
                    assert context.is_open
                    context.invoke(mean_of_halves, [1.0])
        except BaseException as error:  # noqa: BLE001 (the test raises it)
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failed == []


def test_context_closed_between_init_and_with_is_opened_anew() -> None:
    entered, arrived = threading.Event(), threading.Event()

    def work() -> None:
        with ray_fed.init(config=LOCAL):
            entered.set()
            arrived.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    closed = ray_fed.init(config=LOCAL)
    arrived.set()
    thread.join(30)
    with closed as context:
        assert not closed.is_open
        assert mean_of_halves([1.0]) == 0.5

    assert not context.is_open


def test_inner_with_block_leaves_the_context_to_the_outer_one() -> None:
    with ray_fed.init(config=LOCAL) as context:
        with ray_fed.init(config=LOCAL), context:
            pass
        ray_fed.init(config=LOCAL)  # as a function that is called in the block may
        assert mean_of_halves([1.0]) == 0.5

    assert not context.is_open


def test_with_block_leaves_the_context_to_an_init_before_it() -> None:
    context = ray_fed.init(config=LOCAL)
    with ray_fed.init(config=LOCAL), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    assert mean_of_halves([1.0]) == 0.5

    ray_fed.shutdown()

    assert not context.is_open


def test_shutdown_closes_for_all_and_blocks_leave_the_next_context_alone() -> None:
    with ray_fed.init(config=LOCAL) as first:
        ray_fed.shutdown()
        second = ray_fed.init(config=LOCAL)

    assert not first.is_open
    assert mean_of_halves([1.0]) == 0.5
    assert second.is_open


def test_with_block_of_an_init_closes_at_its_end() -> None:
    context = ray_fed.init(config=LOCAL)
    with context:
        pass

    assert not context.is_open


def test_closed_context_leaves_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with ray_fed.create_context(LOCAL) as context:
        context.invoke(mean_of_halves, [1.0, 2.0])

    after = {thread.name for thread in threading.enumerate() if thread.is_alive()}

    assert {name for name in after - before if name.startswith("ray_fed")} == set()


def test_created_context_is_not_installed() -> None:
    with ray_fed.create_context(LOCAL) as context:
        assert fl.framework.get_context_stack().current is not context


def test_call_inside_of_a_running_event_loop() -> None:
    ray_fed.init(config=LOCAL)

    async def call() -> Any:
        return mean_of_halves([2.0, 4.0])

    assert asyncio.run(call()) == 1.5


def test_calls_from_several_threads() -> None:
    results: dict[int, Any] = {}
    with ray_fed.create_context(LOCAL) as context:

        def call(index: int) -> None:
            results[index] = context.invoke(mean_of_halves, [float(index)] * 3)

        threads = [threading.Thread(target=call, args=(index,)) for index in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert results == {index: index / 2 for index in range(5)}


@pytest.mark.slow
def test_graphs_of_local_workers_run_at_the_same_time() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TWO_AT_ONCE], capture_output=True, text=True, check=False
    )

    assert run.stdout.strip() == "3.0", run.stderr


def test_environment_configures_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    monkeypatch.setenv("RAY_FED_WORKERS", "3")

    context = ray_fed.init()

    assert context.config == ray_fed.Config(backend="local", workers=3)


def test_import_loads_neither_tensorflow_nor_ray() -> None:
    code = "import sys, ray_fed; print({'tensorflow', 'ray'} & set(sys.modules))"

    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("address", "workers", "message"),
    [
        pytest.param("auto", 2, "Expected no address", id="address"),
        pytest.param(
            None, {"count": 1, "num_gpus": 1}, r"no `workers.num_gpus`", id="GPUs"
        ),
    ],
)
def test_local_backend_refuses_what_only_ray_can_give(
    address: str | None, workers: Any, message: str
) -> None:
    config = ray_fed.Config(backend="local", workers=workers)

    with pytest.raises(errors.ConfigError, match=message):
        ray_fed.init(address, config=config)
