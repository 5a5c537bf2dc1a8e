"""Loaded graphs share nothing: neither names of functions nor variables nor tables."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
import concurrent.futures
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.language import blocks
from tests.fixtures import collect_garbage

NUM_CALLS = 32
NUM_STEPS = 2000
ELSEWHERE = f"""
import asyncio, concurrent.futures, json, os, pathlib, sys
import numpy as np
from ray_fed import tensorflow as rtf
import tensorflow as tf
from ray_fed.executors.eager_tf import EagerTFExecutor

def trace(factor):
    @rtf.computation(np.int32)
    def scaled_sum(n):
        return tf.while_loop(
            lambda i, total: i < n, lambda i, total: (i + 1, total + factor * i), [0, 0]
        )[1]
    content = scaled_sum.to_proto().SerializeToString()
    pathlib.Path(sys.argv[1], str(factor)).write_bytes(content)

tf.config.threading.set_inter_op_parallelism_threads(4)
child = os.fork()
trace(10 if child else 3)
if not child:
    os._exit(0)
os.waitpid(child, 0)

@rtf.computation(np.int32)
def accumulate(x):
    variable = tf.Variable(tf.zeros([], tf.int32))
    _, last = tf.while_loop(
        lambda i, _: i < {NUM_STEPS},
        lambda i, _: (i + 1, variable.assign_add(x).read_value()),
        [0, 0],
    )
    return last

executor = EagerTFExecutor()
function = asyncio.run(executor.create_value(accumulate))

async def call(x):
    argument = await executor.create_value(x, np.int32)
    return int(await (await executor.create_call(function, argument)).compute())

with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda x: asyncio.run(call(x)), range({NUM_CALLS})))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def elsewhere(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[pathlib.Path, list[int]]:
    """What other processes traced, and what one computed on several threads.

    The process of the tests has one thread for TensorFlow, where calls do not mix.
    """
    folder = tmp_path_factory.mktemp("traced")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return folder, json.loads(done.stdout)


@pytest.fixture
def executor() -> EagerTFExecutor:
    return EagerTFExecutor()


def load(executor: EagerTFExecutor, comp: Any) -> Callable[..., Any]:
    """Return an embedded computation as a function of one value."""
    function = asyncio.run(executor.create_value(comp))
    parameter: Any = function.type_signature
    parameter = parameter.parameter

    async def call(arg: Any) -> Any:
        argument = None
        if parameter is not None:
            argument = await executor.create_value(arg, parameter)
        called = await executor.create_call(function, argument)
        return await called.compute()

    return lambda arg=None: asyncio.run(call(arg))


def by_hand(
    build: Callable[[Any], None], parameter: Any, result: Any, init: str = ""
) -> Any:
    """Return a computation whose graph and bindings `build` writes."""
    message = graph_message.pb.TensorFlow(initialize_op=init)
    with tf.Graph().as_default() as built:
        build(message)
    message.graph_def.Pack(built.as_graph_def())
    return graph_message.build_computation(message, fl.FunctionType(parameter, result))


def function_names(proto: Any) -> set[str]:
    library = graph_message.graph_of(proto.tensorflow).library
    return {function.signature.name for function in library.function}


@pytest.mark.slow
@pytest.mark.claim("semantics.01")
def test_functions_of_two_processes_with_equal_names_both_run_right(
    executor: EagerTFExecutor, elsewhere: tuple[pathlib.Path, list[int]]
) -> None:
    threes, tens = (
        blocks.pb.Computation.FromString((elsewhere[0] / name).read_bytes())
        for name in ("3", "10")
    )

    by_three, by_ten = load(executor, threes), load(executor, tens)

    assert function_names(threes) == function_names(tens) != set()
    assert [by_three(4), by_ten(4), by_three(5)] == [18, 60, 30]


class TestConcurrentCalls:
    """Of one loaded function, from several threads."""

    @pytest.mark.slow
    def test_have_variables_of_their_own(
        self, elsewhere: tuple[pathlib.Path, list[int]]
    ) -> None:
        _, results = elsewhere

        assert results == [NUM_STEPS * x for x in range(NUM_CALLS)]

    def test_have_tables_of_their_own(self, executor: EagerTFExecutor) -> None:
        @rtf.computation(np.int64)
        def distinct(n: Any) -> Any:
            table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
            for index in tf.range(n):
                table.insert(index, index)
            return table.size()

        function = load(executor, distinct)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(function, range(40)))

        assert results == list(range(40))


