"""`computation`: its forms, what the traced function sees, and what it refuses."""

# pyright: reportUnknownLambdaType=false

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import federated_language as fl
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function  # no public name

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf

federated_computation: Callable[..., Any] = fl.federated_computation


class Point(NamedTuple):
    """Its fields are not in alphabetical order, on purpose."""

    z: Any
    a: Any


@attrs.define
class Record:
    z: Any
    a: Any


def ordered(z: Any, a: Any) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict(z=z, a=a)


def variable_of(value: Any) -> Any:
    return tf.Variable(value)


def sum_of(dataset: Any) -> Any:
    return dataset.reduce(tf.constant(0, tf.int32), lambda total, x: total + x)


def tens_and_ones(dataset: Any) -> Any:
    """Tell z from a: 10 z + a, summed."""
    return sum_of(dataset.map(lambda member: 10 * member["z"] + member["a"]))


class TestForms:
    def test_decorator_with_one_type(self) -> None:
        @rtf.computation(np.float32)
        def half(x: Any) -> Any:
            return x / 2

        assert str(half.type_signature) == "(float32 -> float32)"
        assert half(3.0) == 1.5

    def test_decorator_with_several_types_takes_the_names_of_the_function(self) -> None:
        @rtf.computation(np.int32, np.float32)
        def subtract(minuend: Any, subtrahend: Any) -> Any:
            return tf.cast(minuend, tf.float32) - subtrahend

        assert str(subtract.type_signature) == (
            "(<minuend=int32,subtrahend=float32> -> float32)"
        )
        assert subtract(3, 0.5) == 2.5

    def test_bare_decorator_on_a_function_of_no_arguments(self) -> None:
        @rtf.computation
        def ten() -> Any:
            return tf.constant(10)

        assert str(ten.type_signature) == "( -> int32)"
        assert ten() == 10

    def test_decorator_called_without_types(self) -> None:
        @rtf.computation()
        def ten() -> Any:
            return tf.constant(10)

        assert ten() == 10

    def test_wrapping_a_lambda_with_a_type(self) -> None:
        double = rtf.computation(lambda x: x * 2, np.int64)

        assert str(double.type_signature) == "(int64 -> int64)"
        assert double(2**40) == 2**41

    def test_wrapping_a_lambda_of_no_arguments(self) -> None:
        pi = rtf.computation(lambda: np.float64(np.pi))

        assert str(pi.type_signature) == "( -> float64)"
        assert pi() == np.pi

    def test_wrapping_a_tf_function(self) -> None:
        @tf.function
        def both(x: Any, y: Any) -> Any:
            return {"sum": x + y, "difference": x - y}

        comp = rtf.computation(both, np.int32, np.int32)

        assert str(comp.type_signature) == (
            "(<x=int32,y=int32> -> <sum=int32,difference=int32>)"
        )
        assert comp(3, 1) == {"sum": 4, "difference": 2}

    def test_wrapping_a_tf_function_of_no_arguments(self) -> None:
        comp = rtf.computation(tf.function(lambda: tf.constant(5)))

        assert comp() == 5

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            pytest.param((7, 2), {}, id="by position"),
            pytest.param((7,), {"y": 2}, id="one by name"),
            pytest.param((), {"y": 2, "x": 7}, id="all by name, in another order"),
        ],
    )
    def test_arguments_go_by_position_and_name(
        self, args: tuple[int, ...], kwargs: dict[str, int]
    ) -> None:
        @rtf.computation(np.int32, np.int32)
        def subtract(x: Any, y: Any) -> Any:
            return x - y

        assert subtract(*args, **kwargs) == 5

    def test_several_types_reach_a_function_of_one_argument_as_a_struct(self) -> None:
        comp = rtf.computation(lambda pair: pair[0] - pair[1], np.int32, np.int32)

        assert comp(7, 2) == 5


