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
        pytest.param(3, np.int32, id="int for int32"),
        pytest.param(255, np.uint8, id="largest uint8"),
        pytest.param(3, np.float32, id="int for float32"),
        pytest.param(2.5, np.float32, id="float for float32"),
        pytest.param(0.1, np.float32, id="rounded float for float32"),
        pytest.param(math.inf, np.float32, id="infinity"),
        pytest.param(2.5, np.complex64, id="float for complex64"),
        pytest.param(2, ml_dtypes.bfloat16, id="int for bfloat16"),
        pytest.param(True, np.bool_, id="bool"),
        pytest.param(np.int32(3), np.int32, id="numpy scalar"),
        pytest.param(FakeTensor(), np.int32, id="eager tensor"),
    ],
)
def test_number_takes_the_declared_dtype(value: Any, dtype: Any) -> None:
    taken = plain_values.to_plain(value, fl.TensorType(dtype))

    assert taken.dtype == np.dtype(dtype)
    assert taken.shape == ()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        pytest.param(1.0, np.int32, id="float for int32"),
        pytest.param(256, np.uint8, id="too large for uint8"),
        pytest.param(-1, np.uint8, id="negative for uint8"),
        pytest.param(2**24 + 1, np.float32, id="int that float32 rounds"),
        pytest.param(1e300, np.float32, id="float that overflows"),
        pytest.param(1, np.bool_, id="int for bool"),
        pytest.param(True, np.int32, id="bool for int32"),
        pytest.param(1j, np.float32, id="complex for float32"),
        pytest.param(2**70, np.int64, id="larger than any integer"),
        pytest.param(np.float64(1), np.float32, id="numpy scalar of another dtype"),
        pytest.param(np.int64(1), np.int32, id="wider numpy scalar"),
        pytest.param("1", np.int32, id="string for int32"),
        pytest.param("1", np.complex64, id="string for complex64"),
        pytest.param(None, np.float32, id="None"),
        pytest.param(None, np.complex64, id="None for complex64"),
        pytest.param(object(), np.int32, id="object"),
        pytest.param({"a": 1}, np.int32, id="mapping"),
        pytest.param(1, np.str_, id="int for string"),
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


@pytest.mark.parametrize("value", RAW_MEMORY.values(), ids=RAW_MEMORY)
def test_memory_is_no_text_but_bytes(value: Any) -> None:
    text = fl.TensorType(np.str_, None)

    if isinstance(value, bytes):
        assert plain_values.to_plain(value, text) == value
    else:
        with pytest.raises(errors.ValueMismatchError):
            plain_values.to_plain(value, text)


UNLISTED = {name: NO_NUMBERS[name] for name in (*RAW_MEMORY, "str", "set", "frozenset")}


@pytest.mark.parametrize("value", UNLISTED.values(), ids=UNLISTED)
def test_what_is_no_list_has_no_members(value: Any) -> None:
    lists = [fl.SequenceType(np.int32), AT_CLIENTS, fl.StructType([np.int32] * 4)]
    for type_spec in lists:
        with pytest.raises(errors.ValueMismatchError):
            plain_values.to_plain(value, type_spec)


@pytest.mark.parametrize("found", [np.float64, np.uint8])
@pytest.mark.parametrize("nest", [list, lambda x: [x, x], lambda x: [[y] for y in x]])
def test_arrays_in_lists_are_not_cast(found: Any, nest: Any) -> None:
    value = nest(np.arange(4).astype(found))

    with pytest.raises(errors.ValueMismatchError, match="nothing is cast"):
        plain_values.to_plain(value, fl.TensorType(np.float32, None))


@pytest.mark.parametrize("nest", [list, lambda x: [x, x], lambda x: [[y] for y in x]])
def test_arrays_of_the_type_may_stand_in_lists(nest: Any) -> None:
    array_of_type = np.arange(4, dtype=np.float32)

    taken = plain_values.to_plain(nest(array_of_type), fl.TensorType(np.float32, None))

    np.testing.assert_array_equal(taken, np.array(nest(array_of_type.tolist())))


def test_overflow_beside_a_nan_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError):
        plain_values.to_plain([math.nan, 1e300], fl.TensorType(np.float32, (2,)))


def test_mismatch_says_what_was_expected_and_found() -> None:
    with pytest.raises(errors.ValueMismatchError) as caught:
        plain_values.to_plain(1.5, fl.TensorType(np.int32), "argument `x`")

    assert str(caught.value) == (
        "Expected argument `x` to be of type `int32`, found `1.5` of Python type"
        " `float`: nothing is cast, so convert it first."
    )