class TestInitialization:
    @pytest.mark.claim("semantics.03")
    def test_runs_before_what_is_in_a_loop_of_control_flow_v1(
        self, executor: EagerTFExecutor
    ) -> None:
        def build(message: Any) -> None:
            count = tf.compat.v1.placeholder(tf.int32, [], "count")
            variable: Any = tf.compat.v1.Variable(5, use_resource=True)
            tf.compat.v1.disable_control_flow_v2()
            try:
                _, total = tf.compat.v1.while_loop(
                    lambda i, _: i < count,
                    lambda i, total: (i + 1, total + variable.read_value()),
                    [tf.constant(0), tf.constant(0)],
                )
                cond: Any = tf.compat.v1.cond
                tf.identity(cond(total > 10, lambda: total, lambda: -total), "result")
            finally:
                tf.compat.v1.enable_control_flow_v2()
            tf.group(variable.initializer, name="start")
            message.parameter.tensor.tensor_name = "count:0"
            message.result.tensor.tensor_name = "result:0"

        comp = by_hand(build, np.int32, np.int32, "start")
        function = load(executor, comp)

        ops = {node.op for node in graph_message.graph_of(comp.tensorflow).node}
        assert {"Enter", "Exit", "NextIteration", "Switch", "Merge"} <= ops
        assert [function(n) for n in (3, 2, 3)] == [15, -10, 15]

    @pytest.mark.claim("semantics.03", "semantics.04")
    def test_runs_before_control_flow_v2(self, executor: EagerTFExecutor) -> None:
        @rtf.computation(np.int32)
        def nested(n: Any) -> Any:
            variable: Any = tf.Variable(tf.constant(100))
            for index in tf.range(n):
                if index % 2 == 1:
                    variable.assign_add(index)
                else:
                    step = tf.constant(0)
                    while step < index:
                        variable.assign_sub(1)
                        step += 1
            return variable.read_value()

        function = load(executor, nested)

        library = graph_message.graph_of(nested.to_proto().tensorflow).library
        ops = {node.op for body in library.function for node in body.node_def}
        assert ops & {"If", "StatelessIf"}
        assert ops & {"While", "StatelessWhile"}
        assert [function(5), function(5)] == [100 + (1 + 3) - (2 + 4)] * 2

    def test_may_be_named_with_or_without_a_caret(
        self, executor: EagerTFExecutor
    ) -> None:
        def build(message: Any) -> None:
            variable: Any = tf.compat.v1.Variable(7, use_resource=True)
            tf.identity(variable.read_value(), "result")
            tf.group(variable.initializer, name="start")
            message.result.tensor.tensor_name = "result:0"

        names = ["start", "^start"]
        functions = [load(executor, by_hand(build, None, np.int32, n)) for n in names]

        assert [function() for function in functions] == [7, 7]


