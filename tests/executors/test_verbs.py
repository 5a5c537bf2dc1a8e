"""What the verbs of all executors that hold structs and functions have in common."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.language import structs
from ray_fed.worker.stacks import LocalStrategy
from tests.executor_calls import computed, embed

INT = fl.TensorType(np.int32)
NAMED = fl.StructType([("z", np.int32), ("a", np.float32)])


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation
def ten() -> Any:
    return np.int32(10)


def federating() -> Any:
    return FederatingExecutor(
        lambda executor: LocalStrategy(executor.unplaced, [], []), EagerTFExecutor()
    )


@pytest.fixture(
    params=[
        EagerTFExecutor,
        pytest.param(federating, id="FederatingExecutor"),
        pytest.param(
            lambda: ReferenceResolvingExecutor(EagerTFExecutor()),
            id="ReferenceResolvingExecutor",
        ),
    ]
)
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    executor = request.param()
    yield executor
    executor.close()


def struct_of(executor: Any, source: str) -> Any:
    """Return 1 and 2.0 as a struct, embedded at once or created of its elements."""
    struct = embed(executor, (1, 2.0), NAMED)
    if source == "embedded":
        return struct
    z, a = (asyncio.run(executor.create_selection(struct, i)) for i in range(2))
    return asyncio.run(executor.create_struct({"z": z, "a": a}))


class TestStructs:
    @pytest.mark.claim("eager_tf.41", "federating.27")
    @pytest.mark.parametrize(
        ("make", "type_spec"),
        [
            pytest.param(
                lambda one, two: collections.OrderedDict(z=one, a=two),
                "<z=int32,a=float32>",
                id="names",
            ),
            pytest.param(lambda *both: [*both], "<int32,float32>", id="none"),
            pytest.param(lambda *_: [], "<>", id="empty"),
        ],
    )
    def test_are_created_of_embedded_elements(
        self, executor: Any, make: Callable[..., Any], type_spec: str
    ) -> None:
        one, two = embed(executor, 1, np.int32), embed(executor, 2.0, np.float32)
        elements = make(one, two)

        struct = asyncio.run(executor.create_struct(elements))

        names = list(elements) if isinstance(elements, dict) else [None] * len(elements)
        assert str(struct.type_signature) == type_spec
        assert list(structs.iter_elements(computed(struct))) == [
            *zip(names, [1, 2.0], strict=False)
        ]

    @pytest.mark.claim("federating.28")
    def test_refuse_what_is_not_embedded(self, executor: Any) -> None:
        name = type(executor).__name__

        with pytest.raises(TypeError, match=f"embedded in {name}, found `int`"):
            asyncio.run(executor.create_struct([1]))

    @pytest.mark.claim("federating.28")
    @pytest.mark.parametrize("elements", [5, None, "ab", {1}, iter([])], ids=type)
    def test_refuse_what_is_no_collection(self, executor: Any, elements: Any) -> None:
        with pytest.raises(
            errors.ValueMismatchError, match="of embedded values, found"
        ):
            asyncio.run(executor.create_struct(elements))

    @pytest.mark.claim(
        "eager_tf.38",
        "federating.20",
        "federating.21",
        "federating.22",
        "semantics.33",
    )
    @pytest.mark.parametrize("source", ["created", "embedded"])
    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            pytest.param({"index": 0}, 1, id="first index"),
            pytest.param({"index": 1}, 2.0, id="last index"),
            pytest.param({"name": "a"}, 2.0, id="name"),
        ],
    )
    def test_are_selected_from(
        self, executor: Any, source: str, how: dict[str, Any], expected: float
    ) -> None:
        struct = struct_of(executor, source)

        selected = asyncio.run(executor.create_selection(struct, **how))

        assert type(selected) is type(struct)
        assert selected.type_signature == (INT if expected == 1 else NAMED["a"])
        assert computed(selected) == expected

    @pytest.mark.claim("eager_tf.40", "federating.25", "semantics.33")
    @pytest.mark.parametrize("source", ["created", "embedded"])
    @pytest.mark.parametrize(
        ("how", "error"),
        [
            pytest.param({}, ValueError, id="neither index nor name"),
            pytest.param({"index": 0, "name": "z"}, ValueError, id="both"),
            pytest.param({"index": 2}, TypeError, id="index out of range"),
            pytest.param({"index": -1}, TypeError, id="negative index"),
            pytest.param({"name": "b"}, TypeError, id="unknown name"),
            pytest.param({"index": "z"}, TypeError, id="name as an index"),
            pytest.param({"index": 0.0}, TypeError, id="float as an index"),
        ],
    )
    def test_refuse_other_selections(
        self, executor: Any, source: str, how: dict[str, Any], error: type[Exception]
    ) -> None:
        struct = struct_of(executor, source)

        with pytest.raises(error, match=r"^Expected (either|an element)"):
            asyncio.run(executor.create_selection(struct, **how))

    @pytest.mark.claim("eager_tf.39", "federating.23", "federating.24")
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda e: embed(e, 1, INT), id="tensor"),
            pytest.param(lambda _: [1, 2], id="not embedded"),
        ],
    )
    def test_are_the_only_source_of_selections(
        self, executor: Any, make: Callable[[Any], Any]
    ) -> None:
        with pytest.raises(TypeError, match=r"^Expected a (struct|value embedded)"):
            asyncio.run(executor.create_selection(make(executor), 0))


@pytest.mark.claim(
    "eager_tf.37", "federating.16", "federating.17", "federating.18",
    "semantics.16", "semantics.24", "semantics.42",
)  # fmt: skip
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda e: e.create_call(embed(e, 1, INT)),
            "Expected a function to call",
            id="no function",
        ),
        pytest.param(
            lambda e: e.create_call(embed(e, increment)),
            "Expected an argument of type `int32`, found none",
            id="no argument",
        ),
        pytest.param(
            lambda e: e.create_call(embed(e, ten), embed(e, 1, INT)),
            "Expected no argument",
            id="argument too many",
        ),
        pytest.param(
            lambda e: e.create_call(embed(e, increment), embed(e, 1.0, np.float32)),
            "Expected an argument of type `int32`, found `float32`",
            id="argument of another type",
        ),
        pytest.param(
            lambda e: e.create_call(embed(e, increment), 1),
            "Expected a value embedded in {name}, found `int`",
            id="argument that is not embedded",
        ),
        pytest.param(
            lambda e: e.create_call(increment, embed(e, 1, INT)),
            "Expected a value embedded in {name}",
            id="function that is not embedded",
        ),
    ],
)
def test_calls_of_wrong_types_are_refused(
    executor: Any, make: Callable[[Any], Any], message: str
) -> None:
    expected = message.format(name=type(executor).__name__)

    with pytest.raises(TypeError, match=expected):
        asyncio.run(make(executor))
