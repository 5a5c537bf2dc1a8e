"""sequence_map, sequence_reduce and sequence_sum, with functions of any kind."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor

flf = fl.framework
Evaluate = Callable[..., Any]
federated_computation: Callable[..., Any] = fl.federated_computation

INT = fl.TensorType(np.int32)
INTS = fl.SequenceType(np.int32)
POINTS = fl.SequenceType(collections.OrderedDict(z=np.int32, a=np.float32))
BATCHES = fl.SequenceType(fl.TensorType(np.float32, (None,)))


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(np.int32, np.int32)
def append_digit(number: Any, digit: Any) -> Any:
    return 10 * number + digit


@rtf.computation(POINTS.element)
def swap(point: Any) -> Any:
    return collections.OrderedDict(a=point["a"] + 1, z=point["z"] * 2)


@pytest.fixture
def executor() -> Iterator[flf.Executor]:
    executor = ReferenceResolvingExecutor(SequenceExecutor(EagerTFExecutor()))
    yield executor
    executor.close()


class TestMap:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            pytest.param([3, 1, 2], [4, 2, 3], id="in order"),
            pytest.param([7], [8], id="one"),
            pytest.param([], [], id="none"),
        ],
    )
    def test_calls_tensorflow_on_every_element(
        self,
        executor: flf.Executor,
        evaluate: Evaluate,
        values: list[int],
        expected: list[int],
    ) -> None:
        comp = federated_computation(lambda s: fl.sequence_map(increment, s), INTS)

        assert evaluate(executor, comp, values) == expected

    def test_calls_lambdas_with_captured_values(
        self, executor: flf.Executor, evaluate: Evaluate
    ) -> None:
        @federated_computation(INTS, np.int32, np.int32)
        def shifted(sequence: Any, unused: Any, digit: Any) -> Any:
            inner = federated_computation(lambda x: append_digit(x, digit), np.int32)
            return fl.sequence_map(inner, sequence)

        assert evaluate(executor, shifted, [1, 2], 0, 5) == [15, 25]

    def test_keeps_fields(self, executor: flf.Executor, evaluate: Evaluate) -> None:
        comp = federated_computation(lambda s: fl.sequence_map(swap, s), POINTS)

        result = evaluate(executor, comp, [{"a": 0.5, "z": 1}, {"z": 2, "a": 1.5}])

        assert str(comp.type_signature.result) == "<a=float32,z=int32>*"
        assert [(p["z"], p["a"]) for p in result] == [(2, 1.5), (4, 2.5)]

    def test_takes_batches_of_any_size(
        self, executor: flf.Executor, evaluate: Evaluate
    ) -> None:
        total = rtf.computation(lambda x: tf.reduce_sum(x, axis=0), BATCHES.element)
        comp = federated_computation(lambda s: fl.sequence_map(total, s), BATCHES)

        assert evaluate(executor, comp, [[1.0], [2.0, 3.0], []]) == [1.0, 5.0, 0.0]

    def test_maps_what_it_mapped(
        self, executor: flf.Executor, evaluate: Evaluate
    ) -> None:
        comp = federated_computation(
            lambda s: fl.sequence_map(increment, fl.sequence_map(increment, s)), INTS
        )

        assert evaluate(executor, comp, [1, 2]) == [3, 4]


class TestReduce:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            pytest.param([1, 2, 3], 9123, id="in order"),
            pytest.param([1], 91, id="one"),
            pytest.param([], 9, id="zero of none"),
        ],
    )
    def test_folds_from_the_first(
        self,
        executor: flf.Executor,
        evaluate: Evaluate,
        values: list[int],
        expected: int,
    ) -> None:
        comp = federated_computation(
            lambda s: fl.sequence_reduce(s, 9, append_digit), INTS
        )

        assert evaluate(executor, comp, values) == expected

    def test_takes_lambdas_with_captured_values(
        self, executor: flf.Executor, evaluate: Evaluate
    ) -> None:
        @federated_computation(INTS, np.int32)
        def reduced(sequence: Any, offset: Any) -> Any:
            @federated_computation(np.int32, np.int32)
            def add(total: Any, x: Any) -> Any:
                return append_digit(append_digit(total, offset), x)

            return fl.sequence_reduce(sequence, 0, add)

        assert evaluate(executor, reduced, [1, 2], 7) == 7172

    def test_reads_datasets(self, executor: flf.Executor, evaluate: Evaluate) -> None:
        comp = federated_computation(
            lambda s: fl.sequence_reduce(s, 0, append_digit), INTS
        )

        dataset = tf.data.Dataset.range(1, 4, output_type=tf.int32)

        assert evaluate(executor, comp, dataset) == 123


class TestSum:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            pytest.param([(1, 0.5), (2, 1.5)], (3, 2.0), id="many"),
            pytest.param([(1, 0.5)], (1, 0.5), id="one"),
            pytest.param([], (0, 0.0), id="zeros of none"),
        ],
    )
    def test_adds_each_tensor(
        self,
        executor: flf.Executor,
        evaluate: Evaluate,
        values: list[Any],
        expected: tuple[Any, ...],
    ) -> None:
        comp = federated_computation(fl.sequence_sum, POINTS)

        result = evaluate(executor, comp, values)

        assert (result["z"], result["a"]) == expected

    def test_of_what_was_mapped(
        self, executor: flf.Executor, evaluate: Evaluate
    ) -> None:
        comp = federated_computation(
            lambda s: fl.sequence_sum(fl.sequence_map(increment, s)), INTS
        )

        assert evaluate(executor, comp, [1, 2]) == 5


class TestVerbs:
    """Everything that is no sequence intrinsic is the target's."""

    @pytest.fixture
    def sequences(self) -> SequenceExecutor:
        return SequenceExecutor(EagerTFExecutor())

    def test_values_calls_structs_and_selections_pass_through(
        self, sequences: SequenceExecutor
    ) -> None:
        async def act() -> Any:
            function = await sequences.create_value(increment)
            one = await sequences.create_value(1, INT)
            two = await sequences.create_call(function, one)
            struct = await sequences.create_struct({"one": one, "two": two})
            selected = await sequences.create_selection(struct, 1)
            return type(struct).__name__, await selected.compute()

        assert asyncio.run(act()) == ("EagerValue", 2)

    def test_an_intrinsic_has_no_value(self, sequences: SequenceExecutor) -> None:
        parameter = fl.StructType([increment.type_signature, INTS])
        intrinsic = flf.Intrinsic(
            flf.SEQUENCE_MAP.uri, fl.FunctionType(parameter, INTS)
        )

        async def compute() -> Any:
            return await (await sequences.create_value(intrinsic)).compute()

        with pytest.raises(TypeError, match="Expected a value to compute, found a"):
            asyncio.run(compute())

    def test_an_intrinsic_takes_an_argument(self, sequences: SequenceExecutor) -> None:
        intrinsic = flf.Intrinsic("sequence_sum", fl.FunctionType(INTS, INT))

        async def call() -> Any:
            return await sequences.create_call(await sequences.create_value(intrinsic))

        with pytest.raises(TypeError, match="Expected an argument"):
            asyncio.run(call())

    def test_errors_of_the_target_pass_through(
        self, sequences: SequenceExecutor
    ) -> None:
        block = flf.Reference("x", INT)

        with pytest.raises(errors.UnsupportedError, match="found `x`"):
            asyncio.run(sequences.create_value(block))
