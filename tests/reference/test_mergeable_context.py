"""Claims of the MergeableCompExecutionContext's document that no other test holds."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.framework as framework
from ray_fed import tensorflow as rtf
from ray_fed.framework import MergeableCompExecutionContext, MergeableCompForm
from ray_fed.language import structs
from tests.forms import sum_parts

flf = fl.framework
Build = Callable[..., MergeableCompExecutionContext]
federated_computation = cast("Callable[..., Any]", fl.federated_computation)

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)
C = fl.CLIENTS
NUM_CLIENTS = 6


total, add, merged_alone = sum_parts(np.float32)
SUM_FORM = MergeableCompForm(total, add, merged_alone)


@rtf.computation
def one() -> Any:
    return np.float32(1)


class Context(flf.AsyncContext):
    """A real asynchronous context over a debugging stack, which is watched.

    Attributes:
        calls: number and argument of each invocation of a subround.
        most_at_once: invocations that ran at the same time.
    """

    def __init__(self, factory: flf.ExecutorFactory, delay_s: float = 0.0) -> None:
        self._context = flf.AsyncExecutionContext(factory)
        self._delay_s = delay_s
        self._running = 0
        self.calls: list[tuple[str, Any]] = []
        self.most_at_once = 0

    @override
    async def invoke(self, comp: Any, arg: Any) -> Any:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.calls.append((str(comp.type_signature), arg))
        await asyncio.sleep(self._delay_s)
        try:
            return await self._context.invoke(comp, arg)
        finally:
            self._running -= 1

    def slices(self) -> list[Any]:
        """Return the clients of all calls of `up_to_merge`, in order."""
        return [arg for name, arg in self.calls if name == str(total.type_signature)]


@pytest.fixture
def contexts() -> list[Context]:
    """The contexts that `build` builds."""
    return []


@pytest.fixture
def build(contexts: list[Context]) -> Iterator[Build]:
    built: list[MergeableCompExecutionContext] = []
    factories: list[flf.ExecutorFactory] = []

    def make(
        num_contexts: int = 2,
        *,
        factory: Any = None,
        delay_s: float = 0.0,
        num_clients: int | None = None,
        **options: Any,
    ) -> MergeableCompExecutionContext:
        for _ in range(num_contexts):
            factories.append(framework.thread_debugging_executor_factory(num_clients))
            one_of_them = factory or factories[-1]
            contexts.append(Context(one_of_them, delay_s))
        built.append(MergeableCompExecutionContext(list(contexts), **options))
        return built[-1]

    yield make
    for context in built:
        context.close()
    for factory in factories:
        factory.clean_up_executor({})
        for number in range(NUM_CLIENTS + 1):
            factory.clean_up_executor({fl.CLIENTS: number})


CLIENTS = [float(index) for index in range(NUM_CLIENTS)]


@pytest.mark.claim("mergeable.03")
def test_constructor_has_the_documented_arguments() -> None:
    parameters = inspect.signature(MergeableCompExecutionContext).parameters

    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "async_contexts": inspect.Parameter.empty,
        "compiler_fn": None,
        "transform_args": None,
        "transform_result": None,
        "num_subrounds": None,
    }
    assert list(parameters) == [
        "async_contexts", "compiler_fn", "transform_args", "transform_result",
        "num_subrounds",
    ]  # fmt: skip


@pytest.mark.claim("mergeable.02", "mergeable.14")
def test_is_a_synchronous_context(build: Build) -> None:
    context = build()

    assert isinstance(context, flf.SyncContext)
    assert list(inspect.signature(context.invoke).parameters) == ["comp", "arg"]
    assert context.invoke(comp=SUM_FORM, arg=CLIENTS) == 15.0


class FlakyFactory(flf.ExecutorFactory):
    """Fails once, on the second stack that it is asked for."""

    def __init__(self) -> None:
        self._factory = framework.thread_debugging_executor_factory()
        self._count = 0

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        self._count += 1
        if self._count == 2:
            raise flf.RetryableError("a worker is gone")
        return self._factory.create_executor(cardinalities)

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        self._factory.clean_up_executor(cardinalities)

    @property
    def count(self) -> int:
        """Stacks that were asked for."""
        return self._count


@pytest.mark.claim("mergeable.04")
def test_only_the_subround_that_fails_runs_again(
    build: Build, contexts: list[Context]
) -> None:
    factory = FlakyFactory()
    context = build(1, factory=factory, num_subrounds=3)

    result = context.invoke(SUM_FORM, CLIENTS)

    num_calls = len(contexts[0].calls)
    assert result == 15.0
    assert contexts[0].slices() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert factory.count == num_calls + 1


class Broken(flf.ExecutorFactory):
    """Has no stack for anybody."""

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        raise OSError("no stack")

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        pass


@pytest.mark.claim("mergeable.05")
def test_what_a_context_raises_for_good_is_not_retried(
    build: Build, contexts: list[Context]
) -> None:
    context = build(1, factory=Broken(), num_subrounds=1)

    with pytest.raises(OSError, match="no stack"):
        context.invoke(SUM_FORM, CLIENTS)

    assert len(contexts[0].calls) == 1


class Meeting(flf.AsyncContext):
    """Answers once all contexts have been asked."""

    def __init__(self, asked: list[int], everyone: asyncio.Event) -> None:
        self._asked = asked
        self._everyone = everyone

    @override
    async def invoke(self, comp: Any, arg: Any) -> Any:
        if comp.type_signature == total.type_signature:
            self._asked.append(1)
            if len(self._asked) == 3:
                self._everyone.set()
            await asyncio.wait_for(self._everyone.wait(), 20)
        return np.float32(1)


@pytest.mark.claim("mergeable.06")
def test_contexts_run_at_the_same_time() -> None:
    asked: list[int] = []
    everyone = asyncio.Event()
    context = MergeableCompExecutionContext([Meeting(asked, everyone)] * 3)

    context.invoke(SUM_FORM, CLIENTS)
    context.close()

    assert len(asked) == 3


class Plain(flf.AsyncContext):
    """Its `invoke` is a function that returns what it is told to."""

    def __init__(self, to_result: Callable[[Any], Any]) -> None:
        self._to_result = to_result

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        return self._to_result(np.float32(1))


@pytest.mark.claim("mergeable.06")
def test_context_that_returns_no_awaitable_is_a_type_error() -> None:
    context = MergeableCompExecutionContext([Plain(lambda result: result)])

    with pytest.raises(TypeError, match=r"`invoke` of context 0 .* an awaitable"):
        context.invoke(SUM_FORM, CLIENTS)

    context.close()


@pytest.mark.claim("mergeable.07")
def test_compiler_is_given_each_computation_once_and_its_form_is_executed(
    build: Build,
) -> None:
    given: list[Any] = []

    def compile_to_sum(comp: Any) -> MergeableCompForm:
        given.append(comp)
        return SUM_FORM

    context = build(compiler_fn=compile_to_sum)
    others = [
        federated_computation(fl.federated_max, AT_CLIENTS),
        federated_computation(fl.federated_min, AT_CLIENTS),
    ]

    results = [context.invoke(comp, CLIENTS) for comp in [*others, *others]]

    assert results == [15.0] * 4
    assert given == others
    assert all(isinstance(comp, flf.ConcreteComputation) for comp in given)


@pytest.mark.claim("mergeable.07")
@pytest.mark.parametrize("form", [None, "form", total, (total, add, 1)], ids=type)
def test_compiler_that_returns_no_form_is_a_type_error(build: Build, form: Any) -> None:
    context = build(compiler_fn=lambda _: form)

    with pytest.raises(TypeError, match="`compiler_fn` to return a MergeableCompForm"):
        context.invoke(total, CLIENTS)


def async_context() -> flf.AsyncContext:
    factory = framework.thread_debugging_executor_factory()
    return flf.AsyncExecutionContext(factory)


@pytest.mark.claim("mergeable.06")
@pytest.mark.parametrize(
    ("contexts", "error"),
    [
        pytest.param([], ValueError, id="none"),
        pytest.param(None, TypeError, id="no sequence"),
        pytest.param(async_context(), TypeError, id="context outside of a sequence"),
        pytest.param([async_context(), 3], TypeError, id="number"),
        pytest.param([flf.AsyncExecutionContext], TypeError, id="class"),
        pytest.param(
            [flf.SyncExecutionContext(framework.thread_debugging_executor_factory())],
            TypeError,
            id="synchronous context",
        ),
    ],
)
def test_contexts_are_asynchronous_contexts(
    contexts: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^Expected "):
        MergeableCompExecutionContext(contexts)


@pytest.mark.claim("mergeable.03")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param({"compiler_fn": SUM_FORM}, TypeError, id="a form"),
        ({"transform_args": 3}, TypeError),
        ({"transform_result": "x"}, TypeError),
        ({"num_subrounds": 1.5}, TypeError),
        ({"num_subrounds": "2"}, TypeError),
        ({"num_subrounds": True}, TypeError),
        ({"num_subrounds": 0}, ValueError),
        ({"num_subrounds": -1}, ValueError),
    ],
    ids=str,
)
def test_options_are_of_their_types(options: Any, error: type[Exception]) -> None:
    (name,) = options

    with pytest.raises(error, match=f"^Expected .*`{name}`"):
        MergeableCompExecutionContext([async_context()], **options)


@pytest.mark.claim("mergeable.09", "mergeable.16")
@pytest.mark.parametrize("returned", [None, 5.0], ids=["none", "an argument"])
def test_none_is_transformed_too(build: Build, returned: Any) -> None:
    seen: list[Any] = []

    def transform(arg: Any) -> Any:
        seen.append(arg)
        return returned

    context = build(transform_args=transform, num_clients=3)
    form = SERVER_FORM if returned else ONES_FORM

    result = context.invoke(form)

    assert seen == [None]
    assert result == (10.0 if returned else 6.0)


def test_argument_that_is_not_taken_is_a_type_error(build: Build) -> None:
    context = build(num_clients=3)

    with pytest.raises(TypeError, match="Expected no argument"):
        context.invoke(ONES_FORM, 3)


@pytest.mark.claim("mergeable.13")
def test_more_subrounds_than_contexts_run_one_after_another(
    build: Build, contexts: list[Context]
) -> None:
    context = build(2, num_subrounds=6, delay_s=0.02)

    result = context.invoke(SUM_FORM, CLIENTS)

    assert result == 15.0
    assert sum(len(one_of_them.slices()) for one_of_them in contexts) == 6
    assert [one_of_them.most_at_once for one_of_them in contexts] == [1, 1]


@pytest.mark.claim("mergeable.15")
@pytest.mark.parametrize("comp", ["text", len, None, (total, add)], ids=type)
def test_what_is_no_computation_is_a_type_error(build: Build, comp: Any) -> None:
    context = build(compiler_fn=lambda _: SUM_FORM)

    with pytest.raises(TypeError, match="a MergeableCompForm or a computation, found"):
        context.invoke(comp, CLIENTS)


@federated_computation
def ones() -> Any:
    return fl.federated_sum(fl.federated_eval(one, fl.CLIENTS))


IDENTITY = federated_computation(lambda merged: merged, AT_SERVER)
ONES_FORM = MergeableCompForm(ones, add, IDENTITY)
SERVER_FORM = MergeableCompForm(
    federated_computation(lambda x: x, AT_SERVER),
    add,
    federated_computation(lambda _, merged: merged, AT_SERVER, AT_SERVER),
)


@pytest.mark.claim("mergeable.16", "semantics.73")
def test_without_an_argument_there_are_as_many_runs_as_asked_for(
    build: Build, contexts: list[Context]
) -> None:
    context = build(2, num_subrounds=5, num_clients=3)

    result = context.invoke(ONES_FORM)

    up_to_merge = [
        arg
        for one_of_them in contexts
        for name, arg in one_of_them.calls
        if name == str(ones.type_signature)
    ]
    assert up_to_merge == [None] * 5
    assert result == 15.0  # of five runs with the three clients of each context


@pytest.mark.claim("semantics.71")
def test_an_argument_without_clients_goes_to_every_subround(
    build: Build, contexts: list[Context]
) -> None:
    result = build(2, num_subrounds=4).invoke(SERVER_FORM, 2.5)

    up_to_merge = str(SERVER_FORM.up_to_merge.type_signature)
    given = [arg for c in contexts for name, arg in c.calls if name == up_to_merge]
    assert given == [2.5] * 4
    assert result == 10.0


@pytest.mark.claim("semantics.72")
def test_no_clients_make_one_subround(build: Build, contexts: list[Context]) -> None:
    result = build(3, num_subrounds=4).invoke(SUM_FORM, [])

    assert [clients for c in contexts for clients in c.slices()] == [[]]
    assert result == 0.0


@pytest.mark.claim("semantics.74")
def test_after_merge_without_values_of_clients_runs_once(
    build: Build, contexts: list[Context]
) -> None:
    build(2, num_subrounds=4).invoke(SUM_FORM, CLIENTS)

    after = str(merged_alone.type_signature)
    names = [name for one_of_them in contexts for name, _ in one_of_them.calls]
    assert names.count(after) == 1


@pytest.mark.claim("mergeable.09", "mergeable.17")
def test_structural_arguments_arrive_as_structs(build: Build) -> None:
    seen: list[Any] = []

    def look(arg: Any) -> Any:
        seen.append(arg)
        return arg

    @federated_computation(
        AT_CLIENTS, collections.OrderedDict(z=AT_SERVER, a=np.float32)
    )
    def both(clients: Any, rest: Any) -> Any:
        return fl.federated_sum(clients), rest["z"], rest["a"]

    context = build(
        compiler_fn=framework.compile_to_mergeable_comp_form, transform_args=look
    )
    with flf.get_context_stack().install(context):
        result = both(CLIENTS, collections.OrderedDict(z=2.0, a=3.0))

    nested = structs.Struct([("a", 3.0), ("z", 2.0)][::-1])
    again = context.invoke(both, structs.Struct([(None, CLIENTS), (None, nested)]))
    directly = context.invoke(both, (CLIENTS, {"a": 3.0, "z": 2.0}))
    assert seen == [structs.Struct([("clients", CLIENTS), ("rest", nested)])] * 3
    assert result == again == directly == (15.0, 2.0, 3.0)


@pytest.mark.claim("mergeable.17")
def test_contexts_receive_structures_as_structs(
    build: Build, contexts: list[Context]
) -> None:
    pair = fl.FederatedType(fl.StructType([("z", np.float32), ("a", np.float32)]), C)

    @rtf.computation(pair.member)
    def subtract(client: Any) -> Any:
        return client["z"] - client["a"]

    @federated_computation(pair, AT_SERVER)
    def differences(clients: Any, start: Any) -> Any:
        return fl.federated_sum(fl.federated_map(subtract, clients)), start

    context = build(compiler_fn=framework.compile_to_mergeable_comp_form)
    result = context.invoke(differences, ([{"a": 1.0, "z": 3.0}] * NUM_CLIENTS, 5.0))

    first = contexts[0].calls[0][1]
    client = structs.Struct([("z", 3.0), ("a", 1.0)])
    assert isinstance(first, structs.Struct)
    assert any(part == [client] * 3 for part in first)
    assert result == (12.0, 5.0)


@pytest.mark.claim("mergeable.02")
def test_invoke_waits_in_a_running_loop(build: Build) -> None:
    context = build()

    async def act() -> Any:
        return context.invoke(SUM_FORM, CLIENTS), threading.current_thread()

    result, thread = asyncio.run(act())

    assert result == 15.0
    assert thread is threading.current_thread()
