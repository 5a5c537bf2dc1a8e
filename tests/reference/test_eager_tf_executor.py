"""Claims of the EagerTFExecutor's document that no other test holds."""

# pyright: reportUnknownLambdaType=false

import asyncio
import inspect
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import any_pb2, wrappers_pb2

import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerValue
from ray_fed.framework import EagerTFExecutor
from ray_fed.language import structs
from ray_fed.tensorflow.normal_forms import Executable

flf = fl.framework

INT = fl.TensorType(np.int32)
INTS = fl.SequenceType(np.int32)
FLOATS = fl.TensorType(np.float32, (2,))
NAMED = fl.StructType([("z", np.int32), ("a", FLOATS)])


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(INTS)
def doubled(dataset: Any) -> Any:
    return dataset.map(lambda x: 2 * x)


@pytest.fixture
def executor() -> Iterator[EagerTFExecutor]:
    executor = EagerTFExecutor()
    yield executor
    executor.close()


def embed(executor: flf.Executor, value: Any, type_spec: Any = None) -> Any:
    return asyncio.run(executor.create_value(value, type_spec))


def call(executor: flf.Executor, comp: Any, arg: Any = None) -> Any:
    return asyncio.run(executor.create_call(comp, arg))


def computed(value: Any) -> Any:
    return asyncio.run(value.compute())


@pytest.mark.claim("eager_tf.04")
def test_constructor_takes_a_device_or_nothing() -> None:
    parameters = inspect.signature(EagerTFExecutor).parameters

    assert {name: p.default for name, p in parameters.items()} == {"device": None}


@pytest.mark.claim("eager_tf.34", "eager_tf.38", "eager_tf.41", "eager_tf.42")
@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("create_value", {"value": inspect.Parameter.empty, "type_spec": None}),
        ("create_call", {"comp": inspect.Parameter.empty, "arg": None}),
        ("create_struct", {"elements": inspect.Parameter.empty}),
    ],
)
def test_verbs_have_the_documented_arguments(
    verb: str, expected: dict[str, Any]
) -> None:
    parameters = inspect.signature(getattr(EagerTFExecutor, verb)).parameters

    found = {name: p.default for name, p in parameters.items() if name != "self"}
    assert found == expected


@pytest.mark.claim("eager_tf.15")
def test_eager_tensors_are_embedded_as_they_are(executor: EagerTFExecutor) -> None:
    tensor, other = tf.constant(5), tf.constant([1.0, 2.0])

    alone = embed(executor, tensor, np.int32)
    inside = embed(executor, {"a": other, "z": tensor}, NAMED)

    assert alone.reference is tensor
    assert inside.reference.z is tensor
    assert inside.reference.a is other


@pytest.mark.claim("eager_tf.16")
def test_eager_datasets_are_embedded_as_they_are(executor: EagerTFExecutor) -> None:
    dataset = tf.data.Dataset.range(3, output_type=tf.int32)

    alone = embed(executor, dataset, INTS)
    inside = embed(executor, [dataset, 5], [INTS, INT])

    assert alone.reference is dataset
    assert inside.reference[0] is dataset
    assert computed(inside)[0] == [0, 1, 2]


@pytest.mark.claim("eager_tf.21")
@pytest.mark.parametrize(
    ("make", "type_spec"),
    [
        pytest.param(lambda: tf.constant(5), INT, id="tensor"),
        pytest.param(
            lambda: tf.data.Dataset.range(2**62, output_type=tf.int64),
            fl.SequenceType(np.int64),
            id="endless dataset",
        ),
        pytest.param(
            lambda: structs.Struct([("z", tf.constant(1)), ("a", tf.ones([2]))]),
            NAMED,
            id="struct",
        ),
    ],
)
def test_functions_see_the_very_values_that_others_returned(
    executor: EagerTFExecutor, make: Callable[[], Any], type_spec: fl.Type
) -> None:
    made, taken = make(), list[Any]()
    produce = EagerValue(Executable(lambda: made), fl.FunctionType(None, type_spec))

    def keep(arg: Any) -> Any:
        taken.append(arg)
        return arg

    consume = EagerValue(Executable(keep), fl.FunctionType(type_spec, type_spec))
    first = call(executor, produce)
    second = call(executor, consume, first)
    call(executor, consume, second)

    assert first.reference is made
    assert taken[0] is taken[1] is made