def test_symbolic_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(errors.ValueMismatchError, match="outside of TensorFlow graphs"):
        plain_values.to_plain(SymbolicTensor(), fl.TensorType(np.int32))


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        pytest.param([1, 2, 3], (3,), id="list"),
        pytest.param([[1], [2]], (2, 1), id="nested list"),
        pytest.param([1, 2, 3], (None,), id="unknown dimension"),
        pytest.param([[1, 2]], None, id="unknown rank"),
        pytest.param([], (0,), id="empty"),
        pytest.param(np.zeros((2, 3), np.int32), (None, 3), id="array"),
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
        pytest.param([1, 2], (3,), id="wrong size"),
        pytest.param([1, 2], (), id="vector for scalar"),
        pytest.param(1, (1,), id="scalar for vector"),
        pytest.param([[1], [2, 3]], (2, None), id="ragged"),
        pytest.param(np.zeros((2, 2), np.int32), (None, 3), id="array"),
    ],
)
def test_array_of_another_shape_is_refused(
    value: Any, shape: columnar_sequence.Dims
) -> None:
    with pytest.raises(errors.ValueMismatchError, match="the value"):
        plain_values.to_plain(value, fl.TensorType(np.int32, shape))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("é", "é".encode(), id="text"),
        pytest.param(b"a\0", b"a\0", id="trailing zero byte"),
        pytest.param(np.str_("a"), b"a", id="numpy text"),
        pytest.param("", b"", id="empty"),
    ],
)
def test_string_becomes_bytes(value: Any, expected: bytes) -> None:
    assert plain_values.to_plain(value, fl.TensorType(np.str_)) == expected


def test_strings_become_an_array_of_bytes_objects() -> None:
    taken = plain_values.to_plain(["a", b"b\0"], fl.TensorType(np.str_, (2,)))

    assert taken.dtype == object
    assert taken.tolist() == [b"a", b"b\0"]


def test_array_of_objects_that_are_no_strings_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError):
        plain_values.to_plain(["a", 1, None], fl.TensorType(np.str_, (3,)))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"x": 1, "y": 2.0}, id="dict"),
        pytest.param({"y": 2.0, "x": 1}, id="dict in another order"),
        pytest.param(collections.OrderedDict(x=1, y=2.0), id="ordered dict"),
        pytest.param(Pair(1, 2.0), id="named tuple"),
        pytest.param(AttrsPair(1, 2.0), id="attrs"),
        pytest.param(DataPair(1, 2.0), id="dataclass"),
        pytest.param((1, 2.0), id="tuple takes the names of its type"),
        pytest.param([1, 2.0], id="list takes the names of its type"),
        pytest.param(Struct([("x", 1), ("y", 2.0)]), id="struct"),
    ],
)
def test_container_becomes_a_tuple_in_the_order_of_its_type(value: Any) -> None:
    assert plain_values.to_plain(value, POINT) == (1, 2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param({"x": 1}, r"\['x'\]", id="one missing"),
        pytest.param({"x": 1, "z": 2.0}, r"\['x', 'z'\]", id="another name"),
        pytest.param((1, 2.0, 3), "found 3", id="one more"),
        pytest.param(Struct([("y", 1), ("x", 2.0)]), "named", id="names in disorder"),
        pytest.param(7, "container", id="no container"),
        pytest.param("xy", "container", id="string"),
        pytest.param({"x": 1, "y": "a"}, r"the value\.y", id="element of another type"),
    ],
)
def test_container_of_other_elements_is_refused(value: Any, message: str) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        plain_values.to_plain(value, POINT)


def test_client_values_become_a_list_in_order() -> None:
    assert plain_values.to_plain((3, 1, 2), AT_CLIENTS) == [3, 1, 2]


def test_all_equal_value_is_given_bare() -> None:
    assert plain_values.to_plain(3, AT_SERVER) == 3


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(3, id="bare value"),
        pytest.param({1, 2}, id="set"),
        pytest.param("12", id="string"),
        pytest.param(np.zeros(2, np.int32), id="array"),
    ],
)
def test_client_values_must_be_a_sequence(value: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match="a value for each client"):
        plain_values.to_plain(value, AT_CLIENTS)


def test_mismatch_names_the_client() -> None:
    with pytest.raises(errors.ValueMismatchError, match="client at position 1") as e:
        plain_values.to_plain([1, "a", 3], AT_CLIENTS)

    assert e.value.location == errors.Location(client_index=1)


@pytest.mark.parametrize(
    ("value", "type_spec"),
    [
        pytest.param(Stored("key"), AT_SERVER, id="at server"),
        pytest.param(Stored("key"), fl.TensorType(np.int32), id="unplaced"),
        pytest.param(StoredClients("key", 0, 2), AT_CLIENTS, id="a run of clients"),
    ],
)
def test_stored_value_is_passed_on_unread(value: Any, type_spec: fl.Type) -> None:
    assert plain_values.to_plain(value, type_spec) is value