class TestPolymorphic:
    def test_traces_once_for_each_argument_type(self) -> None:
        traced: list[str] = []

        @rtf.computation
        def add(x: Any, y: Any) -> Any:
            traced.append(f"{x.dtype.name}")
            return x + y

        results = [add(1, 2), add(1.5, 2.0), add(3, 4), add(0.5, 0.5)]

        assert results == [3, 3.5, 7, 1.0]
        assert traced == ["int32", "float32"]

    def test_shapes_are_part_of_the_argument_type(self) -> None:
        traced: list[Any] = []

        @rtf.computation
        def total(x: Any) -> Any:
            traced.append(x.shape.as_list())
            return tf.reduce_sum(x)

        results = [total(np.ones(shape, np.float32)) for shape in [(2,), (3, 1), (2,)]]

        assert results == [2.0, 3.0, 2.0]
        assert traced == [[2], [3, 1]]

    def test_is_made_concrete_for_a_type_that_is_asked_for(self) -> None:
        @rtf.computation
        def identity(x: Any) -> Any:
            return x

        comp = identity.fn_for_argument_type(fl.TensorType(np.str_, (None,)))

        assert str(comp.type_signature) == "(str[?] -> str[?])"
        assert comp is identity.fn_for_argument_type(fl.TensorType(np.str_, (None,)))

    def test_tf_function_with_arguments_is_polymorphic(self) -> None:
        comp = rtf.computation(tf.function(lambda x: x + 1))

        assert [comp(1), comp(1.5)] == [2, 2.5]

    def test_takes_structures(self) -> None:
        @rtf.computation
        def select(member: Any) -> Any:
            return member["a"]

        assert select(ordered(z=1, a=2.5)) == 2.5


class TestContainers:
    @pytest.mark.parametrize(
        ("type_spec", "value", "expected"),
        [
            pytest.param(
                {"z": np.int32, "a": np.float32},
                {"a": 2.0, "z": 1},
                {"z": 1, "a": 2.0},
                id="dict",
            ),
            pytest.param(
                ordered(np.int32, np.float32),
                ordered(1, 2.0),
                ordered(1, 2.0),
                id="OrderedDict",
            ),
            pytest.param(
                Point(np.int32, np.float32),
                Point(1, 2.0),
                Point(1, 2.0),
                id="namedtuple",
            ),
            pytest.param(
                Record(np.int32, np.float32), Record(1, 2.0), Record(1, 2.0), id="attrs"
            ),
            pytest.param([np.int32, np.float32], [1, 2.0], [1, 2.0], id="list"),
            pytest.param((np.int32, np.float32), (1, 2.0), (1, 2.0), id="tuple"),
            pytest.param([], [], [], id="empty list"),
        ],
    )
    def test_are_kept_from_argument_to_result(
        self, type_spec: Any, value: Any, expected: Any
    ) -> None:
        seen: list[type[Any]] = []

        @rtf.computation(fl.to_type(type_spec))
        def identity(x: Any) -> Any:
            seen.append(type(x))
            return x

        result = identity(value)

        assert result == expected
        assert type(result) is type(expected)
        assert seen == [type(expected)]

    def test_nest(self) -> None:
        @rtf.computation({"points": [Point(np.int32, np.int32), (np.str_,)]})
        def swap(x: Any) -> Any:
            point, (name,) = x["points"]
            return (name, {"point": Point(z=point.a, a=point.z)})

        result = swap({"points": [Point(1, 2), ("p",)]})

        assert str(swap.type_signature.result) == "<str,<point=<z=int32,a=int32>>>"
        assert result == (b"p", {"point": Point(z=2, a=1)})

    def test_a_type_without_one_is_a_struct_with_fields(self) -> None:
        inner = fl.StructType([np.int32, np.int32])

        @rtf.computation(fl.StructType([("z", inner), ("a", np.int32)]))
        def combine(x: Any) -> Any:
            return 100 * x.z[0] + 10 * x.z[1] + x.a

        assert combine(ordered((1, 2), 3)) == 123

    def test_a_result_may_hold_what_tensorflow_converts(self) -> None:
        comp = rtf.computation(lambda: (1, 2.5, True, "x", np.int64(3), [np.eye(2)]))

        assert str(comp.type_signature) == (
            "( -> <int32,float32,bool,str,int64,<float64[2,2]>>)"
        )
        one, half, yes, text, three, [eye] = comp()
        assert (one, half, yes, text, three) == (1, 2.5, True, b"x", 3)
        np.testing.assert_array_equal(eye, np.eye(2))


