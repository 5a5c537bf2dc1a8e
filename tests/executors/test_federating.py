"""FederatingExecutor: the kinds it takes, the errors it raises, what it delegates."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from federated_language.proto import computation_pb2  # noqa: TID251 (messages by hand)
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.interpretation import FederatedValue
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor
from ray_fed.language import blocks, type_checks
from ray_fed.worker.stacks import LocalStrategy
from tests.executor_calls import computed, embed

flf = fl.framework
NOTHING: Any = None
pb: Any = computation_pb2

NUM_CLIENTS = 3
INT = fl.TensorType(np.int32)
INTS = fl.SequenceType(np.int32)
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.int32, fl.CLIENTS, all_equal=True)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)
INT_TO_INT = fl.FunctionType(INT, INT)
SUM = fl.FunctionType(AT_CLIENTS, AT_SERVER)
MAP = fl.FunctionType([INT_TO_INT, AT_CLIENTS], AT_CLIENTS)
MAP_ALL_EQUAL = fl.FunctionType([INT_TO_INT, ALL_EQUAL], ALL_EQUAL)


NAMED = fl.StructType([("z", np.int32), ("a", np.int32)])


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(np.int32, np.int32)
def subtract(z: Any, a: Any) -> Any:
    return z - a


@rtf.computation
def ten() -> Any:
    return np.int32(10)


LAMBDA = flf.Lambda("x", INT, flf.Reference("x", INT))
ONE = flf.Literal(np.int32(1), INT)


class RecordingExecutor(EagerTFExecutor):
    """Notes what it is asked to embed, and when it is closed."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.embedded: list[Any] = []
        self._events = events

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        self.embedded.append(value)
        return await super().create_value(value, type_spec)

    @override
    def close(self) -> None:
        self._events.append("unplaced executor")
        super().close()


class RecordingStrategy(LocalStrategy):
    """Notes who made it, and when it is closed."""

    def __init__(
        self, executor: FederatingExecutor, num_clients: int, events: list[str]
    ) -> None:
        leaf = ReferenceResolvingExecutor(SequenceExecutor(EagerTFExecutor()))
        super().__init__(executor.unplaced, [leaf], [range(num_clients)])
        self.made_by = executor
        self._events = events

    @override
    def close(self) -> None:
        self._events.append("strategy")
        super().close()


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def unplaced(events: list[str]) -> RecordingExecutor:
    return RecordingExecutor(events)


@pytest.fixture
def executor(
    unplaced: RecordingExecutor, events: list[str]
) -> Iterator[FederatingExecutor]:
    executor = FederatingExecutor(
        lambda self: RecordingStrategy(self, NUM_CLIENTS, events), unplaced
    )
    yield executor
    executor.close()


def call(executor: flf.Executor, comp: Any, arg: Any = None) -> Any:
    return asyncio.run(executor.create_call(comp, arg))


def intrinsic(definition: Any, type_spec: Any) -> Any:
    return flf.Intrinsic(definition.uri, type_spec)


class TestConstruction:
    @pytest.mark.claim("federating.10")
    def test_hands_itself_to_the_strategy_factory(
        self, executor: FederatingExecutor, unplaced: RecordingExecutor
    ) -> None:
        strategy = type_checks.narrow(executor.strategy, RecordingStrategy, "")

        assert strategy.made_by is executor
        assert executor.unplaced is unplaced

    @pytest.mark.claim("federating.11", "semantics.46", "eager_tf.33")
    def test_close_closes_the_strategy_then_the_unplaced_executor(
        self, executor: FederatingExecutor, events: list[str]
    ) -> None:
        executor.close()

        assert events == ["strategy", "unplaced executor"]