class TestBindings:
    """What foreign messages may say and our own do not."""

    @pytest.mark.claim("semantics.08")
    def test_a_session_token_is_fed(self, executor: EagerTFExecutor) -> None:
        def build(message: Any) -> None:
            token = tf.compat.v1.placeholder(tf.string, [], "session_token")
            x = tf.compat.v1.placeholder(tf.int32, [], "x")
            tf.identity(tf.strings.length(token) + x, "result")
            message.session_token_tensor_name = "session_token:0"
            message.parameter.tensor.tensor_name = "x:0"
            message.result.tensor.tensor_name = "result:0"

        comp = by_hand(build, np.int32, np.int32)
        foreign: Any = fl.framework.ConcreteComputation.from_proto(comp)
        inside = rtf.computation(lambda x: 10 * foreign(x), np.int32)

        assert load(executor, comp)(5) == 5
        assert load(executor, inside)(5) == 50

    def test_results_may_be_parameters_and_may_repeat(
        self, executor: EagerTFExecutor
    ) -> None:
        def build(message: Any) -> None:
            for name in ("used", "unused"):
                tf.compat.v1.placeholder(tf.int32, [], name)
                element = message.parameter.struct.element.add()
                element.tensor.tensor_name = f"{name}:0"
            for _ in range(2):
                element = message.result.struct.element.add()
                element.tensor.tensor_name = "used:0"

        pair = [np.int32, np.int32]
        function = load(executor, by_hand(build, pair, pair))

        assert list(function((1, 2))) == [1, 1]

    def test_a_result_may_be_empty(self, executor: EagerTFExecutor) -> None:
        def build(message: Any) -> None:
            tf.compat.v1.placeholder(tf.int32, [], "unused")
            message.parameter.tensor.tensor_name = "unused:0"
            message.result.struct.SetInParent()

        function = load(executor, by_hand(build, np.int32, []))

        assert len(function(1)) == 0

    def test_sequences_may_be_serialized_graphs(
        self, executor: EagerTFExecutor
    ) -> None:
        element = tf.TensorSpec([], tf.int64)

        def build(message: Any) -> None:
            taken = tf.compat.v1.placeholder(tf.string, [], "taken")
            variant = tf.raw_ops.DatasetFromGraph(graph_def=taken)
            dataset = tf.data.experimental.from_variant(variant, element)
            tf.raw_ops.DatasetToGraphV2(
                input_dataset=tf.data.experimental.to_variant(
                    dataset.map(lambda x: x + 1)
                ),
                name="result",
            )
            message.parameter.sequence.graph_def_tensor_name = "taken:0"
            message.result.sequence.graph_def_tensor_name = "result:0"

        sequence = fl.SequenceType(np.int64)
        comp = by_hand(build, sequence, sequence)
        foreign = fl.framework.ConcreteComputation.from_proto(comp)
        twice = rtf.computation(lambda ds: foreign(foreign(ds)), sequence)

        assert load(executor, comp)([1, 2]) == [2, 3]
        assert load(executor, twice)([1, 2]) == [3, 4]