class TestSequences:
    def test_the_function_sees_a_dataset(self) -> None:
        seen: list[Any] = []

        @rtf.computation(fl.SequenceType(np.int32))
        def total(dataset: Any) -> Any:
            seen.append(dataset)
            return sum_of(dataset)

        assert total([1, 2, 3]) == 6
        assert total(tf.data.Dataset.range(4, output_type=tf.int32)) == 6
        assert str(total.type_signature) == "(int32* -> int32)"
        assert isinstance(seen[0], tf.data.Dataset)

    @pytest.mark.parametrize(
        "type_spec",
        [
            pytest.param({"z": np.int32, "a": np.int32}, id="dict"),
            pytest.param(ordered(np.int32, np.int32), id="OrderedDict"),
            pytest.param(
                fl.StructType([("z", np.int32), ("a", np.int32)]), id="struct"
            ),
        ],
    )
    def test_fields_keep_their_values_whatever_their_order(
        self, type_spec: Any
    ) -> None:
        comp = rtf.computation(tens_and_ones, fl.SequenceType(type_spec))

        assert comp([{"z": 1, "a": 2}, {"a": 4, "z": 3}]) == 46

    @pytest.mark.parametrize(
        ("container", "elements"),
        [
            pytest.param(Point, [Point(1, 2), Point(3, 4)], id="namedtuple"),
            pytest.param(Record, [Record(1, 2), Record(3, 4)], id="attrs"),
        ],
    )
    def test_elements_are_in_the_containers_of_their_type(
        self, container: type[Any], elements: list[Any]
    ) -> None:
        @rtf.computation(fl.SequenceType(container(np.int32, np.int32)))
        def swap(dataset: Any) -> Any:
            assert type(dataset.element_spec) is container
            return dataset.map(lambda e: container(z=e.a, a=e.z))

        result = swap(elements)

        assert str(swap.type_signature) == (
            "(<z=int32,a=int32>* -> <z=int32,a=int32>*)"
        )
        assert result == [container(e.a, e.z) for e in elements]

    def test_tuples_go_by_position(self) -> None:
        @rtf.computation(fl.SequenceType((np.int32, (np.int32, np.int32))))
        def total(dataset: Any) -> Any:
            return sum_of(dataset.map(lambda x, yz: 100 * x + 10 * yz[0] + yz[1]))

        assert total([(1, (2, 3)), (4, (5, 6))]) == 123 + 456

    def test_a_tuple_of_one_keeps_its_container(self) -> None:
        element = (Point(np.int32, np.int32),)
        comp = rtf.computation(lambda dataset: dataset, fl.SequenceType(element))

        assert comp([(Point(1, 2),)]) == [(Point(1, 2),)]

    def test_batches_have_an_unknown_leading_dimension(self) -> None:
        seen: list[Any] = []

        @rtf.computation(
            fl.SequenceType(ordered(fl.TensorType(np.float32, (None, 2)), np.int32))
        )
        def sums(dataset: Any) -> Any:
            seen.append(dataset.element_spec["z"].shape.as_list())
            return dataset.map(lambda e: tf.reduce_sum(e["z"], axis=0))

        result = sums([ordered([[1.0, 2.0], [3.0, 4.0]], 1), ordered([[5.0, 6.0]], 2)])

        assert str(sums.type_signature.result) == "float32[2]*"
        np.testing.assert_array_equal(result, [[4.0, 6.0], [5.0, 6.0]])
        assert seen == [[None, 2]]

    def test_a_result_may_be_batched(self) -> None:
        comp = rtf.computation(lambda ds: ds.batch(2), fl.SequenceType(np.int64))

        result = comp([1, 2, 3])

        assert str(comp.type_signature) == "(int64* -> int64[?]*)"
        assert [list(batch) for batch in result] == [[1, 2], [3]]

    def test_empty_sequences_stay_sequences(self) -> None:
        comp = rtf.computation(
            lambda ds: (sum_of(ds), ds.map(lambda x: x + 1)), fl.SequenceType(np.int32)
        )

        assert comp([]) == (0, [])


