"""Programs whose results and graph identities must not change between commits.

    python -m tests.stored_results      stores the results of this commit

The file `stored_results.json` has a digest of each result, and `contexts/
test_stored_results` compares the digests. The identities of graphs decide random
numbers, and a resumed run compares identities. If a bit has to change, store the
digests again, and give the reason in the commit. This module uses only public names, so
that it runs at any commit.
"""

# pyright: reportUnknownLambdaType=false

import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf

import ray_fed
from ray_fed import framework, learning
from ray_fed import tensorflow as rtf
from ray_fed.learning import aggregators
from ray_fed.program import ClientData

FILE = pathlib.Path(__file__).with_suffix(".json")
NUM_CLIENTS = 13
SETTINGS: Mapping[str, Any] = {
    "seed": 7,
    "clients_per_leaf": 3,
    "default_num_clients": NUM_CLIENTS,
}
"""The settings on which the bits of results depend. They give five leaves."""

Invoke = Callable[[Any, Any], Any]
"""Function from a computation and its argument to the result, such as a context's."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A few calls of computations on small arguments.

    Attributes:
        computations: Computations that the program calls.
        run: Function from an `Invoke` to the results of all calls.
    """

    computations: Sequence[Any]
    run: Callable[[Invoke], Any]


PROGRAMS: dict[str, Callable[[], Program]] = {}
HANG_ON: dict[str, tuple[str, ...]] = {}
"""For each program, the keys of `environment` on which its bits depend."""

DRAWS = ("tensorflow",)
"""Keys for programs with random numbers, which depend on TensorFlow's graphs."""
FLOATS = ("tensorflow", "instruction_set")
"""Keys for floats, unless they are only sums, products and quotients in an order."""
LEARNING = ("keras", *FLOATS)
IDENTITIES = ("tensorflow", "keras", "federated_language")