class TestCreateValue:
    @pytest.mark.claim("federating.29")
    def test_of_an_intrinsic_definition(self, executor: FederatingExecutor) -> None:
        value = embed(executor, flf.FEDERATED_SUM, SUM)

        assert value.type_signature == SUM

    @pytest.mark.claim("federating.30")
    def test_of_a_placement(self, executor: FederatingExecutor) -> None:
        literal = embed(executor, fl.CLIENTS)
        block = embed(executor, flf.Placement(fl.SERVER))

        assert (literal.reference, block.reference) == (fl.CLIENTS, fl.SERVER)
        assert literal.type_signature == fl.PlacementType()

    @pytest.mark.claim(
        "federating.31",
        "federating.32",
        "federating.33",
        "federating.37",
        "semantics.36",
        "semantics.37",
    )
    @pytest.mark.parametrize(
        ("comp", "type_spec"),
        [
            pytest.param(intrinsic(flf.FEDERATED_SUM, SUM), SUM, id="intrinsic"),
            pytest.param(
                intrinsic(flf.GENERIC_PLUS, fl.FunctionType([INT, INT], INT)),
                fl.FunctionType([INT, INT], INT),
                id="arithmetic",
            ),
            pytest.param(
                flf.Intrinsic("sequence_sum", fl.FunctionType(INTS, INT)),
                fl.FunctionType(INTS, INT),
                id="sequence intrinsic",
            ),
            pytest.param(LAMBDA, INT_TO_INT, id="lambda"),
            pytest.param(increment, INT_TO_INT, id="tensorflow"),
        ],
    )
    @pytest.mark.parametrize("form", ["as it is", "as a message"])
    def test_of_computations_embeds_nothing_yet(
        self,
        executor: FederatingExecutor,
        unplaced: RecordingExecutor,
        comp: Any,
        type_spec: fl.Type,
        form: str,
    ) -> None:
        value = embed(executor, comp if form == "as it is" else comp.to_proto())

        assert str(value.type_signature) == str(type_spec)
        assert unplaced.embedded == []

    @pytest.mark.claim("federating.34", "semantics.47", "semantics.50")
    @pytest.mark.parametrize("make", [list, tuple])
    def test_of_a_list_or_tuple_at_clients(
        self, executor: FederatingExecutor, make: Callable[[Any], Any]
    ) -> None:
        value = embed(executor, make([3, 1, 2]), AT_CLIENTS)

        assert computed(value) == [3, 1, 2]
        assert isinstance(computed(value), list)

    @pytest.mark.claim("semantics.49")
    def test_of_a_bare_value_that_all_clients_have(
        self, executor: FederatingExecutor
    ) -> None:
        value = embed(executor, 5, ALL_EQUAL)

        assert computed(value) == 5

    def test_of_a_value_at_the_server(self, executor: FederatingExecutor) -> None:
        value = embed(executor, 5, AT_SERVER)

        assert value.type_signature == AT_SERVER
        assert computed(value) == 5

    @pytest.mark.claim("federating.35", "federating.36", "federating.38")
    @pytest.mark.parametrize(
        ("value", "type_spec", "expected"),
        [
            pytest.param(5, np.int32, 5, id="tensor"),
            pytest.param((1, 2), NAMED, [1, 2], id="struct"),
            pytest.param([1, 2], INTS, [1, 2], id="sequence"),
            pytest.param([], [], [], id="empty struct"),
        ],
    )
    def test_of_an_unplaced_value(
        self, executor: FederatingExecutor, value: Any, type_spec: Any, expected: Any
    ) -> None:
        embedded = embed(executor, value, type_spec)
        result = computed(embedded)

        assert isinstance(embedded, FederatedValue)
        assert embedded.type_signature == fl.to_type(type_spec)
        assert (result if np.isscalar(expected) else list(result)) == expected

    def test_of_a_structure_of_placed_and_unplaced_values(
        self, executor: FederatingExecutor
    ) -> None:
        type_spec = fl.StructType(
            [("c", AT_CLIENTS), ("r", fl.StructType([INT, [ALL_EQUAL, AT_SERVER]]))]
        )

        value = embed(executor, {"r": (7, (8, 9)), "c": [1, 2, 3]}, type_spec)
        result = computed(value)

        assert value.type_signature == type_spec
        assert result.c == [1, 2, 3]
        assert (result.r[0], *result.r[1]) == (7, 8, 9)

    @pytest.mark.claim("semantics.17")
    def test_of_a_literal(self, executor: FederatingExecutor) -> None:
        assert computed(embed(executor, ONE)) == 1

    def test_of_client_structures_keeps_their_fields(
        self, executor: FederatingExecutor
    ) -> None:
        type_spec = fl.FederatedType(fl.StructType([NAMED, INTS]), fl.CLIENTS)
        clients = [({"a": 2 * n, "z": n}, list(range(n))) for n in range(NUM_CLIENTS)]

        result = computed(embed(executor, clients, type_spec))

        assert [(m[0].z, m[0].a, m[1]) for m in result] == [
            (0, 0, []), (1, 2, [0]), (2, 4, [0, 1]),
        ]  # fmt: skip

    @pytest.mark.claim("semantics.35")
    @pytest.mark.parametrize(
        "type_spec",
        [
            pytest.param(None, id="none"),
            pytest.param(flf.FEDERATED_SUM.type_signature, id="abstract"),
        ],
    )
    def test_of_an_intrinsic_needs_a_concrete_type(
        self, executor: FederatingExecutor, type_spec: Any
    ) -> None:
        with pytest.raises(
            TypeError, match="Expected a concrete type for the intrinsic"
        ):
            embed(executor, flf.FEDERATED_SUM, type_spec)

    @pytest.mark.claim("federating.39")
    def test_of_an_intrinsic_at_a_type_that_it_cannot_have(
        self, executor: FederatingExecutor
    ) -> None:
        with pytest.raises(TypeError):
            embed(executor, flf.FEDERATED_SUM, INT_TO_INT)

    @pytest.mark.claim("federating.39", "semantics.47")
    @pytest.mark.parametrize(
        ("value", "type_spec"),
        [
            pytest.param(10, None, id="no type"),
            pytest.param(fl.SERVER, np.int32, id="placement at a tensor's type"),
            pytest.param(fl.SERVER, AT_SERVER, id="placement at a placed type"),
            pytest.param(flf.Placement(fl.SERVER), INT, id="block of a placement"),
            pytest.param(5, fl.PlacementType(), id="number at a placement's type"),
            pytest.param(LAMBDA, INT, id="lambda at a tensor's type"),
            pytest.param(
                blocks.Function(blocks.serialize(LAMBDA)), SUM, id="travelling function"
            ),
            pytest.param(ONE, np.float32, id="literal of another type"),
            pytest.param(10, INT_TO_INT, id="number at a function's type"),
            pytest.param(1.5, np.int32, id="another dtype"),
            pytest.param((1, 2, 3), NAMED, id="another length"),
            pytest.param([1, 2.5, 3], AT_CLIENTS, id="of one client"),
            pytest.param("x", ALL_EQUAL, id="of all clients"),
            pytest.param("x", AT_SERVER, id="at the server"),
            pytest.param(5, AT_CLIENTS, id="bare at clients"),
            pytest.param("abc", AT_CLIENTS, id="string for clients"),
            pytest.param(iter([1, 2, 3]), AT_CLIENTS, id="iterator for clients"),
            pytest.param(np.arange(3), AT_CLIENTS, id="array for clients"),
            pytest.param(range(3), AT_CLIENTS, id="range for clients"),
            pytest.param(collections.deque([1]), AT_CLIENTS, id="deque for clients"),
            pytest.param(bytearray(b"abc"), AT_CLIENTS, id="bytearray for clients"),
            pytest.param(memoryview(b"abc"), AT_CLIENTS, id="memoryview for clients"),
            pytest.param(([1, 2, 3], "x"), [AT_CLIENTS, INT], id="inside a struct"),
            pytest.param(increment, SUM, id="function of another type"),
        ],
    )
    def test_of_what_is_not_of_the_type_is_a_type_error(
        self, executor: FederatingExecutor, value: Any, type_spec: Any
    ) -> None:
        with pytest.raises(TypeError, match=r"^Expected "):
            computed(embed(executor, value, type_spec))

    @pytest.mark.claim("federating.39")
    @pytest.mark.parametrize(
        "type_spec",
        [np.float32, AT_SERVER, ALL_EQUAL, AT_CLIENTS, [np.int32], INT_TO_INT],
        ids=str,
    )
    @pytest.mark.parametrize("place", ["alone", "in a struct"])
    def test_of_an_embedded_value_at_another_type_is_a_type_error(
        self, executor: FederatingExecutor, type_spec: Any, place: str
    ) -> None:
        value: Any = embed(executor, 5, INT)
        if place == "in a struct":
            value, type_spec = (value, 5), [type_spec, AT_SERVER]

        with pytest.raises(TypeError, match=r"^Expected "):
            embed(executor, value, type_spec)

    @pytest.mark.claim("federating.39")
    @pytest.mark.parametrize(
        "type_spec",
        [
            np.float32,
            fl.FederatedType(np.float32, fl.SERVER),
            fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True),
            AT_CLIENTS,
            [np.int32],
        ],
        ids=str,
    )
    def test_of_the_unplaced_executors_value_at_another_type_is_a_type_error(
        self, executor: FederatingExecutor, type_spec: Any
    ) -> None:
        value = embed(executor.unplaced, 5, INT)

        with pytest.raises(TypeError, match=r"^Expected "):
            embed(executor, value, type_spec)

    @pytest.mark.parametrize("type_spec", [INT, AT_SERVER, ALL_EQUAL], ids=str)
    def test_of_the_unplaced_executors_value_is_placed(
        self, executor: FederatingExecutor, type_spec: Any
    ) -> None:
        value = embed(executor, embed(executor.unplaced, 5, INT), type_spec)

        assert value.type_signature == type_spec
        assert computed(value) == 5

    @pytest.mark.claim("federating.37")
    @pytest.mark.parametrize("type_spec", [None, np.int32], ids=["none", "its own"])
    def test_of_an_embedded_value_is_that_value(
        self, executor: FederatingExecutor, type_spec: Any
    ) -> None:
        embedded = embed(executor, 5, INT)

        again = embed(executor, embedded, type_spec)

        assert again.type_signature == INT
        assert computed(call(executor, embed(executor, increment), again)) == 6

    @pytest.mark.claim("federating.40", "semantics.40", "semantics.41")
    @pytest.mark.parametrize(
        "block",
        [
            pytest.param(flf.Call(LAMBDA, ONE), id="call"),
            pytest.param(flf.Block([("x", ONE)], ONE), id="block"),
            pytest.param(flf.Struct([ONE]), id="struct"),
            pytest.param(flf.Selection(flf.Struct([ONE]), index=0), id="selection"),
            pytest.param(flf.Reference("x", INT), id="reference"),
            pytest.param(flf.Intrinsic("federated_foo", SUM), id="unknown intrinsic"),
            pytest.param(flf.Intrinsic("foo", INT_TO_INT), id="foreign intrinsic"),
        ],
    )
    @pytest.mark.parametrize("form", ["as it is", "as a message"])
    def test_of_another_kind_of_computation_is_a_value_error(
        self, executor: FederatingExecutor, block: Any, form: str
    ) -> None:
        with pytest.raises(ValueError, match=r"^Expected (an intrinsic|one of)"):
            embed(executor, block if form == "as it is" else block.to_proto())

    @pytest.mark.claim("federating.40")
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda _: pb.Computation(), id="message of no kind"),
            pytest.param(
                lambda _: pb.Computation(type=INT_TO_INT.to_proto(), xla=pb.Xla()),
                id="another compiler's message",
            ),
            pytest.param(
                lambda e: embed(e.unplaced, 5, INT), id="value of another executor"
            ),
        ],
    )
    @pytest.mark.parametrize("type_spec", [None, INT_TO_INT], ids=str)
    def test_of_another_kind_of_value_is_a_value_error(
        self, executor: FederatingExecutor, make: Any, type_spec: Any
    ) -> None:
        with pytest.raises(ValueError, match=r"^Expected "):
            embed(executor, make(executor), type_spec)

    @pytest.mark.claim("federating.39", "federating.40")
    @pytest.mark.parametrize("value", [10, None, len, INT, [1, 2]], ids=type)
    @pytest.mark.parametrize("type_spec", [None, INT_TO_INT], ids=str)
    def test_of_a_python_value_without_a_type_of_values_is_both_errors(
        self, executor: FederatingExecutor, value: Any, type_spec: Any
    ) -> None:
        with pytest.raises(errors.KindMismatchError, match=r"^Expected a") as raised:
            embed(executor, value, type_spec)

        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, ValueError)