class TestState:
    @pytest.mark.claim("semantics.04", "eager_tf.23")
    def test_variables_start_afresh_on_every_call(self) -> None:
        @rtf.computation(np.int32)
        def count(x: Any) -> Any:
            variable = variable_of(10)
            variable.assign_add(x)
            variable.assign(variable * 2)
            return variable.read_value()

        assert [count(1), count(1), count(2)] == [22, 22, 24]

    def test_a_variable_may_be_returned(self) -> None:
        @rtf.computation(np.int32)
        def both(x: Any) -> Any:
            variable = variable_of(tf.zeros([2], tf.int32))
            variable.assign_add([x, -x])
            return variable, [variable]

        first, [second] = both(3)

        assert str(both.type_signature.result) == "<int32[2],<int32[2]>>"
        assert (list(first), list(second)) == ([3, -3], [3, -3])

    def test_a_variable_may_start_from_an_argument(self) -> None:
        @rtf.computation(np.float32)
        def square(x: Any) -> Any:
            variable = variable_of(x)
            variable.assign(variable * variable)
            return variable.read_value()

        assert [square(3.0), square(4.0)] == [9.0, 16.0]

    def test_a_tf_function_may_create_its_variable(self) -> None:
        class Counter(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.total: Any = None

            @tf.function
            def __call__(self, x: Any) -> Any:
                if self.total is None:
                    self.total = variable_of(5)
                return self.total.assign_add(x)

        counter = Counter()
        comp = rtf.computation(counter.__call__, np.int32)

        assert [comp(1), comp(1)] == [6, 6]

    @pytest.mark.claim("semantics.04")
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                lambda: tf.lookup.experimental.MutableHashTable(
                    tf.string, tf.int64, -1
                ),
                id="MutableHashTable",
            ),
            pytest.param(
                lambda: tf.lookup.experimental.DenseHashTable(
                    tf.string, tf.int64, tf.constant(-1, tf.int64), "", "deleted"
                ),
                id="DenseHashTable",
            ),
        ],
    )
    def test_mutable_tables_start_empty_on_every_call(
        self, make: Callable[[], Any]
    ) -> None:
        @rtf.computation(np.str_)
        def insert(key: Any) -> Any:
            table = make()
            before = table.size()
            table.insert(key, tf.constant(7, tf.int64))
            return before, table.lookup(key), table.size()

        assert [insert("a"), insert("b")] == [(0, 7, 1), (0, 7, 1)]

    def test_static_tables_are_initialized(self) -> None:
        @rtf.computation(fl.TensorType(np.str_, (2,)))
        def look_up(keys: Any) -> Any:
            pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
            return tf.lookup.StaticHashTable(pairs, -1).lookup(keys)

        assert [list(look_up(["b", "a"])), list(look_up(["x", "b"]))] == [
            [2, 1],
            [-1, 2],
        ]

    def test_keras_layers_may_be_built_inside(self) -> None:
        @rtf.computation(fl.TensorType(np.float32, (None, 3)))
        def dense(x: Any) -> Any:
            return keras.layers.Dense(2, kernel_initializer="ones")(x)

        result = dense(np.ones((4, 3), np.float32))

        assert str(dense.type_signature) == "(float32[?,3] -> float32[?,2])"
        np.testing.assert_array_equal(result, np.full((4, 2), 3.0))

    def test_effects_happen_in_the_order_they_are_written(self) -> None:
        @rtf.computation(np.int32)
        def steps(x: Any) -> Any:
            variable = variable_of(0)
            read: list[Any] = []
            for factor in (1, 10, 100):
                variable.assign(variable + factor * x)
                read.append(variable.read_value())
            return read

        assert steps(2) == [2, 22, 222]


@rtf.computation(np.int32)
def counted(x: Any) -> Any:
    """Adds a variable, to see that each call has its own."""
    variable = variable_of(100)
    variable.assign_add(x)
    return variable.read_value()


@rtf.computation(Point(np.int32, np.int32))
def swap_point(point: Any) -> Any:
    return Point(z=point.a, a=point.z)


@rtf.computation(fl.SequenceType(Point(np.int32, np.int32)))
def swap_points(dataset: Any) -> Any:
    return dataset.map(lambda point: Point(z=point.a, a=point.z))


