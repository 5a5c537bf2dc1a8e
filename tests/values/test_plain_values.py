"""Values at the edge: what is taken, what is refused, what comes back."""

# pyright: reportUnknownLambdaType=false

import array
import collections
import ctypes
import dataclasses
import math
import mmap
import pickle
from typing import Any, NamedTuple

import attrs
import federated_language as fl
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.language.structs import Struct
from ray_fed.values import columnar_sequence, tensor_structures
from ray_fed.values.stored import Stored, StoredClients

AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)
POINT = fl.StructWithPythonType([("x", np.int32), ("y", np.float32)], dict)


class Pair(NamedTuple):
    x: int
    y: float


@attrs.define
class AttrsPair:
    x: int
    y: float


@dataclasses.dataclass
class DataPair:
    x: int
    y: float


class FakeTensor:
    """What an eager tensor shows of itself."""

    dtype = np.dtype(np.int32)

    def numpy(self) -> Any:
        return np.int32(4)


class SymbolicTensor:
    """What a tensor of a graph shows of itself."""

    dtype = np.dtype(np.int32)

    def numpy(self) -> Any:
        raise NotImplementedError("no value")

    @override
    def __repr__(self) -> str:
        return "symbolic"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, np.int32),
        (255, np.uint8),
        (3, np.float32),
        (2.5, np.float32),
        (0.1, np.float32),
        (math.inf, np.float32),
        (2.5, np.complex64),
        (2, ml_dtypes.bfloat16),
        (True, np.bool_),
        (np.int32(3), np.int32),
        (FakeTensor(), np.int32),
    ],
)
def test_number_takes_the_declared_dtype(value: Any, dtype: Any) -> None:
    taken = plain_values.to_plain(value, fl.TensorType(dtype))

    assert taken.dtype == np.dtype(dtype)
    assert taken.shape == ()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, np.int32),
        (256, np.uint8),
        (-1, np.uint8),
        (2**24 + 1, np.float32),
        (1e300, np.float32),
        (1, np.bool_),
        (True, np.int32),
        (1j, np.float32),
        (2**70, np.int64),
        (np.float64(1), np.float32),
        (np.int64(1), np.int32),
        ("1", np.int32),
        ("1", np.complex64),
        (None, np.float32),
        (None, np.complex64),
        (object(), np.int32),
        ({"a": 1}, np.int32),
        (1, np.str_),
    ],
)
def test_value_that_is_not_of_the_tensor_type_is_refused(
    value: Any, dtype: Any
) -> None:
    with pytest.raises(errors.ValueMismatchError, match="the value"):
        plain_values.to_plain(value, fl.TensorType(dtype))