class TestCreateCall:
    @pytest.mark.claim("federating.12")
    def test_of_tensorflow(self, executor: FederatingExecutor) -> None:
        function = embed(executor, increment)

        results = [call(executor, function, embed(executor, n, INT)) for n in (1, 2)]

        assert [computed(result) for result in results] == [2, 3]

    @pytest.mark.claim("federating.14")
    def test_of_tensorflow_without_argument(self, executor: FederatingExecutor) -> None:
        assert computed(call(executor, embed(executor, ten))) == 10

    @pytest.mark.claim("semantics.43")
    def test_takes_an_argument_at_the_type_of_the_parameter(
        self, executor: FederatingExecutor
    ) -> None:
        function = embed(executor, subtract)
        unnamed = embed(executor, (5, 3), [np.int32, np.int32])

        assert computed(call(executor, function, unnamed)) == 2

    def test_of_arithmetic(self, executor: FederatingExecutor) -> None:
        plus = intrinsic(flf.GENERIC_PLUS, fl.FunctionType([NAMED, NAMED], NAMED))
        arg = embed(executor, ((1, 2), (10, 20)), [NAMED, NAMED])

        result = computed(call(executor, embed(executor, plus), arg))

        assert (result.z, result.a) == (11, 22)

    @pytest.mark.claim("federating.13", "federating.15")
    @pytest.mark.parametrize("form", ["definition", "building block"])
    def test_of_an_intrinsic(self, executor: FederatingExecutor, form: str) -> None:
        definition = flf.FEDERATED_SUM
        function = (
            embed(executor, definition, SUM)
            if form == "definition"
            else embed(executor, intrinsic(definition, SUM))
        )

        result = call(executor, function, embed(executor, [1, 2, 3], AT_CLIENTS))

        assert result.type_signature == AT_SERVER
        assert computed(result) == 6

    @pytest.mark.claim("federating.15", "semantics.50", "semantics.51")
    def test_of_map_gives_values_that_differ(
        self, executor: FederatingExecutor
    ) -> None:
        arg = embed_pair(executor, increment, embed(executor, [1, 2, 3], AT_CLIENTS))

        result = call(executor, embed(executor, flf.FEDERATED_MAP, MAP), arg)

        assert result.type_signature == AT_CLIENTS
        assert computed(result) == [2, 3, 4]

    @pytest.mark.claim("semantics.51")
    def test_of_map_takes_values_that_are_all_equal(
        self, executor: FederatingExecutor
    ) -> None:
        arg = embed_pair(executor, increment, embed(executor, 5, ALL_EQUAL))

        result = call(executor, embed(executor, flf.FEDERATED_MAP, MAP), arg)

        assert computed(result) == [6, 6, 6]

    @pytest.mark.claim("semantics.52", "federating.18")
    @pytest.mark.parametrize("error", [ValueError, TypeError])
    def test_of_map_all_equal_with_values_that_differ_is_both_errors(
        self, executor: FederatingExecutor, error: type[Exception]
    ) -> None:
        function = embed(executor, flf.FEDERATED_MAP_ALL_EQUAL, MAP_ALL_EQUAL)
        arg = embed_pair(executor, increment, embed(executor, [1, 2, 3], AT_CLIENTS))

        with pytest.raises(error, match="Expected an all-equal value"):
            call(executor, function, arg)

    @pytest.mark.claim("federating.16", "federating.18")
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            pytest.param(
                lambda e: e.create_call(
                    embed(e, flf.FEDERATED_SUM, SUM), embed(e, 1, AT_SERVER)
                ),
                "Expected an argument of type `{int32}@CLIENTS`, found `int32@SERVER`",
                id="argument at another placement",
            ),
            pytest.param(
                lambda e: e.create_call(embed(e.unplaced, ten)),
                "embedded in FederatingExecutor, found `EagerValue`",
                id="function of another executor",
            ),
        ],
    )
    def test_of_wrong_types_is_a_type_error(
        self,
        executor: FederatingExecutor,
        make: Callable[[FederatingExecutor], Any],
        message: str,
    ) -> None:
        with pytest.raises(TypeError, match=message):
            asyncio.run(make(executor))

    @pytest.mark.claim("federating.19", "semantics.44")
    def test_of_a_lambda_is_a_value_error(self, executor: FederatingExecutor) -> None:
        with pytest.raises(ValueError, match=r"found the lambda .*Resolving"):
            call(executor, embed(executor, LAMBDA), embed(executor, 1, INT))

    @pytest.mark.claim("semantics.45")
    def test_of_an_intrinsic_that_nobody_implements(
        self, executor: FederatingExecutor
    ) -> None:
        generic = flf.FEDERATED_SUM.type_signature
        foo = flf.IntrinsicDef("FEDERATED_FOO", "federated_foo", generic)

        with pytest.raises(
            NotImplementedError, match=r"found.* intrinsic `federated_f"
        ):
            call(
                executor,
                embed(executor, foo, SUM),
                embed(executor, [1, 2, 3], AT_CLIENTS),
            )

    @pytest.mark.claim("semantics.39")
    def test_of_sequence_intrinsics_is_the_unplaced_executors(
        self, events: list[str]
    ) -> None:
        unplaced = SequenceExecutor(EagerTFExecutor())
        executor = FederatingExecutor(
            lambda self: RecordingStrategy(self, 0, events), unplaced
        )
        total = flf.Intrinsic("sequence_sum", fl.FunctionType(INTS, INT))

        result = call(
            executor, embed(executor, total), embed(executor, [1, 2, 3], INTS)
        )

        assert computed(result) == 6


