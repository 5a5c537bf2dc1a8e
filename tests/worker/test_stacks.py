"""The stacks, sentence by sentence of what is documented of the debugging one."""

# pyright: reportUnknownLambdaType=false

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.executors.eager_tf as eager_tf
from ray_fed import tensorflow as rtf
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory

flf = fl.framework
Factory = Callable[..., flf.ExecutorFactory]
federated_computation = cast("Callable[..., Any]", fl.federated_computation)

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@federated_computation(AT_CLIENTS)
def mean_of_halves(values: Any) -> Any:
    return fl.federated_mean(fl.federated_map(half, values))


@federated_computation(AT_CLIENTS)
def same(values: Any) -> Any:
    return values


@rtf.computation
def one() -> Any:
    return np.float32(1)


ones = federated_computation(lambda: fl.federated_eval(one, fl.CLIENTS))


@rtf.computation(np.float32)
def fail(x: Any) -> Any:
    tf.debugging.assert_less(x, 0.0)
    return x


def mapped(fn: Callable[[Any], Any]) -> Any:
    return federated_computation(fn, AT_CLIENTS)


def lambda_of_half() -> Any:
    return federated_computation(lambda x: (half(x), x), np.float32)


class Context(flf.SyncContext):
    """Runs calls on the executors of a factory, as federated_language's does."""

    def __init__(self, factory: flf.ExecutorFactory) -> None:
        self._context = flf.AsyncExecutionContext(factory)

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        return asyncio.run(self._context.invoke(comp, arg))


def watch_calls(
    monkeypatch: pytest.MonkeyPatch, barrier: threading.Barrier | None = None
) -> list[tuple[str, float]]:
    """Return a list that gets the thread and argument of each call of a leaf."""
    calls: list[tuple[str, float]] = []

    class WatchedExecutor(eager_tf.EagerTFExecutor):
        @override
        async def create_call(self, comp: Any, arg: Any = None) -> Any:
            if barrier is not None:
                barrier.wait(20)
            calls.append((threading.current_thread().name, float(arg.reference)))
            return await super().create_call(comp, arg)

    monkeypatch.setattr(eager_tf, "EagerTFExecutor", WatchedExecutor)
    return calls


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _note_other_threads() -> None:
    """Note what ran before the test: stacks of other tests have no end of their own."""
    _others.clear()
    _others.update(threading.enumerate())


def names_of_threads() -> list[str]:
    names = (thread.name for thread in set(threading.enumerate()) - _others)
    return sorted(name for name in names if name.startswith("ray_fed debugging"))


@pytest.fixture
def install() -> Iterator[Factory]:
    """Installs a context over a debugging factory."""
    factories: list[flf.ExecutorFactory] = []

    def build(*args: Any, **kwargs: Any) -> flf.ExecutorFactory:
        factories.append(thread_debugging_executor_factory(*args, **kwargs))
        fl.framework.set_default_context(Context(factories[-1]))
        return factories[-1]

    yield build
    for factory in factories:
        for number in [None, *range(8)]:
            factory.clean_up_executor({} if number is None else {fl.CLIENTS: number})