class Wrapped:
    """What an array of another library shows of itself."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._held


def _mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, 4)
    memory.write(b"abcd")
    return memory


RAW_MEMORY = {
    "bytes": b"abcd",
    "bytearray": bytearray(b"abcd"),
    "empty bytearray": bytearray(),
    "memoryview": memoryview(b"abcd"),
    "memoryview of floats": memoryview(array.array("d", [1.0, 2.0, 3.0, 4.0])),
    "array.array": array.array("d", [1.0, 2.0, 3.0, 4.0]),
    "array.array of the type": array.array("i", [1, 2, 3, 4]),
    "mmap": _mapped(),
    "ctypes": (ctypes.c_double * 4)(1, 2, 3, 4),
}
NO_NUMBERS = {
    **RAW_MEMORY,
    "str": "1234",
    "set": {1, 2, 3, 4},
    "frozenset": frozenset({1, 2, 3, 4}),
    "keys": {1: 0, 2: 0, 3: 0, 4: 0}.keys(),
    "values": {0: 1, 1: 2, 2: 3, 3: 4}.values(),
    "items": {1: 2, 3: 4}.items(),
    "mapping": {0: 1, 1: 2, 2: 3, 3: 4},
    "void": np.void(b"abcdabcdabcdabcd"),
    "record": np.array([(1, 2.0)], [("x", "i4"), ("y", "f4")])[0],
    "iterator": iter([1, 2, 3, 4]),
    "array of another library": Wrapped(np.arange(4, dtype=np.float64)),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_has_no_numbers_of_its_own_is_no_tensor(value: Any) -> None:
    for nested in (value, ([value, value],)):
        for dtype in (np.float32, np.uint8):
            with pytest.raises(errors.ValueMismatchError):
                plain_values.to_plain(nested, fl.TensorType(dtype, None))


def test_memory_is_no_text_but_bytes() -> None:
    text = fl.TensorType(np.str_, None)

    for value in RAW_MEMORY.values():
        if isinstance(value, bytes):
            assert plain_values.to_plain(value, text) == value
        else:
            with pytest.raises(errors.ValueMismatchError):
                plain_values.to_plain(value, text)


@pytest.mark.parametrize(
    "type_spec",
    [fl.SequenceType(np.int32), AT_CLIENTS, fl.StructType([np.int32] * 4)],
    ids=str,
)
def test_what_is_no_list_has_no_members(type_spec: fl.Type) -> None:
    for name in (*RAW_MEMORY, "str", "set", "frozenset"):
        with pytest.raises(errors.ValueMismatchError):
            plain_values.to_plain(NO_NUMBERS[name], type_spec)


@pytest.mark.parametrize("nest", [list, lambda x: [x, x], lambda x: [[y] for y in x]])
def test_arrays_in_lists_are_taken_but_not_cast(nest: Any) -> None:
    floats = fl.TensorType(np.float32, None)
    of_type = np.arange(4, dtype=np.float32)

    taken = plain_values.to_plain(nest(of_type), floats)

    np.testing.assert_array_equal(taken, np.array(nest(of_type.tolist())))
    for found in (np.float64, np.uint8):
        with pytest.raises(errors.ValueMismatchError, match="it is not cast"):
            plain_values.to_plain(nest(np.arange(4).astype(found)), floats)


def test_overflow_beside_a_nan_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError):
        plain_values.to_plain([math.nan, 1e300], fl.TensorType(np.float32, (2,)))


def test_mismatch_says_what_was_expected_and_found() -> None:
    with pytest.raises(errors.ValueMismatchError) as caught:
        plain_values.to_plain(1.5, fl.TensorType(np.int32), "argument `x`")

    assert str(caught.value) == (
        "Expected argument `x` to be of type `int32`, found `1.5` of Python type"
        " `float`: it is not cast, so convert it first."
    )


def test_symbolic_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(errors.ValueMismatchError, match="outside of TensorFlow graphs"):
        plain_values.to_plain(SymbolicTensor(), fl.TensorType(np.int32))


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([1, 2, 3], (3,)),
        ([[1], [2]], (2, 1)),
        ([1, 2, 3], (None,)),
        ([[1, 2]], None),
        ([], (0,)),
        (np.zeros((2, 3), np.int32), (None, 3)),
    ],
)
def test_array_of_the_declared_shape_is_taken(
    value: Any, shape: columnar_sequence.Dims
) -> None:
    taken = plain_values.to_plain(value, fl.TensorType(np.int32, shape))

    assert isinstance(taken, np.ndarray)
    assert taken.dtype == np.int32
    np.testing.assert_array_equal(taken, np.asarray(value, np.int32))


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([1, 2], (3,)),
        ([1, 2], ()),
        (1, (1,)),
        ([[1], [2, 3]], (2, None)),
        (np.zeros((2, 2), np.int32), (None, 3)),
    ],
)
def test_array_of_another_shape_is_refused(
    value: Any, shape: columnar_sequence.Dims
) -> None:
    with pytest.raises(errors.ValueMismatchError, match="the value"):
        plain_values.to_plain(value, fl.TensorType(np.int32, shape))


def test_strings_become_bytes() -> None:
    text = fl.TensorType(np.str_)
    for value, expected in (
        ("é", "é".encode()),
        (b"a\0", b"a\0"),
        (np.str_("a"), b"a"),
        ("", b""),
    ):
        assert plain_values.to_plain(value, text) == expected

    taken = plain_values.to_plain(["a", b"b\0"], fl.TensorType(np.str_, (2,)))

    assert taken.dtype == object
    assert taken.tolist() == [b"a", b"b\0"]
    with pytest.raises(errors.ValueMismatchError):
        plain_values.to_plain(["a", 1, None], fl.TensorType(np.str_, (3,)))


@pytest.mark.parametrize(
    "value",
    [
        {"x": 1, "y": 2.0},
        {"y": 2.0, "x": 1},
        collections.OrderedDict(x=1, y=2.0),
        Pair(1, 2.0),
        AttrsPair(1, 2.0),
        DataPair(1, 2.0),
        (1, 2.0),  # takes the names of its type
        [1, 2.0],
        Struct([("x", 1), ("y", 2.0)]),
    ],
    ids=str,
)
def test_container_becomes_a_tuple_in_the_order_of_its_type(value: Any) -> None:
    assert plain_values.to_plain(value, POINT) == (1, 2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": 1}, r"\['x'\]"),
        ({"x": 1, "z": 2.0}, r"\['x', 'z'\]"),
        ((1, 2.0, 3), "found 3"),
        (Struct([("y", 1), ("x", 2.0)]), "named"),
        (7, "container"),
        ("xy", "container"),
        ({"x": 1, "y": "a"}, r"the value\.y"),
    ],
)
def test_container_of_other_elements_is_refused(value: Any, message: str) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        plain_values.to_plain(value, POINT)


def test_clients_have_a_value_each() -> None:
    assert plain_values.to_plain((3, 1, 2), AT_CLIENTS) == [3, 1, 2]
    assert plain_values.to_plain(3, AT_SERVER) == 3
    for value in (3, {1, 2}, "12", np.zeros(2, np.int32)):
        with pytest.raises(errors.ValueMismatchError, match="a value for each client"):
            plain_values.to_plain(value, AT_CLIENTS)


def test_mismatch_names_the_client() -> None:
    with pytest.raises(errors.ValueMismatchError, match="client at position 1") as e:
        plain_values.to_plain([1, "a", 3], AT_CLIENTS)

    assert e.value.location == errors.Location(client_index=1)


def test_stored_values_are_passed_on_unread() -> None:
    stored, run = Stored("key"), StoredClients("key", 0, 2)

    assert plain_values.to_plain(stored, AT_SERVER) is stored
    assert plain_values.to_plain(stored, fl.TensorType(np.int32)) is stored
    assert plain_values.to_plain(run, AT_CLIENTS) is run
    assert plain_values.to_plain([1, stored], AT_CLIENTS) == [1, stored]


def test_sequences_are_iterables_and_become_rows() -> None:
    numbers = fl.SequenceType(np.int32)

    for value in ([1, 2], iter((1, 2)), np.array([1, 2], np.int32)):
        laid = plain_values.to_plain(value, numbers)
        assert isinstance(laid, columnar_sequence.ColumnarSequence)
        assert [element for (element,) in laid] == [1, 2]
        assert plain_values.to_plain(laid, numbers) is laid
    for other in (3, "12", {"a": 1}):
        with pytest.raises(errors.ValueMismatchError, match="a dataset, a list"):
            plain_values.to_plain(other, numbers)
    with pytest.raises(errors.ValueMismatchError, match="element 1 of the value "):
        plain_values.to_plain([1, 1.5], numbers)


def test_function_type_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError, match="of a type with values"):
        plain_values.to_plain(len, fl.FunctionType(None, np.int32))


def test_structure_of_tensors_has_no_sequences() -> None:
    with pytest.raises(errors.ValueMismatchError, match="a structure of tensors"):
        tensor_structures.flatten_type(fl.to_type([fl.SequenceType(np.int32)]))
    assert tensor_structures.storage_dtype(fl.TensorType(np.str_)) == np.dtype("O")
    assert tensor_structures.storage_dtype(fl.TensorType(np.float32)) == np.float32


@pytest.mark.parametrize(
    ("value", "type_spec", "expected"),
    [
        (3, fl.TensorType(np.int32), 3),
        ((1, 2.0), POINT, {"x": 1, "y": 2.0}),
        ((1,), fl.StructType([("a", np.int32)]), collections.OrderedDict(a=1)),
        ((1, 2), fl.StructType([np.int32, np.int32]), (1, 2)),
        ([3, 1], AT_CLIENTS, [3, 1]),
        (3, AT_SERVER, 3),
        ((), fl.StructType([]), ()),
        ([(1, 2.0)], fl.FederatedType(POINT, fl.CLIENTS), [{"x": 1, "y": 2.0}]),
    ],
)
def test_result_has_the_containers_of_its_type(
    value: Any, type_spec: fl.Type, expected: Any
) -> None:
    result = plain_values.from_plain(value, type_spec)

    assert result == expected
    assert type(result) is type(expected)


def test_sequence_comes_back_as_a_list_of_elements() -> None:
    type_spec = fl.SequenceType(POINT)
    laid = plain_values.to_plain([{"x": 1, "y": 2.0}, {"x": 3, "y": 4.0}], type_spec)

    assert plain_values.from_plain(laid, type_spec) == [
        {"x": 1, "y": 2.0},
        {"x": 3, "y": 4.0},
    ]


_LEAVES = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(lambda n: (n, fl.TensorType(np.int32))),
    st.floats(width=32, allow_nan=False).map(lambda x: (x, fl.TensorType(np.float32))),
    st.booleans().map(lambda b: (b, fl.TensorType(np.bool_))),
    st.binary(max_size=4).map(lambda b: (b, fl.TensorType(np.str_))),
)


def _tuple_of(pairs: list[tuple[Any, fl.Type]]) -> tuple[Any, fl.Type]:
    values = tuple(value for value, _ in pairs)
    return values, fl.StructType([type_spec for _, type_spec in pairs])


_TYPED_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3).map(_tuple_of), max_leaves=8
)


@given(_TYPED_VALUES)
def test_plain_value_comes_back_is_plain_and_pickles(
    typed: tuple[Any, fl.Type],
) -> None:
    value, type_spec = typed

    taken = plain_values.to_plain(value, type_spec)

    assert plain_values.from_plain(taken, type_spec) == value
    assert plain_values.to_plain(taken, type_spec) == taken
    assert pickle.loads(pickle.dumps(taken)) == taken


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_that_a_dtype_rounds_are_refused(dtype: Any, sign: int) -> None:
    type_spec = fl.TensorType(dtype)

    for exponent in range(20, 63):
        for number in (2**exponent, 2**exponent + 1, 2**exponent - 1):
            is_exact = int(dtype(number).real) == number
            if is_exact:
                assert (
                    int(plain_values.to_plain(sign * number, type_spec).real)
                    == sign * number
                )
            else:
                with pytest.raises(errors.ValueMismatchError):
                    plain_values.to_plain(sign * number, type_spec)


@pytest.mark.parametrize(
    ("labels", "dims", "advice"),
    [
        (
            np.ones((2, 1), np.float32),
            [None],
            r"a column, so pass `y\[:, 0\]`, or .*np\.float32, \[None, 1\]\)`",
        ),
        (
            np.ones(2, np.float32),
            [None, 1],
            r"pass `y\[:, None\]`, .*, \[None\]\)",
        ),
        (np.ones((2, 3), np.float32), [None], r"reshape `y`, or .*\[None, 3\]\)`"),
        (np.ones(2, np.int64), [None], r"astype\('float32'\)`; or .*np\.int64, \[None"),
        (
            np.ones((2, 1), np.int64),
            [None],
            r"astype\('float32'\)`; .*so pass `y\[:, 0",
        ),
        (np.array(["a", "b"]), [None], r"codes of the labels, .*cat\.codes`, in"),
    ],
    ids=["column", "no column", "classes", "dtype", "both", "strings"],
)
def test_labels_of_another_type_say_what_to_type(
    labels: Any, dims: list[int | None], advice: str
) -> None:
    batch = fl.to_type({"x": fl.TensorType(np.float32), "y": (np.float32, dims)})

    with pytest.raises(errors.ValueMismatchError, match=f"`y` of batch 0 .*{advice}"):
        plain_values.to_plain([{"x": 1.0, "y": labels}], fl.SequenceType(batch))