class TestCallsInside:
    @pytest.mark.claim("semantics.06")
    def test_each_call_has_variables_of_its_own(self) -> None:
        comp = rtf.computation(lambda x: counted(x) + 1000 * counted(x + 1), np.int32)

        assert [comp(1), comp(1)] == [102101, 102101]

    def test_the_caller_may_have_variables_too(self) -> None:
        @rtf.computation(np.int32)
        def outer(x: Any) -> Any:
            variable = variable_of(1)
            variable.assign_add(counted(x))
            return variable.read_value()

        nested = rtf.computation(lambda x: outer(x) + counted(x), np.int32)

        assert [outer(5), outer(5)] == [106, 106]
        assert [nested(5), nested(5)] == [211, 211]

    def test_a_call_may_stand_in_control_flow(self) -> None:
        @rtf.computation(np.int32)
        def repeat(times: Any) -> Any:
            total = tf.constant(0)
            for index in tf.range(times):
                if index > 0:
                    total += counted(index)
            return total

        assert repeat(3) == 101 + 102

    def test_a_call_may_stand_in_a_dataset_function(self) -> None:
        comp = rtf.computation(
            lambda ds: sum_of(ds.map(counted)), fl.SequenceType(np.int32)
        )

        assert comp([1, 2]) == 203

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda: swap_point(Point(1, 2)), id="one struct"),
            pytest.param(lambda: swap_point(1, 2), id="by position"),
            pytest.param(lambda: swap_point(a=2, z=1), id="by name"),
            pytest.param(lambda: swap_point(tf.constant(1), 2), id="tensor and number"),
        ],
    )
    def test_containers_are_kept(self, call: Callable[[], Any]) -> None:
        comp = rtf.computation(call)

        assert comp() == Point(z=2, a=1)

    def test_datasets_go_in_and_out_with_their_fields(self) -> None:
        @rtf.computation(fl.SequenceType(Point(np.int32, np.int32)))
        def tens(dataset: Any) -> Any:
            swapped = swap_points(swap_points(swap_points(dataset)))
            return swapped.map(lambda point: 10 * point.z + point.a)

        assert tens([Point(1, 2), Point(3, 4)]) == [21, 43]

    def test_shapes_of_results_are_known(self) -> None:
        @rtf.computation(np.str_)
        def look_up(key: Any) -> Any:
            pairs = tf.lookup.KeyValueTensorInitializer(["a"], [1])
            return tf.lookup.StaticHashTable(pairs, -1).lookup(key)

        comp = rtf.computation(lambda key: look_up(key) + look_up("x"), np.str_)

        assert str(comp.type_signature) == "(str -> int32)"
        assert comp("a") == 0

    @pytest.mark.parametrize(
        "argument",
        [
            pytest.param(lambda: np.int64(1), id="another dtype"),
            pytest.param(lambda: 1.5, id="a float"),
            pytest.param(lambda: tf.constant(1.0), id="a float tensor"),
            pytest.param(lambda: tf.constant([1, 2]), id="another shape"),
            pytest.param(lambda: "1", id="a string"),
        ],
    )
    def test_arguments_are_not_cast(self, argument: Callable[[], Any]) -> None:
        with pytest.raises(
            errors.ValueMismatchError, match=r"Expected .* type `int32`"
        ):
            rtf.computation(lambda: counted(argument()))

    def test_a_list_is_no_sequence_there(self) -> None:
        with pytest.raises(errors.ValueMismatchError, match="Expected a value of type"):
            rtf.computation(lambda: swap_points([Point(1, 2)]))

    def test_a_federated_computation_is_refused(self) -> None:
        @federated_computation(np.int32)
        def federated(x: Any) -> Any:
            return x

        with pytest.raises(
            errors.ContextStateError, match="only TensorFlow computations"
        ):
            rtf.computation(lambda x: federated(x), np.int32)  # noqa: PLW0108


class TestAutograph:
    def test_converts_for_over_a_tensor(self) -> None:
        @rtf.computation(np.int32)
        def alternate(n: Any) -> Any:
            total = 0
            for index in tf.range(n):
                if index % 2 == 0:
                    total += index
                else:
                    total -= index
            return total

        assert alternate(5) == 0 - 1 + 2 - 3 + 4

    def test_converts_for_over_a_dataset(self) -> None:
        @rtf.computation(fl.SequenceType(np.int32))
        def large(dataset: Any) -> Any:
            total = tf.constant(0)
            for x in dataset:
                if x > 2:
                    total += x
            return total

        assert large([1, 2, 3, 4]) == 7

    def test_converts_while(self) -> None:
        @rtf.computation(np.int32)
        def halvings(x: Any) -> Any:
            count = tf.constant(0)
            while x > 1:
                x //= 2
                count += 1
            return count

        assert [halvings(1), halvings(1024)] == [0, 10]

    def test_converts_if(self) -> None:
        @rtf.computation(np.float32)
        def magnitude(x: Any) -> Any:
            if x < 0:
                x = -x
            return x

        assert [magnitude(-2.0), magnitude(3.0)] == [2.0, 3.0]