def test_stored_client_is_passed_on_among_others() -> None:
    stored = Stored("key")

    assert plain_values.to_plain([1, stored], AT_CLIENTS) == [1, stored]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([1, 2], id="list"),
        pytest.param((n for n in (1, 2)), id="generator"),
        pytest.param(np.array([1, 2], np.int32), id="array"),
    ],
)
def test_iterable_becomes_rows(value: Any) -> None:
    laid = plain_values.to_plain(value, fl.SequenceType(np.int32))

    assert isinstance(laid, columnar_sequence.ColumnarSequence)
    assert [element for (element,) in laid] == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(3, id="number"),
        pytest.param("12", id="string"),
        pytest.param({"a": 1}, id="mapping"),
    ],
)
def test_sequence_must_be_iterable(value: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match="a dataset, a list"):
        plain_values.to_plain(value, fl.SequenceType(np.int32))


def test_mismatch_names_the_element_of_a_sequence() -> None:
    with pytest.raises(errors.ValueMismatchError, match="element 1 of the value "):
        plain_values.to_plain([1, 1.5], fl.SequenceType(np.int32))


def test_rows_are_passed_on() -> None:
    laid = plain_values.to_plain([1], fl.SequenceType(np.int32))

    assert plain_values.to_plain(laid, fl.SequenceType(np.int32)) is laid


def test_function_type_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError, match="of a type with values"):
        plain_values.to_plain(len, fl.FunctionType(None, np.int32))


_NESTED = fl.to_type([("a", [np.int32, np.float32]), ("b", [("c", np.int32)])])


def test_flatten_type_is_in_the_order_of_the_type() -> None:
    assert [str(t) for t in tensor_structures.flatten_type(_NESTED)] == [
        "int32",
        "float32",
        "int32",
    ]


def test_flatten_type_refuses_what_is_no_tensor() -> None:
    with pytest.raises(errors.ValueMismatchError, match="a structure of tensors"):
        tensor_structures.flatten_type(fl.to_type([fl.SequenceType(np.int32)]))


def test_nester_undoes_flatten() -> None:
    value = ((1, 2.0), (3,))

    assert (
        tensor_structures.nester(_NESTED)(iter(tensor_structures.flatten(value)))
        == value
    )


def test_pack_gives_flat_leaves_their_names() -> None:
    value = ((1, 2.0), (3,))

    packed = tensor_structures.unflatten(
        iter(tensor_structures.flatten(value)), _NESTED
    )

    assert packed == Struct(
        [("a", Struct([(None, 1), (None, 2.0)])), ("b", Struct([("c", 3)]))]
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        pytest.param(np.str_, np.dtype(object), id="string"),
        pytest.param(np.float32, np.dtype(np.float32), id="number"),
    ],
)
def test_storage_dtype_of_strings_is_object(dtype: Any, expected: Any) -> None:
    assert tensor_structures.storage_dtype(fl.TensorType(dtype)) == expected


@pytest.mark.parametrize(
    ("value", "type_spec", "expected"),
    [
        pytest.param(3, fl.TensorType(np.int32), 3, id="tensor"),
        pytest.param((1, 2.0), POINT, {"x": 1, "y": 2.0}, id="container is kept"),
        pytest.param(
            (1,),
            fl.StructType([("a", np.int32)]),
            collections.OrderedDict(a=1),
            id="names become an ordered dict",
        ),
        pytest.param(
            (1, 2), fl.StructType([np.int32, np.int32]), (1, 2), id="no names: tuple"
        ),
        pytest.param([3, 1], AT_CLIENTS, [3, 1], id="clients"),
        pytest.param(3, AT_SERVER, 3, id="server"),
        pytest.param((), fl.StructType([]), (), id="empty struct"),
        pytest.param(
            [(1, 2.0)],
            fl.FederatedType(POINT, fl.CLIENTS),
            [{"x": 1, "y": 2.0}],
            id="containers of clients",
        ),
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
def test_value_comes_back_as_it_went_in(typed: tuple[Any, fl.Type]) -> None:
    value, type_spec = typed

    assert (
        plain_values.from_plain(plain_values.to_plain(value, type_spec), type_spec)
        == value
    )


@given(_TYPED_VALUES)
def test_plain_value_is_in_its_plain_values_already(typed: tuple[Any, fl.Type]) -> None:
    value, type_spec = typed
    once = plain_values.to_plain(value, type_spec)

    assert plain_values.to_plain(once, type_spec) == once


@given(_TYPED_VALUES)
def test_plain_value_pickles(typed: tuple[Any, fl.Type]) -> None:
    taken = plain_values.to_plain(*typed)

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