def embed_pair(executor: FederatingExecutor, function: Any, value: Any) -> Any:
    return asyncio.run(executor.create_struct([embed(executor, function), value]))


class TestStructs:
    @pytest.mark.claim("federating.27")
    def test_keep_names_and_placements(self, executor: FederatingExecutor) -> None:
        elements = collections.OrderedDict(
            z=embed(executor, [1, 2, 3], AT_CLIENTS), a=embed(executor, 5, INT)
        )

        struct = asyncio.run(executor.create_struct(elements))

        assert str(struct.type_signature) == "<z={int32}@CLIENTS,a=int32>"
        assert (computed(struct).z, computed(struct).a) == ([1, 2, 3], 5)

    @pytest.mark.claim("federating.24")
    def test_at_the_server_are_no_source_of_selections(
        self, executor: FederatingExecutor
    ) -> None:
        placed = embed(executor, (1, 2), fl.FederatedType(NAMED, fl.SERVER))

        with pytest.raises(TypeError, match=r"^Expected a struct"):
            asyncio.run(executor.create_selection(placed, 0))


class TestCompute:
    def test_of_a_function_is_refused(self, executor: FederatingExecutor) -> None:
        for function in (increment, LAMBDA, intrinsic(flf.FEDERATED_SUM, SUM)):
            with pytest.raises(TypeError, match="Expected a value to compute, found a"):
                computed(embed(executor, function))


