"""Names, lambdas, blocks, calls, selections and structs, evaluated when needed."""

# pyright: reportUnknownLambdaType=false

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor
from ray_fed.language import structs
from tests.executor_calls import computed, embed, invoke

flf = fl.framework
Block = flf.ComputationBuildingBlock

StackFor = Callable[..., flf.Executor]

INT = fl.TensorType(np.int32)
PAIR = fl.StructType([INT, INT])
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
INT_TO_INT = fl.FunctionType(INT, INT)


class CountingExecutor(EagerTFExecutor):
    """Counts its calls, and may wait for company in each."""

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self.num_calls = 0
        self.is_closed = False
        self._barrier: asyncio.Barrier | None = None
        self._together = together

    @override
    async def create_call(self, comp: Any, arg: Any = None) -> Any:
        self.num_calls += 1
        if self._together > 1:
            self._barrier = self._barrier or asyncio.Barrier(self._together)
            await asyncio.wait_for(self._barrier.wait(), timeout=20)
        return await super().create_call(comp, arg)

    @override
    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.fixture
def target() -> CountingExecutor:
    return CountingExecutor()


@pytest.fixture
def executor(target: CountingExecutor) -> Iterator[ReferenceResolvingExecutor]:
    executor = ReferenceResolvingExecutor(SequenceExecutor(target))
    yield executor
    executor.close()


def number(value: int) -> Block:
    return flf.Literal(np.int32(value), INT)


def name(of: str, type_spec: Any = INT) -> Block:
    return flf.Reference(of, fl.to_type(type_spec))


def plus(left: Block, right: Block) -> Block:
    add = flf.Intrinsic(flf.GENERIC_PLUS.uri, fl.FunctionType(PAIR, INT))
    return flf.Call(add, flf.Struct([left, right]))


@rtf.computation(np.int32)
def fail(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 10**6, ["it ran"])]):
        return tf.identity(x)


@rtf.computation(np.int32, np.int32)
def subtract(x: Any, y: Any) -> Any:
    return x - y


def failing() -> Block:
    return flf.Call(fail.to_compiled_building_block(), number(1))


def run(executor: flf.Executor, block: Any, *args: Any) -> Any:
    """Evaluate a block; call it where it is a function."""
    if not isinstance(block.type_signature, fl.FunctionType):
        return computed(embed(executor, block))
    return asyncio.run(invoke(executor, block, args[0] if len(args) == 1 else args))