def _program(*facts: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Register a function that builds a program, under its name as words."""

    def register(build: Callable[[], Program]) -> Callable[[], Program]:
        name = build.__name__.strip("_").replace("_", " ")
        PROGRAMS[name] = functools.cache(build)
        HANG_ON[name] = facts
        return build

    return register


def _calls(comp: Any, *arguments: Any) -> Program:
    """Return two calls of a computation, which draw different random numbers."""
    argument = arguments[0] if len(arguments) == 1 else arguments or None
    return Program([comp], lambda invoke: [invoke(comp, argument) for _ in range(2)])


federated = cast("Callable[..., Any]", fl.federated_computation)


def _clients(member: Any, *, all_equal: bool = False) -> fl.FederatedType:
    return fl.FederatedType(member, fl.CLIENTS, all_equal=all_equal)


def _server(member: Any) -> fl.FederatedType:
    return fl.FederatedType(member, fl.SERVER)


INT, INTS = _clients(np.int32), fl.SequenceType(np.int32)
VECTOR = fl.TensorType(np.int64, [3])
NUMBERS = [np.int32((37 * i * i + 11 * i) % 101 - 50) for i in range(NUM_CLIENTS)]
FLOAT_NUMBERS = [np.float32(number) / np.float32(7) for number in NUMBERS]
LISTS = [
    [np.int32(number + 3 * k) for k in range(2 + i % 4)]
    for i, number in enumerate(NUMBERS)
]
RECORD = collections.OrderedDict(
    a=fl.TensorType(np.int32, [2]), b=collections.OrderedDict(c=np.int64, d=np.float32)
)
RECORDS = [
    {"a": np.array([x, -x]), "b": {"c": np.int64(x) << 33, "d": np.float32(x) / 8}}
    for x in NUMBERS
]
LARGE = 2**40
"""Bound of all random integers, exclusive."""


def _drawn(*shape: int) -> Any:
    return tf.random.uniform(shape, maxval=LARGE, dtype=tf.int64)


@rtf.computation(np.int32, np.int32)
def _add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.int32)
def _triple(x: Any) -> Any:
    return x * 3


@_program()
def sums_minima_and_maxima_of_structures() -> Program:
    run = federated(
        lambda x: [fl.federated_sum(x), fl.federated_min(x), fl.federated_max(x)],
        _clients(RECORD),
    )
    return _calls(run, RECORDS)


@_program()
def order_of_sums() -> Program:
    run = federated(
        lambda x: (fl.federated_sum(x), fl.federated_mean(x)), _clients(np.float32)
    )
    return _calls(run, FLOAT_NUMBERS)


@_program()
def weighted_mean() -> Program:
    @federated(_clients(np.float32), _clients(np.int32))
    def run(values: Any, weights: Any) -> Any:
        return fl.federated_mean(values, weights)

    return _calls(run, FLOAT_NUMBERS, [abs(number) for number in NUMBERS])


@_program()
def dtypes_at_clients() -> Program:
    @rtf.computation(np.int32)
    def cast_to_all(x: Any) -> Any:
        dtypes = [tf.bool, tf.uint8, tf.int16, tf.float16, tf.float64, tf.complex64]
        return [tf.cast(x, dtype) for dtype in dtypes]

    return _calls(federated(lambda x: fl.federated_map(cast_to_all, x), INT), NUMBERS)


@_program()
def round_with_a_state() -> Program:
    @rtf.computation(RECORD, np.int32)
    def client_work(state: Any, x: Any) -> Any:
        return state["a"] * x

    @rtf.computation(RECORD, fl.TensorType(np.int32, [2]))
    def server_work(state: Any, total: Any) -> Any:
        return collections.OrderedDict(a=state["a"] + total % 11, b=state["b"])

    @federated(_server(RECORD), INT)
    def next_state(state: Any, values: Any) -> Any:
        sent = fl.federated_broadcast(state)
        total = fl.federated_sum(fl.federated_map(client_work, (sent, values)))
        return fl.federated_map(server_work, (state, total)), total

    def run(invoke: Invoke) -> Any:
        state, metrics = RECORDS[5], list[Any]()
        for _ in range(3):
            state, total = invoke(next_state, (state, NUMBERS))
            metrics.append(total)
        return state, metrics

    return Program([next_state], run)


@_program()
def values_without_an_argument() -> Program:
    @rtf.computation
    def make() -> Any:
        return collections.OrderedDict(x=tf.range(4), s=tf.constant("é"))

    @federated
    def run() -> Any:
        at_clients = fl.federated_eval(make, fl.CLIENTS)
        ones = fl.federated_value(1, fl.CLIENTS)
        total = fl.federated_sum(fl.federated_map(_triple, ones))
        return at_clients, fl.federated_eval(make, fl.SERVER), ones, total

    return _calls(run)


@_program()
def zips_and_captures() -> Program:
    @federated(INT, _server(np.int32), _clients(np.int32, all_equal=True), np.int32)
    def run(values: Any, at_server: Any, everywhere: Any, unplaced: Any) -> Any:
        add_it = federated(lambda x: {"s": _add(x, unplaced), "x": [x]}, np.int32)
        zipped = fl.federated_zip({"z": values, "a": (everywhere, [values])})
        sent = fl.federated_broadcast(at_server)
        summed = fl.federated_map(_add, (values, sent))
        return zipped, fl.federated_map(add_it, values), fl.federated_sum(summed)

    return _calls(run, NUMBERS, 5, 7, 9)


@_program()
def loops_and_branches_in_graphs() -> Program:
    @tf.function
    def collatz(x: Any) -> Any:
        steps = 0
        while x > 1:
            x = tf.cond(x % 2 == 0, lambda x=x: x // 2, lambda x=x: 3 * x + 1)
            steps += 1
        return steps

    @rtf.computation(np.int32)
    def work(x: Any) -> Any:
        branches = [lambda: x * 2, lambda: x - 100, lambda: tf.abs(x)]
        chosen = tf.switch_case(tf.abs(x) % 3, branches)
        mapped = tf.map_fn(lambda k: k * k + x, tf.range(4))
        return collatz(tf.abs(x)), chosen, mapped

    @federated(INT)
    def run(values: Any) -> Any:
        worked = fl.federated_map(work, values)
        return fl.federated_sum(worked), worked

    return _calls(run, NUMBERS)


@_program()
def variables_and_tables() -> Program:
    pairs = tf.lookup.KeyValueTensorInitializer([0, 1, 2], ["no", "one", "two"])

    @rtf.computation(np.int32)
    def work(x: Any) -> Any:
        initial: Any = [1, 2, 3]
        variable = tf.Variable(initial)
        variable.assign_add(tf.fill([3], x))
        table = tf.lookup.StaticHashTable(pairs, "many")
        return variable.read_value(), table.lookup(tf.abs(x) % 4)

    @federated(INT)
    def run(values: Any) -> Any:
        worked = fl.federated_map(work, values)
        return worked, fl.federated_sum(worked[0])

    return _calls(run, NUMBERS)


@_program()
def secure_sums() -> Program:
    @federated(INT)
    def run(values: Any) -> Any:
        positive = fl.federated_map(rtf.computation(lambda x: x % 16, np.int32), values)
        few_bits = fl.federated_secure_sum_bitwidth(positive, 4)
        return fl.federated_secure_sum(positive, 15), few_bits

    return _calls(run, NUMBERS)


@_program()
def cohorts_of_no_client_one_and_a_hundred() -> Program:
    run = federated(lambda x: fl.federated_sum(fl.federated_map(_triple, x)), INT)
    cohorts = [[np.int32(i * i + 1) for i in range(size)] for size in (0, 1, 100)]
    return Program([run], lambda invoke: [invoke(run, each) for each in cohorts])


@_program()
def large_values() -> Program:
    size = 50_000
    vector = fl.TensorType(np.int32, [size])

    @rtf.computation(vector, vector)
    def multiply(x: Any, y: Any) -> Any:
        return x * y

    @federated(_clients(vector), _server(vector))
    def run(values: Any, state: Any) -> Any:
        pairs = (values, fl.federated_broadcast(state))
        return fl.federated_sum(fl.federated_map(multiply, pairs))

    rows = [np.arange(size, dtype=np.int32) % 97 + number for number in NUMBERS]
    return _calls(run, rows, rows[4])


def _parenthesised(values: Any) -> Any:
    """Aggregate numbers to a text that shows the order of accumulations and merges."""
    zero = collections.OrderedDict(text="", count=0)
    partial = fl.to_type(collections.OrderedDict(text=np.str_, count=np.int32))

    @rtf.computation(partial, np.int32)
    def accumulate(partial: Any, x: Any) -> Any:
        text = tf.strings.join([partial["text"], " ", tf.strings.as_string(x)])
        return collections.OrderedDict(text=text, count=partial["count"] + 1)

    @rtf.computation(partial, partial)
    def merge(a: Any, b: Any) -> Any:
        text = tf.strings.join(["(", a["text"], " |", b["text"], ")"])
        return collections.OrderedDict(text=text, count=a["count"] + b["count"])

    report = rtf.computation(lambda whole: whole, partial)
    return fl.federated_aggregate(values, zero, accumulate, merge, report)


@_program()
def merge_tree_as_a_text() -> Program:
    run = federated(_parenthesised, INT)
    return Program(
        [run], lambda invoke: [invoke(run, each) for each in (NUMBERS, NUMBERS[:4], [])]
    )


@_program()
def texts_beside_numbers() -> Program:
    @rtf.computation(np.str_, np.int32)
    def name(text: Any, x: Any) -> Any:
        joined = tf.strings.join([text, "-", tf.strings.as_string(x)])
        return collections.OrderedDict(name=joined, size=tf.strings.length(joined))

    @federated(_clients(np.str_), INT)
    def run(texts: Any, values: Any) -> Any:
        named = fl.federated_map(name, (texts, values))
        return named, fl.federated_sum(named["size"]), texts

    return _calls(run, ["x" * i + "\0é" for i in range(NUM_CLIENTS)], NUMBERS)


@_program()
def three_stages_and_values_at_clients() -> Program:
    @federated(INT)
    def run(values: Any) -> Any:
        total = fl.federated_broadcast(fl.federated_sum(values))
        shifted = fl.federated_map(_add, (values, total))
        least = fl.federated_broadcast(fl.federated_min(shifted))
        again = fl.federated_map(_add, (shifted, least))
        return again, fl.federated_max(again), shifted

    return _calls(run, NUMBERS)


@_program()
def merge_that_hangs_on_the_argument() -> Program:
    """A computation without a mergeable form."""

    @federated(np.int32, INT)
    def run(least: Any, values: Any) -> Any:
        merge = federated(lambda x, y: _add(_add(x, y), least), np.int32, np.int32)
        total = fl.federated_aggregate(values, np.int32(0), _add, merge, _triple)
        return total, fl.federated_map(_triple, values)

    return _calls(run, 5, NUMBERS)


@_program()
def form_written_by_hand() -> Program:
    up_to_merge = federated(fl.federated_sum, INT)
    after_merge = federated(
        lambda x, total: (fl.federated_map(_triple, x), total), INT, _server(np.int32)
    )
    form = framework.MergeableCompForm(up_to_merge, _add, after_merge)
    parts = [up_to_merge, _add, after_merge]
    return Program(parts, lambda invoke: invoke(form, NUMBERS))


TABLE = fl.TensorType(np.int32, [8, 2])
ROWS = np.arange(16, dtype=np.int32).reshape(8, 2) ** 3


def _selection(gather: Any, *, computes_keys: bool) -> Program:
    """Return a program that sums rows of a table, which clients' keys select."""

    @rtf.computation(fl.SequenceType(fl.TensorType(np.int64, [2])))
    def add_up(rows: Any) -> Any:
        return rows.reduce(tf.zeros([2], tf.int64), lambda a, b: a * 3 + b)

    @rtf.computation(fl.TensorType(np.int32, [3]))
    def turn(keys: Any) -> Any:
        return (keys * 5 + 2) % 8

    @federated(_clients(fl.TensorType(np.int32, [3])), _server(TABLE))
    def run(keys: Any, table: Any) -> Any:
        chosen = fl.federated_map(turn, keys) if computes_keys else keys
        largest = fl.federated_value(7, fl.SERVER)
        rows = fl.federated_select(chosen, largest, table, gather)
        added = fl.federated_map(add_up, rows)
        return added, fl.federated_sum(added)

    keys = [np.array([x % 8, (x + 3) % 8, 1], np.int32) for x in NUMBERS]
    return _calls(run, keys, ROWS)


@rtf.computation(TABLE, np.int32)
def _row(table: Any, key: Any) -> Any:
    return tf.cast(table[key], tf.int64)


@rtf.computation(TABLE, np.int32)
def _row_and_draw(table: Any, key: Any) -> Any:
    return tf.cast(table[key], tf.int64) + _drawn(2)


@_program()
def selection() -> Program:
    return _selection(_row, computes_keys=False)


@_program()
def selection_by_keys_that_clients_compute() -> Program:
    return _selection(_row, computes_keys=True)


@_program(*DRAWS)
def selection_that_draws() -> Program:
    return _selection(_row_and_draw, computes_keys=False)


@_program(*DRAWS)
def draws_of_clients() -> Program:
    @rtf.computation(np.int32)
    def draw(x: Any) -> Any:
        loop = tf.constant(0, tf.int64)
        for _ in tf.range(3):
            loop += _drawn()
        shuffled = tf.random.shuffle(tf.range(10) + x)
        return _drawn(3), shuffled, loop, tf.Variable(_drawn(3)).read_value()

    @federated(INT)
    def run(values: Any) -> Any:
        drawn = fl.federated_map(draw, values)
        return drawn, fl.federated_sum(drawn)

    return _calls(run, NUMBERS)


@_program(*DRAWS)
def draws_seen_by_two_stages() -> Program:
    draw = rtf.computation(lambda x: tf.cast(x, tf.int64) + _drawn(3), np.int32)
    subtract = rtf.computation(lambda x, y: x - y, VECTOR, VECTOR)

    @federated(INT)
    def run(values: Any) -> Any:
        drawn = fl.federated_map(draw, values)
        least = fl.federated_broadcast(fl.federated_min(drawn))
        above = fl.federated_map(subtract, (drawn, least))
        return above, fl.federated_max(above), drawn

    return _calls(run, NUMBERS)


@_program(*DRAWS)
def draws_of_zero_accumulate_merge_and_report() -> Program:
    zero = rtf.computation(lambda: _drawn(3))
    accumulate = rtf.computation(
        lambda a, x: a * 3 + tf.cast(x, tf.int64) + _drawn(3), VECTOR, np.int32
    )
    merge = rtf.computation(lambda a, b: a * 5 + b + _drawn(3), VECTOR, VECTOR)
    report = rtf.computation(lambda a: (a, _drawn(3)), VECTOR)

    @federated(INT)
    def run(values: Any) -> Any:
        return fl.federated_aggregate(values, zero(), accumulate, merge, report)

    return _calls(run, NUMBERS)


@_program(*DRAWS)
def draws_at_the_server() -> Program:
    draw = rtf.computation(lambda: _drawn(3))
    draw_after = rtf.computation(lambda x: (x, _drawn(3)), np.int32)

    @federated(INT)
    def run(values: Any) -> Any:
        first, second = (fl.federated_eval(draw, fl.SERVER) for _ in range(2))
        total = fl.federated_map(draw_after, fl.federated_sum(values))
        return first, second, total, fl.federated_eval(draw, fl.CLIENTS), draw()

    return _calls(run, NUMBERS)


@_program(*DRAWS)
def draws_without_a_placement() -> Program:
    return _calls(rtf.computation(lambda x: (x, _drawn(3)), np.int32), 3)


@_program(*DRAWS)
def draws_in_datasets() -> Program:
    @rtf.computation(INTS)
    def work(numbers: Any) -> Any:
        shuffled = numbers.shuffle(4).repeat(2).batch(2)
        drawn = shuffled.map(lambda x: tf.reduce_sum(tf.cast(x, tf.int64)) + _drawn())
        return drawn.reduce(tf.constant(0, tf.int64), lambda a, b: a * 3 + b)

    @federated(_clients(INTS))
    def run(datasets: Any) -> Any:
        worked = fl.federated_map(work, datasets)
        return worked, fl.federated_sum(worked)

    return _calls(run, LISTS)


@_program(*DRAWS)
def dropout() -> Program:
    vector = fl.TensorType(np.float32, [8])
    drop = rtf.computation(lambda x: tf.nn.dropout(x, 0.5), vector)
    run = federated(
        lambda x: fl.federated_sum(fl.federated_map(drop, x)), _clients(vector)
    )
    return _calls(run, [np.full(8, number, np.float32) for number in FLOAT_NUMBERS])


@_program(*FLOATS)
def draws_of_floats() -> Program:
    @rtf.computation(np.float32)
    def draw(x: Any) -> Any:
        return tf.random.normal([3]) + x, tf.random.truncated_normal([2])

    @federated(_clients(np.float32))
    def run(values: Any) -> Any:
        drawn = fl.federated_map(draw, values)
        return drawn, fl.federated_mean(drawn)

    return _calls(run, FLOAT_NUMBERS)


@_program(*FLOATS)
def functions_and_products_of_floats() -> Program:
    vector = fl.TensorType(np.float32, [4])

    @rtf.computation(np.float32, vector)
    def work(x: Any, state: Any) -> Any:
        matrix = tf.sin(tf.reshape(tf.range(16, dtype=tf.float32), [4, 4])) * x
        return tf.linalg.matvec(matrix, tf.exp(state / 9)), tf.nn.softmax(state * x)

    @federated(_clients(np.float32), _server(vector))
    def run(values: Any, state: Any) -> Any:
        worked = fl.federated_map(work, (values, fl.federated_broadcast(state)))
        return fl.federated_mean(worked, values), fl.federated_sum(worked)

    return _calls(run, FLOAT_NUMBERS, np.linspace(-1, 1, 4, dtype=np.float32))


def _of_datasets(work: Any, element: Any = np.int32) -> Any:
    comp = rtf.computation(work, fl.SequenceType(element))

    @federated(_clients(fl.SequenceType(element)))
    def run(datasets: Any) -> Any:
        worked = fl.federated_map(comp, datasets)
        return worked, fl.federated_sum(worked)

    return run


@_program()
def pipelines_of_datasets() -> Program:
    """Some clients have no elements."""

    def work(numbers: Any) -> Any:
        other = numbers.map(lambda x: x * 2).skip(1)
        pairs = tf.data.Dataset.zip((numbers.repeat(3), other)).enumerate()
        batches = pairs.take(5).batch(2).prefetch(1)
        return batches.reduce(
            tf.constant(0, tf.int64),
            lambda total, b: (
                total * 7 + tf.reduce_sum(b[0] * tf.cast(b[1][0] * b[1][1], tf.int64))
            ),
        )

    lists = [numbers * (i % 3 != 1) for i, numbers in enumerate(LISTS)]
    return _calls(_of_datasets(work), lists)


@_program()
def loops_over_batches() -> Program:
    element = collections.OrderedDict(
        x=fl.TensorType(np.int32, [None, 2]), y=fl.TensorType(np.int32, [None])
    )

    def work(batches: Any) -> Any:
        total, rows = tf.zeros([2], tf.int32), 0
        for batch in batches:
            total = total * 3 + tf.linalg.matvec(batch["x"], batch["y"], True)
            rows += tf.shape(batch["y"])[0]
        return total, rows

    batches = [
        [
            {"x": np.full([n, 2], n, np.int32), "y": np.arange(n, dtype=np.int32)}
            for n in range(1, 2 + i % 3)
        ]
        for i in range(NUM_CLIENTS)
    ]
    return _calls(_of_datasets(work, element), batches)


@_program()
def datasets_that_clients_return() -> Program:
    longer = rtf.computation(lambda ds: ds.concatenate(ds.map(lambda x: -x)), INTS)
    reduce = rtf.computation(lambda ds: ds.reduce(0, lambda a, b: a * 3 + b), INTS)

    @federated(_clients(INTS))
    def run(datasets: Any) -> Any:
        made = fl.federated_map(longer, datasets)
        return made, fl.federated_sum(fl.federated_map(reduce, made))

    return _calls(run, LISTS)


@_program()
def intrinsics_of_sequences() -> Program:
    @federated(_clients(INTS), INTS)
    def run(datasets: Any, unplaced: Any) -> Any:
        mapped = fl.sequence_map(_triple, datasets)
        zero = fl.federated_value(5, fl.CLIENTS)
        reduced = fl.sequence_reduce(mapped, zero, _add)
        return reduced, fl.federated_sum(reduced), fl.sequence_sum(unplaced)

    return _calls(run, LISTS, LISTS[3])


@_program()
def clients_that_workers_load() -> Program:
    data = ClientData.from_function(
        [str(number) for number in NUMBERS], np.int32, fl.TensorType(np.int32)
    )
    run = federated(lambda x: (fl.federated_sum(x), fl.federated_map(_triple, x)), INT)
    return _calls(run, data)


@_program()
def partials_without_elements() -> Program:
    empty = fl.StructType([])
    hollow = fl.TensorType(np.float32, [0, 3])
    same = rtf.computation(lambda x: x, empty)
    first = rtf.computation(lambda x, _: x, empty, np.int32)
    merge = rtf.computation(lambda x, _: x, empty, empty)

    @federated(INT, _clients([empty, hollow, np.int32]))
    def run(values: Any, structures: Any) -> Any:
        nothing = fl.federated_aggregate(values, (), first, merge, same)
        return nothing, fl.federated_sum(structures)

    structures = [((), np.zeros([0, 3], np.float32), number) for number in NUMBERS]
    return _calls(run, NUMBERS, structures)


def batches() -> list[Any]:
    """Return the training data of seven clients, as lists of batches."""
    generator = np.random.default_rng(3)
    sizes = [[4, 4, 1], [2], [7, 7, 3], [5], [1, 1], [8], [3, 2]]
    return [
        [
            {
                "x": generator.integers(-9, 9, (size, 3)).astype(np.float32) / 8,
                "y": generator.integers(-9, 9, (size, 1)).astype(np.float32) / 8,
            }
            for size in each
        ]
        for each in sizes
    ]


@functools.cache
def model() -> learning.Model:
    """Return a linear model with dropout."""
    dense = keras.layers.Dense(1)
    layers = [keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), dense]
    keras_model = keras.Sequential(layers)
    dense.set_weights([np.array([[1.0], [2.0], [3.0]], "f"), np.array([0.5], "f")])
    return learning.Model.from_keras(
        keras_model,
        loss="mse",
        metrics=["mae"],
        label_type=fl.TensorType(np.float32, [None, 1]),
    )


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _averaging(aggregator: aggregators.Aggregator) -> learning.LearningProcess:
    return learning.build_fed_avg(model(), _sgd(), aggregator=aggregator)


