"""Messages are loaded as functions of normal forms, without tf.data if possible."""

# pyright: reportUnknownLambdaType=false

import operator
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.plan import random_keys
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.loaded_functions import load_function

SEQUENCE = fl.SequenceType(np.int32)
POINTS = fl.SequenceType([("z", np.int32), ("a", np.int32)])


def test_functions_map_normal_forms_to_normal_forms() -> None:
    type_spec = fl.FunctionType(POINTS, [("last", np.int32), ("points", POINTS)])
    comp = rtf.computation(
        lambda ds: {
            "last": ds.reduce(0, lambda _, point: point["z"]),
            "points": ds.skip(1),
        },
        POINTS,
    )
    function = load_function(comp.to_proto().tensorflow, comp.type_signature, None)

    result = function(normal_forms.normalize([(1, 2), (3, 4)], POINTS))

    assert str(comp.type_signature) == str(type_spec)
    again = normal_forms.normalize(result, type_spec.result)
    assert all(map(operator.is_, result, again))
    assert normal_forms.normalize(function, type_spec) is function
    assert result.last.numpy() == 3


class TestSequenceArguments:
    """Functions of sequences run without tf.data where they can, else as written."""

    def load(
        self, fn: Any, *types: Any
    ) -> tuple[normal_forms.Executable, fl.FunctionType]:
        comp = rtf.computation(fn, *types)
        type_spec: Any = comp.type_signature
        message = comp.to_proto().tensorflow
        return load_function(message, type_spec, None), type_spec

    def test_held_sequences_need_no_dataset(self) -> None:
        function, _ = self.load(
            lambda ds: ds.batch(2).reduce(0, lambda s, x: s * 3 + tf.reduce_sum(x)),
            SEQUENCE,
        )
        held = normal_forms.normalize([1, 2, 3], SEQUENCE)

        result = function(held)

        assert function.unlowered is None
        assert result.numpy() == 12
        assert "dataset" not in vars(held)

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                lambda: tf.data.Dataset.from_tensor_slices([1, 2, 3]), id="dataset"
            ),
            pytest.param(lambda: iter([1, 2, 3]), id="iterator"),
        ],
    )
    def test_datasets_are_read_as_they_come(self, make: Callable[[], Any]) -> None:
        function, _ = self.load(
            lambda ds: ds.batch(2).reduce(0, lambda s, x: s * 3 + tf.reduce_sum(x)),
            SEQUENCE,
        )

        assert function(normal_forms.normalize(make(), SEQUENCE)).numpy() == 12

    def test_endless_datasets_are_read_as_far_as_needed(self) -> None:
        function, _ = self.load(
            lambda ds: ds.take(3).reduce(0, lambda s, x: s + x), SEQUENCE
        )
        endless = tf.data.Dataset.from_tensor_slices([1, 2]).repeat()

        assert function(normal_forms.normalize(endless, SEQUENCE)).numpy() == 4

    def test_one_dataset_among_held_sequences(self) -> None:
        function, type_spec = self.load(
            lambda x, y, z: (
                x.reduce(z, lambda s, v: s * 3 + v)
                + y.reduce(0, lambda s, v: s * 3 + v)
            ),
            SEQUENCE,
            SEQUENCE,
            np.int32,
        )
        parameter: Any = type_spec.parameter

        results = [
            function(normal_forms.normalize(value, parameter)).numpy()
            for value in (
                ([1], tf.data.Dataset.from_tensor_slices([2, 3]), 4),
                ([1], [2, 3], 4),
            )
        ]

        assert results == [13 + 9, 13 + 9]

    def test_what_cannot_do_without_datasets_says_why(self) -> None:
        function, _ = self.load(
            lambda ds: ds.flat_map(tf.data.Dataset.from_tensors).reduce(
                0, lambda s, x: s + x
            ),
            SEQUENCE,
        )

        assert function.unlowered == "FlatMapDataset"
        assert function(normal_forms.normalize([1, 2, 3], SEQUENCE)).numpy() == 6

    def test_functions_of_tensors_have_nothing_to_say(self) -> None:
        function, _ = self.load(lambda x: x + 1, np.int32)

        assert function.unlowered is None

    def test_draws_follow_the_key_and_not_the_call_before(self) -> None:
        function, _ = self.load(
            lambda ds: (
                ds.shuffle(10)
                .map(lambda x: x + tf.random.uniform([], 0, 1000, tf.int32))
                .reduce(0, lambda s, x: s * 31 + x)
            ),
            SEQUENCE,
        )
        held = normal_forms.normalize(list(range(8)), SEQUENCE)

        def call(seed: int) -> int:
            with random_keys.using(random_keys.DrawKey(seed, 0)):
                return int(function(held).numpy())

        assert call(1) == call(1) != call(2)