class TestEmptyCohort:
    @pytest.fixture
    def empty(self, events: list[str]) -> Iterator[FederatingExecutor]:
        executor = FederatingExecutor(
            lambda self: RecordingStrategy(self, 0, events), EagerTFExecutor()
        )
        yield executor
        executor.close()

    @pytest.mark.claim("semantics.53")
    def test_sums_to_zeros(self, empty: FederatingExecutor) -> None:
        member = fl.StructType([fl.TensorType(np.float32, (2,)), np.int64])
        at_clients = fl.FederatedType(member, fl.CLIENTS)
        type_spec = fl.FunctionType(at_clients, fl.FederatedType(member, fl.SERVER))

        result = call(
            empty,
            embed(empty, flf.FEDERATED_SUM, type_spec),
            embed(empty, [], at_clients),
        )

        first, second = computed(result)
        assert (first.tolist(), first.dtype) == ([0, 0], np.float32)
        assert (second, second.dtype) == (0, np.int64)

    def test_returns_what_each_client_would_have(
        self, empty: FederatingExecutor
    ) -> None:
        value = embed(empty, 5, ALL_EQUAL)
        arg = embed_pair(empty, increment, value)
        function = embed(empty, flf.FEDERATED_MAP_ALL_EQUAL, MAP_ALL_EQUAL)

        mapped = call(empty, function, arg)

        assert computed(value) == 5
        assert computed(mapped) == 6


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: FederatingExecutor(NOTHING, NOTHING), "`unplaced_executor` to be"),
        (lambda: FederatingExecutor(NOTHING, EagerTFExecutor()), "`strategy_factory`"),
        (lambda: ReferenceResolvingExecutor(NOTHING), "`target_executor` to be"),
    ],
    ids=["executor", "strategy", "target"],
)
def test_executors_over_nothing_are_refused(build: Any, found: str) -> None:
    with pytest.raises(errors.ValueMismatchError, match=found):
        build()