ALGORITHMS: Mapping[str, Callable[[], learning.LearningProcess]] = {
    "fed avg": lambda: learning.build_fed_avg(
        model(), _sgd(), keras.optimizers.Adam(0.1)
    ),
    "fed prox": lambda: learning.build_fed_prox(model(), _sgd(), proximal=0.5),
    "fed sgd": lambda: learning.build_fed_sgd(model(), _sgd()),
    "mime lite": lambda: learning.build_mime_lite(model(), _sgd()),
    "scaffold": lambda: learning.build_scaffold(model(), 0.05, num_clients=7),
    "fed nova": lambda: learning.build_fed_nova(model(), _sgd(), epochs=2),
    "fed dyn": lambda: learning.build_fed_dyn(
        model(), _sgd(), alpha=0.1, num_clients=7
    ),
    "q fed avg": lambda: learning.build_q_fed_avg(model(), 0.05, q=0.5),
    "ditto": lambda: learning.build_ditto(model(), _sgd(), proximal=0.1),
    "fed per": lambda: learning.build_fed_per(model(), _sgd(), personal=["bias"]),
    "clipped mean": lambda: _averaging(
        aggregators.clipped(aggregators.AdaptiveNorm(), aggregators.mean())
    ),
    "private mean": lambda: _averaging(
        aggregators.dp_mean(
            clip_norm=0.5,
            noise_multiplier=0.8,
            clients_per_round=7,
            num_clients=100,
            delta=1e-5,
        )
    ),
}