class TestLambdas:
    def test_bind_their_parameter(self, executor: ReferenceResolvingExecutor) -> None:
        block = flf.Lambda("x", INT, plus(name("x"), plus(name("x"), number(1))))

        assert run(executor, block, 5) == 11

    def test_may_have_no_parameter(self, executor: ReferenceResolvingExecutor) -> None:
        assert run(executor, flf.Lambda(None, None, number(5))) == 5

    def test_may_ignore_their_parameter(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        assert run(executor, flf.Lambda("x", INT, number(5)), 1) == 5

    def test_may_be_arguments_of_lambdas(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        f = name("f", INT_TO_INT)
        twice = flf.Lambda(
            "f", INT_TO_INT, flf.Lambda("x", INT, flf.Call(f, flf.Call(f, name("x"))))
        )
        increment = flf.Lambda("y", INT, plus(name("y"), number(1)))

        assert run(executor, flf.Call(twice, increment), 5) == 7

    def test_see_the_scope_they_were_written_in(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        add_x = flf.Lambda("y", INT, plus(name("x"), name("y")))
        block = flf.Block(
            [("x", number(1)), ("f", add_x), ("x", number(100))],
            flf.Call(name("f", add_x.type_signature), name("x")),
        )

        assert run(executor, block) == 101

    def test_shadow_outer_names(self, executor: ReferenceResolvingExecutor) -> None:
        inner = flf.Lambda("x", INT, plus(name("x"), number(1)))
        block = flf.Lambda("x", INT, plus(flf.Call(inner, number(10)), name("x")))

        assert run(executor, block, 5) == 16

    def test_may_be_returned_and_called_later(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        block = flf.Lambda("x", INT, flf.Lambda("y", INT, plus(name("x"), name("y"))))

        async def call() -> Any:
            outer = await executor.create_value(block)
            one = await executor.create_value(1, INT)
            inner = await executor.create_call(outer, one)
            results = [
                await executor.create_call(inner, await executor.create_value(n, INT))
                for n in (10, 20)
            ]
            return [await result.compute() for result in results]

        assert asyncio.run(call()) == [11, 21]

    def test_of_federated_computations(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        decorate: Callable[..., Any] = fl.federated_computation

        @decorate(np.int32, np.int32)
        def both(x: Any, y: Any) -> Any:
            return {"d": subtract(x, y), "r": (subtract(y, x), x)}

        result = run(executor, both, 7, 2)

        assert [pair for pair, _ in structs.iter_elements(result)] == ["d", "r"]
        assert (result.d, list(result.r)) == (5, [-5, 7])


class TestBlocks:
    def test_locals_see_former_ones_and_shadow_them(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        block = flf.Block(
            [("x", number(1)), ("y", plus(name("x"), number(10))), ("x", name("y"))],
            plus(name("x"), name("y")),
        )

        assert run(executor, block) == 22

    def test_locals_that_nobody_uses_are_not_evaluated(
        self, executor: ReferenceResolvingExecutor, target: CountingExecutor
    ) -> None:
        long = name("x")
        for _ in range(10):
            long = plus(long, number(1))
        block = flf.Block([("unused", failing()), ("x", number(5))], long)

        assert run(executor, block) == 15
        assert target.num_calls == 10

    def test_locals_are_evaluated_once(
        self, executor: ReferenceResolvingExecutor, target: CountingExecutor
    ) -> None:
        x = plus(number(1), number(2))
        block = flf.Block(
            [("x", x)], flf.Struct([name("x"), plus(name("x"), name("x"))])
        )

        assert list(run(executor, block)) == [3, 6]
        assert target.num_calls == 2

    def test_locals_of_a_lambda_are_evaluated_on_every_call(
        self, executor: ReferenceResolvingExecutor, target: CountingExecutor
    ) -> None:
        body = flf.Block([("y", plus(name("x"), number(1)))], name("y"))
        f = flf.Lambda("x", INT, body)
        called = [flf.Call(name("f", INT_TO_INT), number(n)) for n in (1, 2)]

        result = run(executor, flf.Block([("f", f)], flf.Struct(called)))

        assert list(result) == [2, 3]
        assert target.num_calls == 2

    def test_independent_locals_are_evaluated_at_the_same_time(self) -> None:
        executor = ReferenceResolvingExecutor(CountingExecutor(together=2))
        block = flf.Block(
            [("x", plus(number(1), number(2))), ("y", plus(number(3), number(4)))],
            flf.Struct([name("x"), name("y")]),
        )

        assert list(run(executor, block)) == [3, 7]


class TestStructs:
    def test_keep_names(self, executor: ReferenceResolvingExecutor) -> None:
        block = flf.Struct([("z", number(1)), (None, number(2))])

        result = run(executor, block)

        assert list(structs.iter_elements(result)) == [("z", 1), (None, 2)]

    def test_select_without_evaluating_the_rest(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        block = flf.Block(
            [("x", number(1)), ("y", number(2))],
            flf.Selection(flf.Struct([name("x"), name("y")]), index=1),
        )

        assert run(executor, block) == 2

    def test_may_hold_lambdas_but_not_be_computed_then(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        increment = flf.Lambda("y", INT, plus(name("y"), number(1)))
        struct = flf.Struct([increment, number(5)])
        applied = flf.Block(
            [("s", struct)],
            flf.Call(
                flf.Selection(name("s", struct.type_signature), index=0),
                flf.Selection(name("s", struct.type_signature), index=1),
            ),
        )

        assert run(executor, applied) == 6
        with pytest.raises(TypeError, match="Expected a value to compute, found a"):
            run(executor, struct)


class TestErrors:
    @pytest.mark.parametrize(
        "block",
        [
            pytest.param(name("unbound"), id="alone"),
            pytest.param(plus(number(1), name("unbound")), id="in a call"),
            pytest.param(flf.Lambda(None, None, name("unbound")), id="in a lambda"),
            pytest.param(
                flf.Block([("x", name("unbound"))], name("x")), id="in a local"
            ),
        ],
    )
    def test_a_free_reference_is_named(
        self, executor: ReferenceResolvingExecutor, block: Any
    ) -> None:
        with pytest.raises(errors.UnsupportedError, match="free reference `unbound`"):
            run(executor, block)

    def test_a_value_is_not_embedded_again(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        function = embed(executor, flf.Lambda("x", INT, name("x")))

        with pytest.raises(TypeError, match="Expected"):
            embed(executor, function, INT)

    def test_a_computation_of_another_type(
        self, executor: ReferenceResolvingExecutor
    ) -> None:
        block = flf.Lambda("x", INT, name("x"))

        with pytest.raises(TypeError, match="Expected a computation of type"):
            embed(executor, block, fl.FunctionType(INT, np.int64))

    def test_lambdas_have_no_value(self, executor: ReferenceResolvingExecutor) -> None:
        function = embed(executor, flf.Lambda("x", INT, name("x")))

        with pytest.raises(TypeError, match="found a function"):
            computed(function)

    def test_of_locals_reach_the_caller_and_no_log(
        self, executor: ReferenceResolvingExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        block = flf.Block(
            [("x", failing()), ("y", failing())],
            flf.Struct([name("x"), plus(name("x"), name("y")), name("y")]),
        )

        with (
            caplog.at_level(logging.WARNING, "asyncio"),
            pytest.raises(tf.errors.InvalidArgumentError, match="it ran"),
        ):
            run(executor, block)

        assert not caplog.records


@pytest.mark.claim("eager_tf.33")
def test_close_closes_the_target(
    executor: ReferenceResolvingExecutor, target: CountingExecutor
) -> None:
    executor.close()

    assert target.is_closed


class TestCaptures:
    """Lambdas that are arguments of intrinsics go down with what they use."""

    @staticmethod
    def mapped(body: Block, of: Block) -> Block:
        return flf.create_federated_map(flf.Lambda("v", INT, body), of)

    @pytest.mark.claim("semantics.61")
    def test_of_a_parameter_beside_a_placed_one(
        self, local_stack_for: StackFor
    ) -> None:
        parameter = fl.StructType([AT_CLIENTS, PAIR])
        arg = name("arg", parameter)
        offset = flf.Selection(flf.Selection(arg, index=1), index=1)
        block = flf.Lambda(
            "arg",
            parameter,
            self.mapped(plus(name("v"), offset), flf.Selection(arg, index=0)),
        )

        assert run(local_stack_for(3), block, [1, 2, 3], (10, 100)) == [101, 102, 103]

    def test_of_a_whole_struct_and_of_an_element(
        self, local_stack_for: StackFor
    ) -> None:
        second = flf.Selection(name("s", PAIR), index=1)
        whole = flf.Lambda("p", PAIR, flf.Selection(name("p", PAIR), index=0))
        body = plus(plus(name("v"), second), flf.Call(whole, name("s", PAIR)))
        block = flf.Lambda(
            "x",
            AT_CLIENTS,
            flf.Block(
                [("s", flf.Struct([number(10), number(100)]))],
                self.mapped(body, name("x", AT_CLIENTS)),
            ),
        )

        assert run(local_stack_for(2), block, [1, 2]) == [111, 112]

    def test_of_a_name_that_is_bound_again_inside(
        self, local_stack_for: StackFor
    ) -> None:
        inner = flf.Block(
            [("s", flf.Struct([name("v"), number(1000)]))],
            flf.Selection(name("s", PAIR), index=0),
        )
        body = plus(flf.Selection(name("s", PAIR), index=1), inner)
        block = flf.Lambda(
            "x",
            AT_CLIENTS,
            flf.Block(
                [("s", flf.Struct([number(10), number(100)]))],
                self.mapped(body, name("x", AT_CLIENTS)),
            ),
        )

        assert run(local_stack_for(2), block, [1, 2]) == [101, 102]

    def test_of_functions_that_capture_another_value_of_the_same_name(
        self, local_stack_for: StackFor
    ) -> None:
        add_x = flf.Lambda("y", INT, plus(name("y"), name("x")))
        call_f = flf.Call(name("f", INT_TO_INT), name("y"))
        f_and_x = flf.Lambda("y", INT, plus(call_f, name("x")))
        body = plus(flf.Call(name("g", INT_TO_INT), name("v")), name("x"))
        block = flf.Lambda(
            "placed",
            AT_CLIENTS,
            flf.Block(
                [
                    ("x", number(10)),
                    ("f", add_x),
                    ("x", number(100)),
                    ("g", f_and_x),
                    ("x", number(1000)),
                ],
                self.mapped(body, name("placed", AT_CLIENTS)),
            ),
        )

        assert run(local_stack_for(2), block, [1, 2]) == [1111, 1112]

    @pytest.mark.claim("semantics.61")
    def test_of_tensorflow_and_sequences(self, local_stack_for: StackFor) -> None:
        decorate: Callable[..., Any] = fl.federated_computation
        total = rtf.computation(
            tf.function(lambda ds, x: ds.reduce(x, lambda a, b: a + b)),
            fl.SequenceType(np.int32),
            np.int32,
        )

        @decorate(AT_CLIENTS, fl.SequenceType(np.int32))
        def sums(placed: Any, data: Any) -> Any:
            inner = decorate(lambda v: total(data, v), np.int32)
            return fl.federated_map(inner, placed)

        assert run(local_stack_for(2), sums, [10, 20], [1, 2, 3]) == [16, 26]

    def test_are_evaluated_once(self, local_stack_for: StackFor) -> None:
        now = rtf.computation(tf.function(lambda: tf.timestamp()))  # noqa: PLW0108
        seconds = fl.to_type(np.float64)
        block = flf.Block(
            [("t", flf.Call(now.to_compiled_building_block()))],
            flf.create_federated_map(
                flf.Lambda("v", INT, name("t", seconds)),
                flf.create_federated_value(number(1), fl.CLIENTS),
            ),
        )

        times = run(local_stack_for(3), flf.Lambda(None, None, block))

        assert len(set(times)) == 1

    def test_of_placed_values_are_refused(self, local_stack_for: StackFor) -> None:
        placed = name("x", AT_CLIENTS)
        body = flf.Selection(flf.Struct([name("v"), placed]), index=0)
        block = flf.Lambda("x", AT_CLIENTS, self.mapped(body, placed))

        with pytest.raises(TypeError, match=r"Expected .* placements are for"):
            run(local_stack_for(2), block, [1, 2])