class TestEquality:
    """In a plain graph TensorFlow would compare tensors by identity."""

    @pytest.mark.parametrize(
        "comp",
        [
            pytest.param(
                rtf.computation(lambda x: (x == 1, x != 1), np.int32), id="function"
            ),
            pytest.param(
                rtf.computation(tf.function(lambda x: (x == 1, x != 1)), np.int32),
                id="tf.function",
            ),
            pytest.param(
                rtf.computation(
                    lambda x: tf.cond(
                        x > -1, lambda: (x == 1, x != 1), lambda: (x == 9, x != 9)
                    ),
                    np.int32,
                ),
                id="branch",
            ),
        ],
    )
    def test_compares_elements(self, comp: Any) -> None:
        assert [comp(1), comp(2)] == [(True, False), (False, True)]

    def test_compares_elements_in_dataset_functions(self) -> None:
        comp = rtf.computation(
            lambda ds: (ds.map(lambda x: x == 2), ds.filter(lambda x: x != 2)),
            fl.SequenceType(np.int32),
        )

        assert comp([1, 2, 3]) == ([False, True, False], [1, 3])

    def test_compares_variables(self) -> None:
        @rtf.computation(np.int32)
        def compare(x: Any) -> Any:
            variable = variable_of(5)
            return variable == x, variable != x

        assert [compare(5), compare(6)] == [(True, False), (False, True)]

    def test_control_dependencies_hold_for_a_computation_that_is_called(self) -> None:
        inner = rtf.computation(lambda x: x + 1, np.int32)

        @rtf.computation(np.int32)
        def outer(x: Any) -> Any:
            with tf.control_dependencies([tf.debugging.assert_positive(x)]):
                return inner(x)

        assert outer(2) == 3
        with pytest.raises(tf.errors.InvalidArgumentError, match="x > 0"):
            outer(-1)

    def test_nothing_equals_none(self) -> None:
        comp = rtf.computation(lambda x: (x == None, x != None), np.int32)  # noqa: E711

        assert comp(1) == (False, True)

    def test_other_tensors_keep_the_operators_of_tensorflow(self) -> None:
        before = (tf.Tensor.__eq__, tf.Variable.__ne__)
        inside: list[Any] = []

        @rtf.computation(np.int32)
        def look(x: Any) -> Any:
            with tf.init_scope(), tf.Graph().as_default():
                other = tf.compat.v1.placeholder(tf.int32, [])
                inside.append((other == 1, other != 1))
            return x

        assert look(1) == 1
        assert inside == [(False, True)]
        assert (tf.Tensor.__eq__, tf.Variable.__ne__) == before
        assert bool(tf.constant(1) == 1)


class TestTypes:
    @pytest.mark.claim("semantics.19", "semantics.20")
    @pytest.mark.parametrize(
        ("dtype", "value", "expected"),
        [
            pytest.param(np.str_, "ä\0", b"\xc3\xa4\x00", id="str"),
            pytest.param(np.str_, b"\xff\x00", b"\xff\x00", id="bytes"),
            pytest.param(np.bool_, True, True, id="bool"),
            pytest.param(np.uint8, 255, 255, id="uint8"),
            pytest.param(np.int64, 2**40, 2**40, id="int64"),
            pytest.param(np.float16, 0.5, 0.5, id="float16"),
            pytest.param(np.float64, 1e-300, 1e-300, id="float64"),
            pytest.param(ml_dtypes.bfloat16, 1.5, 1.5, id="bfloat16"),
            pytest.param(np.complex64, 1 + 2j, 1 + 2j, id="complex64"),
            pytest.param(np.complex128, 1e-300j, 1e-300j, id="complex128"),
        ],
    )
    def test_dtypes_pass_unchanged(self, dtype: Any, value: Any, expected: Any) -> None:
        comp = rtf.computation(lambda x: tf.stack([x, x])[0], dtype)

        result = comp(value)

        assert comp.type_signature.result == fl.TensorType(dtype)
        assert result == expected
        assert isinstance(result, bytes) or result.dtype == np.dtype(dtype)

    def test_unknown_dimensions(self) -> None:
        comp = rtf.computation(
            lambda x: tf.concat([x, x], 0), fl.TensorType(np.int32, (None, 2))
        )

        assert str(comp.type_signature) == "(int32[?,2] -> int32[?,2])"
        assert comp([[1, 2]]).tolist() == [[1, 2], [1, 2]]

    def test_unknown_rank(self) -> None:
        comp = rtf.computation(lambda x: tf.rank(x) + 0, fl.TensorType(np.int32, None))

        assert [comp(5), comp([[1, 2]])] == [0, 2]

    @pytest.mark.claim("semantics.19", "semantics.21")
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            pytest.param(tf.float32, "float32", id="DType"),
            pytest.param(tf.string, "str", id="string DType"),
            pytest.param(tf.bfloat16, "bfloat16", id="bfloat16 DType"),
            pytest.param((tf.int64, [None, 2]), "int64[?,2]", id="DType and shape"),
            pytest.param(
                (np.int64, tf.TensorShape([2])), "int64[2]", id="dtype and TensorShape"
            ),
            pytest.param(tf.TensorSpec([None], tf.bool), "bool[?]", id="TensorSpec"),
            pytest.param(
                tf.data.DatasetSpec(tf.TensorSpec([], tf.int32)),
                "int32*",
                id="DatasetSpec",
            ),
            pytest.param(
                tf.data.DatasetSpec(Record(tf.TensorSpec([]), tf.TensorSpec([2]))),
                "<z=float32,a=float32[2]>*",
                id="DatasetSpec of attrs",
            ),
            pytest.param(
                {"z": tf.int32, "a": [tf.string, Point(tf.bool, np.int8)]},
                "<z=int32,a=<str,<z=bool,a=int8>>>",
                id="nested",
            ),
        ],
    )
    def test_specifications_of_tensorflow_are_types(
        self, spec: Any, expected: str
    ) -> None:
        comp = rtf.computation(lambda _: tf.constant(0), spec)

        assert str(comp.type_signature.parameter) == expected

    def test_containers_of_specifications_are_kept(self) -> None:
        comp = rtf.computation(
            lambda x: x, Record(tf.int32, tf.TensorSpec([], tf.bool))
        )

        assert comp(Record(1, True)) == Record(1, True)