@functools.cache
def process_of(name: str) -> learning.LearningProcess:
    """Return the process of an algorithm, cached because it takes seconds to build."""
    return ALGORITHMS[name]()


def _rounds(name: str) -> Program:
    """Return three rounds, with the state, clients' values and metrics of each."""
    process = process_of(name)

    def run(invoke: Invoke) -> Any:
        clients, after = batches(), list[Any]()
        state = invoke(process.initialize, None)
        kept = [process.initial_client_state] * len(clients)
        for _ in range(3):
            if process.initial_client_state is None:
                state, metrics = invoke(process.next, (state, clients))
            else:
                state, kept, metrics = invoke(process.next, (state, kept, clients))
            after.append((state, kept, metrics))
        return after

    return Program([process.initialize, process.next], run)


for _name in ALGORITHMS:
    PROGRAMS[_name] = functools.partial(_rounds, _name)
    HANG_ON[_name] = LEARNING


@_program(*LEARNING)
def evaluation() -> Program:
    evaluate: Any = learning.build_fed_eval(model())
    weights = model().initial_weights()
    return Program(
        [evaluate.next], lambda invoke: invoke(evaluate.next, (weights, batches()))
    )


def _parts(value: Any) -> Iterator[bytes]:
    """Yield names, numbers of members, dtypes, shapes and bytes of a result."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    match value:
        case Mapping():
            named = cast("Mapping[str, Any]", value)
            yield f"names {list(named)}".encode()
            for member in named.values():
                yield from _parts(member)
        case list() | tuple():
            members = cast("Sequence[Any]", value)
            yield f"members {len(members)}".encode()
            for member in members:
                yield from _parts(member)
        case bytes() | str() | None:
            yield repr(value).encode()
        case _:
            array = np.asarray(value)
            yield f"{array.dtype.name} {array.shape}".encode()
            is_text = array.dtype == object
            yield from _parts(array.ravel().tolist()) if is_text else [array.tobytes()]


def digest_of(value: Any) -> str:
    """Return the SHA-256 of all bits of a result."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def identities_of(name: str) -> list[str]:
    """Return the identities of a program's graphs, which key its random numbers."""
    return [rtf.identify_computation(comp) for comp in PROGRAMS[name]().computations]


@functools.cache
def environment() -> dict[str, str]:
    """Return the versions and the CPU properties on which bits depend."""
    with ray_fed.create_context(ray_fed.Config(backend="local")) as context:
        PROGRAMS["order of sums"]().run(context.invoke)
        report = context.last_report
    assert report is not None
    (fingerprint,) = report.fingerprints
    names = ("keras", "federated_language")
    return {
        "tensorflow": fingerprint.tensorflow,
        "instruction_set": fingerprint.instruction_set,
        **{name: importlib.metadata.version(name) for name in names},
    }


def main() -> None:
    """Store the digests of all programs, and the identities of their graphs."""
    results: dict[str, str] = {}
    for name, build in PROGRAMS.items():
        config = ray_fed.Config(backend="local", workers=2, **SETTINGS)
        with ray_fed.create_context(config) as context:
            results[name] = digest_of(build().run(context.invoke))
    stored = {
        "environment": environment(),
        "results": results,
        "identities": {name: identities_of(name) for name in PROGRAMS},
    }
    FILE.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{len(results)} results stored in {FILE}")  # noqa: T201 (what it is for)


if __name__ == "__main__":
    main()
