"""The documented context over any asynchronous contexts, and hand-written forms."""

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.compiler.split import compile_to_mergeable_comp_form
from ray_fed.contexts.mergeable import MergeableCompExecutionContext
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)
NUM_CLIENTS = 10


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.float32)
def double(x: Any) -> Any:
    return x * 2


@fl.federated_computation(AT_CLIENTS)
def sum_of_doubles(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(double, values))


@fl.federated_computation(AT_CLIENTS, AT_SERVER)
def values_and_sum(values: Any, total: Any) -> Any:
    return fl.federated_map(double, values), total


def hand_written_form() -> MergeableCompForm:
    parts: tuple[Any, Any, Any] = (sum_of_doubles, add, values_and_sum)
    return MergeableCompForm(*parts)


class RecordingContext(fl.framework.AsyncContext):
    """Runs on a debugging stack; notes the clients of each slice, slow ones last."""

    def __init__(
        self, seen: list[list[float]], delay_s: Callable[[Any], float]
    ) -> None:
        self._factory = thread_debugging_executor_factory()
        self._context = fl.framework.AsyncExecutionContext(self._factory)
        self._seen = seen
        self._delay_s = delay_s

    def close(self) -> None:
        for number in range(NUM_CLIENTS + 1):
            self._factory.clean_up_executor({fl.CLIENTS: number})
        self._factory.clean_up_executor({})

    @override
    async def invoke(self, comp: Any, arg: Any) -> Any:
        if isinstance(arg, list) and comp.type_signature.result == AT_SERVER:
            self._seen.append(list(arg))
            await asyncio.sleep(self._delay_s(arg))
        return await self._context.invoke(comp, arg)


def no_delay(arg: Any) -> float:
    return 0.0


def slow_first(arg: Any) -> float:
    return 0.2 if arg[0] == 0.0 else 0.0


def ten_times(arg: Any) -> Any:
    return [10.0 * x for x in arg]


def named(result: object) -> object:
    return "result", result


@pytest.fixture
def seen() -> list[list[float]]:
    return []


@pytest.fixture
def build(
    seen: list[list[float]],
) -> Iterator[Callable[..., MergeableCompExecutionContext]]:
    contexts: list[MergeableCompExecutionContext] = []
    all_runners: list[RecordingContext] = []

    def make(num_contexts: int = 2, **options: Any) -> MergeableCompExecutionContext:
        delay_s: Callable[[Any], float] = options.pop("delay_s", no_delay)
        runners = [RecordingContext(seen, delay_s) for _ in range(num_contexts)]
        all_runners.extend(runners)
        contexts.append(MergeableCompExecutionContext(runners, **options))
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()
    for runner in all_runners:
        runner.close()


Build = Callable[..., MergeableCompExecutionContext]


@pytest.mark.claim("mergeable.18", "semantics.75", "semantics.81")
def test_hand_written_form_returns_clients_in_order_when_first_is_slowest(
    build: Build,
) -> None:
    context = build(4, num_subrounds=4, delay_s=slow_first)

    values, total = context.invoke(
        hand_written_form(), [float(index) for index in range(10)]
    )

    assert values == [2.0 * index for index in range(10)]
    assert total == 90.0


@pytest.mark.claim("mergeable.01", "mergeable.11", "semantics.69")
def test_slices_are_contiguous_and_of_nearly_equal_size(
    build: Build, seen: list[list[float]]
) -> None:
    context = build(1, num_subrounds=4)

    context.invoke(hand_written_form(), [float(index) for index in range(10)])

    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.claim("mergeable.12", "semantics.68")
def test_one_subround_for_each_context_by_default(
    build: Build, seen: list[list[float]]
) -> None:
    context = build(3)

    context.invoke(hand_written_form(), [1.0] * 9)

    assert [len(clients) for clients in seen] == [3, 3, 3]


@pytest.mark.claim("mergeable.08")
def test_computation_needs_a_compiler(build: Build) -> None:
    context = build()

    with pytest.raises(errors.UnsupportedError, match="Expected a MergeableCompForm"):
        context.invoke(sum_of_doubles, [1.0])


@fl.federated_computation(AT_CLIENTS)
def add_sum_to_each(values: Any) -> Any:
    total = fl.federated_broadcast(fl.federated_sum(values))
    return fl.federated_map(add, (values, total))


@fl.federated_computation(AT_CLIENTS, AT_SERVER)
def add_sum_after_merge(values: Any, merged: Any) -> Any:
    del merged
    total = fl.federated_broadcast(fl.federated_sum(values))
    return fl.federated_map(add, (values, total))


def test_sum_that_is_sent_back_is_that_of_the_whole_cohort(build: Build) -> None:
    context = build(compiler_fn=compile_to_mergeable_comp_form, num_subrounds=4)
    clients = np.array([1, 2, 3, 4], np.float32)

    result = context.invoke(add_sum_to_each, list(clients))

    np.testing.assert_array_equal(result, clients + np.sum(clients))


def test_form_that_would_send_back_the_sum_of_a_slice_is_refused() -> None:
    parts: tuple[Any, Any, Any] = (sum_of_doubles, add, add_sum_after_merge)

    with pytest.raises(errors.CompileError, match="the intrinsic `federated_sum`"):
        MergeableCompForm(*parts)


@pytest.mark.claim("mergeable.09", "mergeable.10", "semantics.80")
def test_argument_and_result_are_transformed(build: Build) -> None:
    context = build(
        compiler_fn=compile_to_mergeable_comp_form,
        transform_args=ten_times,
        transform_result=named,
    )

    result = context.invoke(sum_of_doubles, [1.0, 2.0])

    assert result == ("result", 60.0)


@pytest.mark.claim("mergeable.18")
def test_call_through_the_installed_context_keeps_containers(build: Build) -> None:
    context = build(compiler_fn=compile_to_mergeable_comp_form)

    @fl.federated_computation(AT_CLIENTS)
    def both(values: Any) -> Any:
        return collections.OrderedDict(
            total=fl.federated_sum(values), largest=fl.federated_max(values)
        )

    with fl.framework.get_context_stack().install(context):
        result = both([1.0, 5.0, 2.0])

    assert result == collections.OrderedDict(total=8.0, largest=5.0)