class TestIsolate:
    """As a graph that was called inside of another one is isolated again."""

    @staticmethod
    def traced() -> Any:
        @rtf.computation(np.int32)
        def stateful(n: Any) -> Any:
            variable: Any = tf.Variable(tf.constant(0))
            pairs = tf.lookup.KeyValueTensorInitializer([1, 2], [10, 20])
            table = tf.lookup.StaticHashTable(pairs, 0)
            for index in tf.range(n):
                variable.assign_add(table.lookup(index))
            return variable.read_value()

        return stateful

    def test_twice_runs_as_once(self) -> None:
        message = self.traced().to_proto().tensorflow
        graph_def = graph_message.graph_of(message)
        feeds = graph_message.bound_names(message.parameter)
        fetches = graph_message.bound_names(message.result)

        results: list[int] = []
        for _ in range(3):
            loader.isolate(graph_def, message.initialize_op)
            function = loader.import_function(graph_def, feeds, fetches)
            results.append(int(function([tf.constant(3)])[0]))

        assert results == [30, 30, 30]

    @pytest.mark.claim("semantics.02")
    def test_renames_every_use_of_a_function(self) -> None:
        message = self.traced().to_proto().tensorflow
        graph_def = graph_message.graph_of(message)
        before = {f.signature.name for f in graph_def.library.function}

        loader.isolate(graph_def, message.initialize_op)

        after = {f.signature.name for f in graph_def.library.function}
        text = str(graph_def)
        assert len(after) == len(before) > 0
        assert all(name.rpartition("_")[0] in before for name in after)
        assert not any(f'"{name}"' in text for name in before)

    @pytest.mark.claim("semantics.02")
    def test_names_depend_on_the_content_alone(self) -> None:
        message = self.traced().to_proto().tensorflow
        first, second = graph_message.graph_of(message), graph_message.graph_of(message)
        changed = graph_message.graph_of(message)
        changed.library.function[0].attr["_marked"].b = True

        for graph_def in (first, second, changed):
            loader.isolate(graph_def, message.initialize_op)

        names = [
            {f.signature.name for f in graph_def.library.function}
            for graph_def in (first, second, changed)
        ]
        assert names[0] == names[1]
        assert not names[0] & names[2]

    @pytest.mark.claim("semantics.06")
    def test_leaves_no_handle_that_calls_could_share(self) -> None:
        message = self.traced().to_proto().tensorflow
        graph_def = graph_message.graph_of(message)
        before = collections.Counter(node.op for node in graph_def.node)

        loader.isolate(graph_def, message.initialize_op)

        after = collections.Counter(node.op for node in graph_def.node)
        names = {
            node.attr["shared_name"].s
            for node in graph_def.node
            if "shared_name" in node.attr
        }
        assert after["AnonymousHashTable"] == before["HashTableV2"] == 1
        assert names == {b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"}

    def test_gradients_of_functions_follow_their_new_names(self) -> None:
        graph_def = tf.compat.v1.GraphDef()
        for name in ("f", "f_grad"):
            graph_def.library.function.add().signature.name = name
        graph_def.library.gradient.add(function_name="f", gradient_func="f_grad")
        call = graph_def.node.add(name="call", op="f")
        call.attr["names"].s = b"f"
        call.attr["branches"].list.func.add(name="f_grad")

        loader.isolate(graph_def, None)

        f, f_grad = (f.signature.name for f in graph_def.library.function)
        gradient = graph_def.library.gradient[0]
        assert f != "f"
        assert (gradient.function_name, gradient.gradient_func) == (f, f_grad)
        assert (call.op, call.attr["names"].s.decode()) == (f, f)
        assert call.attr["branches"].list.func[0].name == f_grad


class TestLibraries:
    """Functions that a graph brings live as long as what was made of it."""

    @staticmethod
    def imported(message: Any) -> Callable[..., Any]:
        graph_def = graph_message.graph_of(message)
        loader.isolate(graph_def, None)
        return loader.import_function(
            graph_def,
            graph_message.bound_names(message.parameter),
            graph_message.bound_names(message.result),
        )

    @staticmethod
    def registered() -> set[str]:
        collect_garbage()
        eager: Any = context.context()
        names: list[str] = eager.list_function_names()
        # TensorFlow keeps a function of its own for each op that runs eagerly.
        return {name for name in names if not name.startswith("__wrapped__")}

    @staticmethod
    def message(result: Callable[[Any], Any]) -> Any:
        @rtf.computation(np.int32)
        def looped(n: Any) -> Any:
            for index in tf.range(3):
                n += index
            return result(n)

        return looped.to_proto().tensorflow

    def test_are_freed_with_the_last_function_of_the_graph(self) -> None:
        message = self.message(lambda n: n)
        before = self.registered()

        first, second = self.imported(message), self.imported(message)
        with_both = self.registered() - before
        del first
        result = int(second([tf.constant(4)])[0])
        del second

        assert any(name.startswith("while_body") for name in with_both)
        assert result == 7
        assert self.registered() <= before

    def test_are_freed_when_a_graph_cannot_be_loaded(self) -> None:
        message = self.message(lambda n: n)
        message.result.tensor.tensor_name = "missing:0"
        before = self.registered()

        with pytest.raises(KeyError, match="missing"):
            self.imported(message)

        assert self.registered() <= before

    def test_leave_a_dataset_that_outlives_them_whole(self) -> None:
        message = self.message(
            lambda n: tf.data.Dataset.range(3).map(
                lambda x: tf.while_loop(
                    lambda y: y < 100, lambda y: y * 10, [x + tf.cast(n, tf.int64)]
                )
            )
        )
        before = self.registered()
        function = self.imported(message)
        variant = function([tf.constant(4)])[0]
        spec = tf.TensorSpec([], tf.int64)
        dataset = tf.data.experimental.from_variant(variant, spec)  # of 7, 8, 9

        del function
        after = self.registered()
        elements = [int(element) for element in dataset]

        assert after <= before
        assert elements == [700, 800, 900]