@pytest.fixture
def other(events: list[str]) -> Iterator[FederatingExecutor]:
    """An executor for another number of clients."""
    executor = FederatingExecutor(
        lambda self: RecordingStrategy(self, NUM_CLIENTS + 2, events), EagerTFExecutor()
    )
    yield executor
    executor.close()


FOREIGN: dict[str, Callable[[flf.Executor, flf.Executor], Any]] = {
    "function": lambda here, there: here.create_call(
        embed(there, intrinsic(flf.FEDERATED_SUM, SUM)),
        embed(here, [1] * NUM_CLIENTS, AT_CLIENTS),
    ),
    "argument": lambda here, there: here.create_call(
        embed(here, intrinsic(flf.FEDERATED_SUM, SUM)),
        embed(there, [1] * (NUM_CLIENTS + 2), AT_CLIENTS),
    ),
    "argument without placement": lambda here, there: here.create_call(
        embed(here, increment), embed(there, 1, INT)
    ),
    "struct": lambda here, there: here.create_struct(
        [embed(here, 1, INT), embed(there, 1, INT)]
    ),
    "selection": lambda here, there: here.create_selection(
        asyncio.run(there.create_struct([embed(there, 1, INT)])), 0
    ),
    "value": lambda here, there: here.create_value(embed(there, 1, INT), INT),
    "part of a value": lambda here, there: here.create_value(
        [embed(there, 1, AT_SERVER)], fl.StructType([AT_SERVER])
    ),
    "selected element": lambda here, there: here.create_struct(
        [
            asyncio.run(
                there.create_selection(embed(there, [1], fl.StructType([AT_SERVER])), 0)
            )
        ]
    ),
    "result": lambda here, there: here.create_struct(
        [
            call(
                there,
                embed(there, intrinsic(flf.FEDERATED_SUM, SUM)),
                embed(there, [1] * (NUM_CLIENTS + 2), AT_CLIENTS),
            )
        ]
    ),
}


@pytest.mark.claim("federating.16", "federating.23", "federating.28")
@pytest.mark.parametrize("way", FOREIGN)
def test_values_of_another_federating_executor_are_refused(
    executor: FederatingExecutor, other: FederatingExecutor, way: str
) -> None:
    with pytest.raises(TypeError, match=r"in this FederatingExecutor, found .*another"):
        asyncio.run(FOREIGN[way](executor, other))


def test_values_of_another_stack_are_refused(
    executor: FederatingExecutor, other: FederatingExecutor
) -> None:
    here, there = (
        ReferenceResolvingExecutor(executor),
        ReferenceResolvingExecutor(other),
    )
    add_all = embed(here, intrinsic(flf.FEDERATED_SUM, SUM))
    clients = embed(there, [1] * (NUM_CLIENTS + 2), AT_CLIENTS)

    with pytest.raises(TypeError, match="in this FederatingExecutor"):
        call(here, add_all, clients)