class TestRefusals:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: tf.ragged.constant([[1], [2, 3]]), id="ragged"),
            pytest.param(lambda: {"x": tf.ragged.constant([[1]])}, id="ragged inside"),
            pytest.param(lambda: tf.sparse.from_dense([0, 1]), id="sparse"),
            pytest.param(
                lambda: tf.data.Dataset.from_tensors(tf.ragged.constant([[1]])),
                id="dataset of ragged",
            ),
        ],
    )
    def test_results_are_dense(self, make: Callable[[], Any]) -> None:
        with pytest.raises(
            TypeError, match=r"Expected dense tensors, found `(Ragged|Sparse)Tensor"
        ):
            rtf.computation(make)

    def test_parameters_are_dense(self) -> None:
        with pytest.raises(TypeError, match="Expected dense tensors"):
            rtf.computation(lambda x: x, tf.RaggedTensorSpec([None, None], tf.int32))

    @pytest.mark.parametrize("true", [True, np.True_])
    def test_truth_is_no_size_though_a_type_of_size_one_is_alive(
        self, true: Any
    ) -> None:
        alive = fl.TensorType(np.int32, [1])

        with pytest.raises(
            errors.ValueMismatchError, match=r"Expected .* sizes .*, found \[.*True"
        ):
            rtf.computation(lambda x: x, (np.int32, [true]))
        assert alive.compact_representation() == "int32[1]"

    @pytest.mark.parametrize(
        "result",
        [
            pytest.param(object(), id="object"),
            pytest.param(len, id="function"),
            pytest.param([1, object()], id="inside a list"),
        ],
    )
    def test_results_have_a_federated_type(self, result: Any) -> None:
        with pytest.raises(TypeError, match="Expected tensors, numpy values"):
            rtf.computation(lambda: result)

    def test_a_computation_is_no_result(self) -> None:
        with pytest.raises(TypeError, match="Expected a result made of tensors"):
            rtf.computation(lambda: counted)

    @pytest.mark.parametrize(
        "type_spec",
        [
            pytest.param(fl.FunctionType(np.int32, np.int32), id="function"),
            pytest.param(fl.FederatedType(np.int32, fl.CLIENTS), id="federated"),
            pytest.param(fl.StructType([fl.PlacementType()]), id="placement inside"),
        ],
    )
    def test_parameters_are_tensors_and_sequences(self, type_spec: fl.Type) -> None:
        with pytest.raises(TypeError, match="Expected a parameter made of tensors"):
            rtf.computation(lambda x: x, type_spec)

    def test_names_are_for_all_elements_of_a_sequence_or_for_none(self) -> None:
        element = fl.StructType([("x", np.int32), np.int32])

        with pytest.raises(TypeError, match="all elements or none to have names"):
            rtf.computation(lambda x: x, fl.SequenceType(element))

    def test_none_is_no_result(self) -> None:
        with pytest.raises(ValueError, match="returned `None`"):
            rtf.computation(lambda _: None, np.int32)

    @pytest.mark.parametrize(
        ("fn", "types"),
        [
            pytest.param(lambda: 1, [np.int32], id="one type, no parameter"),
            pytest.param(
                lambda x, y: (x, y), [np.int32], id="one type, two parameters"
            ),
            pytest.param(
                lambda x, y: (x, y), [np.int32] * 3, id="three types, two parameters"
            ),
        ],
    )
    def test_types_and_parameters_are_as_many(
        self, fn: Callable[..., Any], types: list[Any]
    ) -> None:
        with pytest.raises(TypeError, match="parameter"):
            rtf.computation(fn, *types)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            pytest.param((), {}, id="none"),
            pytest.param((1,), {}, id="too few"),
            pytest.param((1, 2, 3), {}, id="too many"),
            pytest.param((1,), {"z": 2}, id="unknown name"),
        ],
    )
    def test_calls_pass_what_is_declared(
        self, args: tuple[int, ...], kwargs: dict[str, int]
    ) -> None:
        comp = rtf.computation(lambda x, y: x + y, np.int32, np.int32)

        with pytest.raises(TypeError):
            comp(*args, **kwargs)

    def test_an_error_of_the_function_is_raised_as_it_is(self) -> None:
        def fail(x: Any) -> Any:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            rtf.computation(fail, np.int32)