class TestCardinality:
    @pytest.mark.claim("debugging.03", "debugging.15")
    def test_is_inferred_anew_for_another_argument(self, install: Factory) -> None:
        install()

        assert [same([1.0]), same([1.0, 2.0]), same([]), same((3.0,))] == [
            [1.0],
            [1.0, 2.0],
            [],
            [3.0],
        ]

    def test_is_none_where_no_argument_has_clients(self, install: Factory) -> None:
        install()

        assert ones() == []

    @pytest.mark.claim("debugging.14")
    @pytest.mark.parametrize("number", [3, np.int64(3)], ids=["int", "numpy"])
    def test_may_be_fixed(self, install: Factory, number: Any) -> None:
        install(number, clients_per_thread=np.int32(2))

        assert same([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
        assert ones() == [1.0] * 3

    @pytest.mark.claim("debugging.14")
    def test_fixed_refuses_another_number_and_says_both(self, install: Factory) -> None:
        install(num_clients=3)

        with pytest.raises(ValueError, match=r"Expected 3 clients.* with 2"):
            same([1.0, 2.0])

    @pytest.mark.claim("semantics.64")
    def test_that_conflicts_is_a_value_error(self, install: Factory) -> None:
        install()
        both = federated_computation(lambda x, y: (x, y), AT_CLIENTS, AT_CLIENTS)

        with pytest.raises(ValueError, match="Conflicting cardinalities"):
            both([1.0, 2.0], [3.0])

    @pytest.mark.claim("semantics.65")
    def test_of_what_is_no_sequence_is_a_type_error(self, install: Factory) -> None:
        install()

        with pytest.raises(TypeError, match="to be a `list` or `tuple`"):
            same(1.0)

    @pytest.mark.claim("debugging.18")
    @pytest.mark.parametrize("number", [0, 0.5, -np.inf])
    @pytest.mark.parametrize("name", ["num_clients", "clients_per_thread"])
    def test_below_one_is_a_value_error(self, name: str, number: Any) -> None:
        with pytest.raises(ValueError, match=f"{name}={number}"):
            thread_debugging_executor_factory(**{name: number})

    @pytest.mark.claim("debugging.18")
    @pytest.mark.parametrize("number", [1.5, np.nan, "2", True], ids=repr)
    @pytest.mark.parametrize("name", ["num_clients", "clients_per_thread"])
    def test_that_is_no_whole_number_is_a_type_error(
        self, name: str, number: Any
    ) -> None:
        with pytest.raises(TypeError, match=f"a whole number for `{name}`, found"):
            thread_debugging_executor_factory(**{name: number})


class TestStructure:
    def test_reads_a_dataset_no_further_than_the_work_does(
        self, install: Factory
    ) -> None:
        install()
        sequences = fl.FederatedType(fl.SequenceType(np.int32), fl.CLIENTS)
        endless = tf.data.Dataset.from_tensors(np.int32(2)).repeat()

        @rtf.computation(sequences.member)
        def sum_of_five(dataset: Any) -> Any:
            return dataset.take(5).reduce(np.int32(0), lambda total, x: total + x)

        comp = federated_computation(
            lambda x: fl.federated_map(sum_of_five, x), sequences
        )

        assert comp([endless, endless.take(3)]) == [10, 6]

    @pytest.mark.claim("debugging.11", "eager_tf.25", "federating.05")
    def test_runs_clients_of_different_threads_at_the_same_time(
        self, install: Factory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = watch_calls(monkeypatch, threading.Barrier(3))
        install()
        comp = federated_computation(lambda x: fl.federated_map(half, x), AT_CLIENTS)

        assert comp([2.0, 4.0, 6.0]) == [1.0, 2.0, 3.0]
        assert sorted(calls) == [
            (f"ray_fed debugging {index}", 2.0 * index + 2) for index in range(3)
        ]

    @pytest.mark.claim("debugging.16")
    def test_runs_clients_of_one_thread_in_sequence(
        self, install: Factory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = watch_calls(monkeypatch)
        install(clients_per_thread=4)
        comp = federated_computation(lambda x: fl.federated_map(half, x), AT_CLIENTS)

        assert comp([8.0, 6.0, 4.0, 2.0]) == [4.0, 3.0, 2.0, 1.0]
        assert calls == [
            ("ray_fed debugging 0", number) for number in (8.0, 6.0, 4.0, 2.0)
        ]


class TestClose:
    def test_ends_all_threads(self, install: Factory) -> None:
        executor = install().create_executor({fl.CLIENTS: 3})

        executor.close()

        assert names_of_threads() == []

    def test_clean_up_closes_the_stack_and_makes_room_for_a_new_one(
        self, install: Factory
    ) -> None:
        factory = install()
        first = factory.create_executor({fl.CLIENTS: 2})

        factory.clean_up_executor({fl.CLIENTS: 2})
        factory.clean_up_executor({fl.CLIENTS: 2})

        assert names_of_threads() == []
        assert factory.create_executor({fl.CLIENTS: 2}) is not first

    @pytest.mark.claim("semantics.66")
    @pytest.mark.parametrize(
        ("comp", "arg"),
        [
            pytest.param(same, [1.0, "x"], id="argument"),
            pytest.param(
                mapped(lambda x: fl.federated_map(fail, x)), [1.0, 2.0], id="client"
            ),
            pytest.param(
                mapped(lambda x: fl.federated_map(fail, fl.federated_sum(x))),
                [1.0, 2.0],
                id="server",
            ),
            pytest.param(
                mapped(lambda x: fl.federated_map(lambda_of_half(), x)),
                [1.0, 2.0],
                id="refusal",
            ),
        ],
    )
    def test_any_error_cleans_the_stack_up(
        self, install: Factory, comp: Any, arg: Any
    ) -> None:
        factory = install()
        first = factory.create_executor({fl.CLIENTS: 2})
        started = names_of_threads()

        with pytest.raises((RuntimeError, TypeError, ValueError, tf.errors.OpError)):
            comp(arg)

        assert len(started) == 3
        assert names_of_threads() == []
        assert factory.create_executor({fl.CLIENTS: 2}) is not first

    def test_an_error_without_clients_cleans_the_stack_up(
        self, install: Factory
    ) -> None:
        install()
        no_mean = federated_computation(lambda x: fl.federated_mean(x, x), AT_CLIENTS)

        with pytest.raises(errors.CardinalityError):
            no_mean([])

        assert names_of_threads() == []


class TestWhatClientsRun:
    """References are resolved at the top only: clients run TensorFlow."""

    @pytest.mark.claim("debugging.04", "debugging.05")
    @pytest.mark.parametrize(
        ("fn", "construct"),
        [
            pytest.param(
                lambda x: (half(x), x), r"\(<lambda>_\w* -> ", id="struct of calls"
            ),
            pytest.param(lambda _: fl.to_value(3.0, None), "-> 3", id="literal"),
        ],
    )
    def test_a_lambda_is_refused_by_name_with_the_way_out(
        self, install: Factory, fn: Callable[[Any], Any], construct: str
    ) -> None:
        install()
        function = federated_computation(fn, np.float32)
        comp = federated_computation(
            lambda x: fl.federated_map(function, x), AT_CLIENTS
        )

        with pytest.raises(
            errors.UnsupportedError,
            match=rf"a TensorFlow computation, found `.*{construct}.*write it as",
        ):
            comp([1.0])

    @pytest.mark.claim("debugging.05")
    def test_a_lambda_with_captured_values_is_refused(self, install: Factory) -> None:
        install()

        @federated_computation(AT_CLIENTS, np.float32)
        def shift(values: Any, offset: Any) -> Any:
            inner = federated_computation(lambda v: add(v, offset), np.float32)
            return fl.federated_map(inner, values)

        with pytest.raises(errors.UnsupportedError, match="a lambda that captures"):
            shift([1.0], 2.0)

    @pytest.mark.claim("debugging.05")
    def test_a_sequence_intrinsic_is_refused(self, install: Factory) -> None:
        install()
        comp = federated_computation(
            fl.sequence_sum, fl.FederatedType(fl.SequenceType(np.float32), fl.CLIENTS)
        )

        with pytest.raises(errors.UnsupportedError, match="found `sequence_sum`"):
            comp([[1.0]])

    @pytest.mark.claim("debugging.04")
    def test_lambdas_without_clients_run(self, install: Factory) -> None:
        install()

        @federated_computation(AT_SERVER, np.float32)
        def shift(value: Any, offset: Any) -> Any:
            inner = federated_computation(lambda v: (add(v, offset), v), np.float32)
            return fl.federated_map(inner, value), (half(offset), offset)

        assert shift(1.0, 2.0) == ((3.0, 1.0), (1.0, 2.0))

    def test_functions_with_named_parameters_aggregate(self, install: Factory) -> None:
        install(clients_per_thread=2)
        comp = federated_computation(
            lambda x: fl.federated_aggregate(x, np.float32(0), add, add, half),
            AT_CLIENTS,
        )

        assert comp([1.0, 2.0, 3.0, 4.0, 5.0]) == 7.5