@pytest.mark.claim("eager_tf.22", "eager_tf.02")
def test_everything_happens_on_the_thread_of_the_caller() -> None:
    before, seen = set(threading.enumerate()), list[threading.Thread]()

    def note(x: Any) -> Any:
        seen.append(threading.current_thread())
        return x

    executor = EagerTFExecutor()
    watched = EagerValue(Executable(note), fl.FunctionType(INT, INT))
    call(executor, embed(executor, increment), embed(executor, 1, INT))
    call(executor, watched, embed(executor, 1, INT))

    assert seen == [threading.current_thread()]
    assert set(threading.enumerate()) == before
    executor.close()


@pytest.mark.claim("eager_tf.26", "eager_tf.35", "eager_tf.38", "eager_tf.41")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda e: embed(e, 5, np.int32), "int32", id="create_value"),
        pytest.param(lambda e: embed(e, increment), "(int32 -> int32)", id="function"),
        pytest.param(
            lambda e: call(e, embed(e, increment), embed(e, 5, np.int32)),
            "int32",
            id="create_call",
        ),
        pytest.param(
            lambda e: call(e, embed(e, doubled), embed(e, [5], INTS)),
            "int32*",
            id="create_call of a sequence",
        ),
        pytest.param(
            lambda e: asyncio.run(e.create_struct([embed(e, 5, np.int32)])),
            "<int32>",
            id="create_struct",
        ),
        pytest.param(
            lambda e: asyncio.run(
                e.create_selection(embed(e, (1, [2.0, 3.0]), NAMED), 1)
            ),
            "float32[2]",
            id="create_selection",
        ),
    ],
)
def test_every_verb_returns_a_value_of_the_executors_own_class(
    executor: EagerTFExecutor, make: Callable[[EagerTFExecutor], Any], expected: str
) -> None:
    value = make(executor)

    assert type(value) is EagerValue
    assert str(value.type_signature) == expected
    assert value.reference is not None


@pytest.mark.claim("eager_tf.44")
def test_a_typed_object_needs_no_type(executor: EagerTFExecutor) -> None:
    function = embed(executor, increment)  # a computation is a typed object
    again = embed(executor, embed(executor, 5, np.int32))

    assert function.type_signature == increment.type_signature
    assert (again.type_signature, computed(again)) == (INT, 5)


def data(path: Any, type_spec: Any) -> flf.Data:
    content = any_pb2.Any()
    content.Pack(wrappers_pb2.StringValue(value=str(path)))
    return flf.Data(content, type_spec)


@pytest.mark.claim("eager_tf.11", "eager_tf.17")
class TestExternalData:
    @pytest.mark.parametrize("form", ["block", "message"])
    def test_is_a_tensor(
        self, executor: EagerTFExecutor, tmp_path: pathlib.Path, form: str
    ) -> None:
        np.save(tmp_path / "x.npy", np.array([1.5, 2.5], np.float32))
        block = data(tmp_path / "x.npy", FLOATS)

        value = embed(executor, block if form == "block" else block.to_proto())

        assert value.type_signature == FLOATS
        assert isinstance(value.reference, tf.Tensor)
        assert computed(value).tolist() == [1.5, 2.5]

    def test_is_a_sequence_that_is_read_by_calls(
        self, executor: EagerTFExecutor, tmp_path: pathlib.Path
    ) -> None:
        np.save(tmp_path / "x.npy", np.arange(4, dtype=np.int32))
        sequence = embed(executor, data(tmp_path / "x.npy", INTS))

        result = call(executor, embed(executor, doubled), sequence)

        assert isinstance(sequence.reference.dataset, tf.data.Dataset)
        assert computed(result) == [0, 2, 4, 6]

    @pytest.mark.parametrize(
        "type_spec", [INT, NAMED, INTS], ids=["tensor", "struct", "sequence"]
    )
    def test_must_be_there(
        self, executor: EagerTFExecutor, tmp_path: pathlib.Path, type_spec: Any
    ) -> None:
        with pytest.raises(FileNotFoundError, match=r"Expected the file .*missing"):
            embed(executor, data(tmp_path / "missing.npz", type_spec))

    @pytest.mark.claim("semantics.38")
    def test_is_read_by_a_stack_when_it_is_needed(self, tmp_path: pathlib.Path) -> None:
        leaf = stacks.device_stack()
        executor = stacks.local_stack(0, [], leaf)
        value = embed(executor, data(tmp_path / "x.npz", NAMED))

        np.savez(tmp_path / "x.npz", z=np.int32(3), a=np.zeros(2, np.float32))
        selected = asyncio.run(executor.create_selection(value, name="z"))
        result = call(executor, embed(executor, increment), selected)

        assert computed(value).a.tolist() == [0, 0]
        assert computed(result) == 4
        executor.close()