class TestMessage:
    def test_is_read_back_by_federated_language(self) -> None:
        comp = rtf.computation(lambda x, y: x + y, np.int32, np.int32)

        block = fl.framework.ComputationBuildingBlock.from_proto(comp.to_proto())

        assert isinstance(block, fl.framework.CompiledComputation)
        assert block.type_signature == fl.FunctionType(
            [("x", np.int32), ("y", np.int32)], np.int32
        )

    def test_binds_parameter_and_result_to_tensors(self) -> None:
        comp = rtf.computation(
            lambda x, ds: {"r": [x, ds]}, np.int32, fl.SequenceType(np.int32)
        )

        message = comp.to_proto().tensorflow

        number, sequence = message.parameter.struct.element
        assert number.tensor.tensor_name.endswith(":0")
        assert sequence.sequence.variant_tensor_name.endswith(":0")
        assert len(message.result.struct.element[0].struct.element) == 2
        assert not message.initialize_op

    def test_names_the_initialization_where_there_is_one(self) -> None:
        message = counted.to_proto().tensorflow

        assert message.initialize_op == "initialize"

    def test_runs_after_a_journey_as_bytes(self) -> None:
        proto = counted.to_proto()
        copied = type(proto).FromString(proto.SerializeToString())

        comp = fl.framework.ConcreteComputation.from_proto(copied)

        assert comp(5) == 105

    def test_is_the_same_for_the_same_function(self) -> None:
        def trace() -> bytes:
            comp = rtf.computation(lambda x: x * 2 + 1, np.float32)
            return comp.to_proto().SerializeToString(deterministic=True)

        assert trace() == trace()

    def test_a_federated_computation_takes_it(self) -> None:
        @federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
        def mapped(values: Any) -> Any:
            return fl.federated_map(counted, values)

        assert str(mapped.type_signature) == "({int32}@CLIENTS -> {int32}@CLIENTS)"


def test_functions_that_are_called_by_their_names_run_everywhere(
    leaf_context: Any,
) -> None:
    """TensorFlow 1 wrote calls as ops of a function's name; `tf.nn.ctc_loss` does."""

    defun: Any = function.Defun

    @defun(tf.float32, tf.float32, func_name="swapped")
    def swapped(x: Any, y: Any) -> Any:
        return y, x

    @defun(tf.float32, tf.float32, func_name="nested")
    def nested(x: Any, y: Any) -> Any:
        first, second = swapped(x, y)
        return 10.0 * first + second

    @rtf.computation(fl.SequenceType(np.float32))
    def calls(numbers: Any) -> Any:
        outside = nested(tf.constant(1.0), tf.constant(2.0))
        mapped = numbers.map(lambda x: nested(x, x + 1.0))
        total = mapped.reduce(0.0, lambda total, x: swapped(x, total)[0] + x)
        in_a_loop = tf.constant(0.0)
        for _ in tf.range(2):
            in_a_loop = tf.ensure_shape(nested(in_a_loop, in_a_loop + 1.0), [])
        return outside, total, in_a_loop

    @rtf.computation(fl.SequenceType(np.float32))
    def calls_both(numbers: Any) -> Any:
        return calls(numbers), calls(numbers)

    expected = [21.0, 21.0 + 32.0, 10.0 * 11.0 + 10.0]
    assert calls([1.0, 2.0]) == tuple(expected)
    assert tf.nest.flatten(calls_both([1.0, 2.0])) == 2 * expected
