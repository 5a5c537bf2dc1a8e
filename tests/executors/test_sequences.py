"""sequence_map, sequence_reduce and sequence_sum, with functions of any kind."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor
from tests.executor_calls import evaluate

flf = fl.framework
federated_computation: Callable[..., Any] = fl.federated_computation


INTS = fl.SequenceType(np.int32)
BATCHES = fl.SequenceType(fl.TensorType(np.float32, (None,)))


@rtf.computation(np.int32, np.int32)
def append_digit(number: Any, digit: Any) -> Any:
    return 10 * number + digit


@pytest.fixture
def executor() -> Iterator[flf.Executor]:
    executor = ReferenceResolvingExecutor(SequenceExecutor(EagerTFExecutor()))
    yield executor
    executor.close()


class TestMap:
    def test_calls_lambdas_with_captured_values(self, executor: flf.Executor) -> None:
        @federated_computation(INTS, np.int32, np.int32)
        def shifted(sequence: Any, unused: Any, digit: Any) -> Any:
            inner = federated_computation(lambda x: append_digit(x, digit), np.int32)
            return fl.sequence_map(inner, sequence)

        assert evaluate(executor, shifted, [1, 2], 0, 5) == [15, 25]

    def test_takes_batches_of_any_size(self, executor: flf.Executor) -> None:
        total = rtf.computation(lambda x: tf.reduce_sum(x, axis=0), BATCHES.element)
        comp = federated_computation(lambda s: fl.sequence_map(total, s), BATCHES)

        assert evaluate(executor, comp, [[1.0], [2.0, 3.0], []]) == [1.0, 5.0, 0.0]


class TestReduce:
    def test_takes_lambdas_with_captured_values(self, executor: flf.Executor) -> None:
        @federated_computation(INTS, np.int32)
        def reduced(sequence: Any, offset: Any) -> Any:
            @federated_computation(np.int32, np.int32)
            def add(total: Any, x: Any) -> Any:
                return append_digit(append_digit(total, offset), x)

            return fl.sequence_reduce(sequence, 0, add)

        assert evaluate(executor, reduced, [1, 2], 7) == 7172

    def test_reads_datasets(self, executor: flf.Executor) -> None:
        comp = federated_computation(
            lambda s: fl.sequence_reduce(s, 0, append_digit), INTS
        )

        dataset = tf.data.Dataset.range(1, 4, output_type=tf.int32)

        assert evaluate(executor, comp, dataset) == 123
