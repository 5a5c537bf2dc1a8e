"""Lowered client work: the same bits as tf.data gives, with no tf.data left in it."""

# pyright: reportUnknownLambdaType=false

import collections
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed import tensorflow as rtf
from ray_fed.language import structs
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.lowering.sequences import draw_order
from ray_fed.values.columnar_sequence import Sizes


class Point(NamedTuple):
    z: Any
    a: Any


F32 = fl.SequenceType(np.float32)
I32 = fl.SequenceType(np.int32)
I64 = fl.SequenceType(np.int64)
TEXT = fl.SequenceType(np.str_)
VECTORS = fl.SequenceType(fl.TensorType(np.float32, (3,)))
BATCHES = fl.SequenceType(fl.TensorType(np.float32, (None, 3)))
EXAMPLES = fl.SequenceType(
    collections.OrderedDict(
        [("y", fl.TensorType(np.int32)), ("x", fl.TensorType(np.float32, (3,)))]
    )
)
BATCHED = fl.SequenceType(
    collections.OrderedDict(
        [
            ("y", fl.TensorType(np.int32, (None,))),
            ("x", fl.TensorType(np.float32, (None, 3))),
        ]
    )
)
PAIRS = fl.SequenceType((np.int32, fl.TensorType(np.float32, (3,))))
POINTS = fl.SequenceType(Point(np.int32, np.float32))

Comp = Any


def numbers(count: int, seed: int = 1) -> list[Any]:
    drawn = np.random.default_rng(seed).normal(size=count)
    return list(drawn.astype(np.float32))


def vectors(count: int, seed: int = 2) -> list[Any]:
    drawn = np.random.default_rng(seed).normal(size=(count, 3))
    return list(drawn.astype(np.float32))


def batches(*sizes: int) -> list[Any]:
    return [np.array(vectors(size, size), np.float32).reshape(-1, 3) for size in sizes]


def examples(count: int) -> list[Any]:
    return [
        collections.OrderedDict(y=np.int32(i % 2), x=x)
        for i, x in enumerate(vectors(count))
    ]


def batched(*sizes: int) -> list[Any]:
    return [
        collections.OrderedDict(y=np.arange(len(x), dtype=np.int32) % 2, x=x)
        for x in batches(*sizes)
    ]


def float_sum(x: Any) -> Any:
    return tf.reduce_sum(tf.cast(x, tf.float32))


def variable(value: Any) -> Any:
    return tf.Variable(value)


def client(*types: Any) -> Callable[[Any], Callable[[], Comp]]:
    """Make a function a computation of its own, when it is first asked for."""
    return lambda fn: functools.cache(lambda: rtf.computation(fn, *types))


# The client computations ---------------------------------------------------------


@client(F32)
def reduced(ds: Any) -> Any:
    return ds.reduce(np.float32(0), lambda total, x: total * 0.9 + x)


@client(F32)
def looped(ds: Any) -> Any:
    total = tf.constant(0.0)
    for x in ds:
        total = total * 0.9 + x
    return total


@client(F32)
def looped_to_a_break(ds: Any) -> Any:
    total, count = tf.constant(0.0), tf.constant(0)
    for x in ds:
        if x > 1.0:
            break
        total += x
        count += 1
    return total, count


@client(F32)
def looped_with_continue(ds: Any) -> Any:
    total = tf.constant(0.0)
    for x in ds:
        if x < 0.0:
            continue
        total += x
    return total


@client(F32)
@tf.function
def iterated(ds: Any) -> Any:
    total = tf.constant(0.0)
    for x in iter(ds):
        total = total * 0.9 + x
    return total


@client(F32)
@tf.function
def taken_by_next(ds: Any) -> Any:
    iterator = iter(ds)
    total = next(iterator)
    for _ in tf.range(2):
        total = total * 0.9 + next(iterator)
    return total


@client(F32)
@tf.function
def taken_as_optionals(ds: Any) -> Any:
    iterator = iter(ds.batch(2))
    total = tf.constant(0.0)
    optional = iterator.get_next_as_optional()
    while optional.has_value():
        total = total * 0.9 + tf.reduce_sum(optional.get_value())
        optional = iterator.get_next_as_optional()
    return total


@client(F32)
@tf.function
def iterated_twice_in_a_loop(ds: Any) -> Any:
    total = tf.constant(0.0)
    for _ in tf.range(2):
        for x in iter(ds):
            total = total * 0.9 + x
    return total


@client(F32)
@tf.function
def iterated_to_a_condition(ds: Any) -> Any:
    iterator = iter(ds.take_while(lambda x: x < 1.5))
    total = tf.constant(0.0)
    for index in tf.range(6):
        optional = iterator.get_next_as_optional()
        if optional.has_value() and index < 5:
            total = total * 0.9 + optional.get_value()
    return total


@client(F32)
def epochs_in_a_loop(ds: Any) -> Any:
    total = tf.constant(0.0)
    for _ in tf.range(3):
        for x in ds:
            total = total * 0.9 + x
    return total


@client(F32, F32)
def loop_in_a_loop(xs: Any, ys: Any) -> Any:
    total = tf.constant(0.0)
    for x in xs:
        for y in ys.batch(2):
            total = total * 0.9 + x * tf.reduce_sum(y)
    return total


@client(F32)
def two_passes(ds: Any) -> Any:
    total, count = ds.reduce(
        (np.float32(0), np.int64(0)), lambda s, x: (s[0] + x, s[1] + 1)
    )
    mean = total / tf.cast(count, tf.float32)
    return ds.reduce(np.float32(0), lambda s, x: s + (x - mean) ** 2)


@client(VECTORS, F32, np.float32)
def several_sequences(xs: Any, ys: Any, scale: Any) -> Any:
    first = xs.reduce(np.float32(0), lambda s, x: s + tf.reduce_sum(x) * scale)
    return first, ys.reduce(first, lambda s, y: s * 0.5 + y)


@client(VECTORS)
def mapped_and_batched(ds: Any) -> Any:
    ds = ds.map(lambda x: x / tf.norm(x)).batch(4)
    return ds.reduce(tf.zeros([3]), lambda s, x: s * 0.9 + tf.reduce_mean(x, 0))


@client(VECTORS, np.float32)
def mapped_with_captures(ds: Any, scale: Any) -> Any:
    ds = ds.map(lambda x: x * scale, num_parallel_calls=4)
    return ds.reduce(tf.zeros([3]), lambda s, x: s * scale + x)


@client(VECTORS)
def batches_without_the_rest(ds: Any) -> Any:
    ds = ds.batch(4, drop_remainder=True).prefetch(2)
    return ds.reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(VECTORS)
def batches_in_parallel(ds: Any) -> Any:
    ds = ds.batch(4, num_parallel_calls=2).with_options(tf.data.Options())
    return ds.reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(VECTORS)
def repeated_batches(ds: Any) -> Any:
    ds = ds.repeat(3).batch(4).take(5)
    return ds.reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(VECTORS)
def batches_repeated(ds: Any) -> Any:
    ds = ds.batch(4).repeat(2).skip(1).take(-1)
    return ds.reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(I64)
def repeated_for_ever(ds: Any) -> Any:
    ds = ds.repeat().skip(2).take(11).shard(2, 1)
    return ds.reduce(np.int64(0), lambda s, x: s * 3 + x)


@client(I64)
def filtered(ds: Any) -> Any:
    ds = ds.filter(lambda x: x % 3 != 0).batch(2)
    return ds.reduce(np.int64(1), lambda s, x: s * 3 + tf.reduce_prod(x))


@client(I64)
def scanned(ds: Any) -> Any:
    ds = ds.scan(np.int64(0), lambda s, x: (s + x, s * x)).take_while(lambda x: x < 40)
    return ds.map(lambda x: x + 1).reduce(np.int64(1), lambda s, x: s * 3 + x)


@client(F32)
def enumerated(ds: Any) -> Any:
    return ds.enumerate(start=2).reduce(
        np.float32(0), lambda s, pair: s + tf.cast(pair[0], tf.float32) * pair[1]
    )


@client(F32)
def zipped(ds: Any) -> Any:
    weights = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0])
    ones = tf.data.Dataset.from_tensors(1.0).repeat()
    zipped_ds = tf.data.Dataset.zip((ds, weights, ones))
    return zipped_ds.reduce(np.float32(0), lambda s, x: s + x[0] * x[1] + x[2])


@client(I64)
def cached(ds: Any) -> Any:
    return (
        ds.map(lambda x: x * x)
        .cache()
        .repeat(2)
        .reduce(np.int64(0), lambda s, x: s * 3 + x)
    )


@client(TEXT)
def joined(ds: Any) -> Any:
    ds = ds.map(tf.strings.upper).batch(2)
    return ds.reduce("", lambda s, x: s + "," + tf.strings.reduce_join(x))


@client(BATCHES)
def of_batches(ds: Any) -> Any:
    return ds.reduce(
        (tf.zeros([3]), np.int32(0)),
        lambda s, x: (s[0] + tf.reduce_sum(x, 0), s[1] + tf.shape(x)[0]),
    )


@client(BATCHES)
def of_batches_of_batches(ds: Any) -> Any:
    return ds.batch(2).reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(PAIRS)
def of_tuples(ds: Any) -> Any:
    ds = ds.map(lambda y, x: (x, y)).batch(2)
    return ds.reduce(
        np.float32(0),
        lambda s, pair: (
            s + tf.reduce_sum(pair[0]) * tf.reduce_sum(tf.cast(pair[1], tf.float32))
        ),
    )


@client(POINTS)
def of_named_tuples(ds: Any) -> Any:
    ds = ds.batch(2)
    return ds.reduce(
        np.float32(0),
        lambda s, p: s * 0.9 + tf.reduce_sum(tf.cast(p.z, tf.float32) - p.a),
    )


@client(EXAMPLES, [("w", fl.TensorType(np.float32, (3,))), ("b", np.float32)])
def of_dicts(ds: Any, weights: Any) -> Any:
    def loss(s: Any, batch: Any) -> Any:
        y = tf.cast(batch["y"], tf.float32)
        error = tf.linalg.matvec(batch["x"], weights["w"]) + weights["b"] - y
        return s * 0.9 + tf.reduce_mean(error**2)

    return ds.batch(4).reduce(np.float32(0), loss)


@client(EXAMPLES)
@tf.function
def with_gradients_and_metrics(ds: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        weights, metrics = state
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits = tf.linalg.matvec(batch["x"], weights)
            y = tf.cast(batch["y"], tf.float32)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses)
        gradient: Any = tape.gradient(loss, weights)
        weights = weights - 0.1 * gradient
        right = tf.reduce_sum(tf.cast((logits > 0.0) == (y > 0.5), tf.int32))
        metrics = {
            "loss": metrics["loss"] + tf.reduce_sum(losses),
            "right": metrics["right"] + right,
        }
        return weights, metrics

    zero = {"loss": 0.0, "right": 0}
    return ds.repeat(2).batch(4).reduce((tf.zeros([3]), zero), step)


@client(BATCHED)
def with_variables(ds: Any) -> Any:
    weights, count = variable(tf.zeros([3])), variable(0)

    def step(state: Any, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            predicted = tf.linalg.matvec(batch["x"], weights)
            y = tf.cast(batch["y"], tf.float32)
            loss = tf.reduce_mean((predicted - y) ** 2)
        gradient: Any = tape.gradient(loss, weights)
        weights.assign_sub(0.1 * gradient)
        count.assign_add(1)
        return state + loss

    loss = ds.reduce(np.float32(0), step)
    return loss, weights.read_value(), count


@client(F32)
def with_variables_in_a_loop(ds: Any) -> Any:
    largest = variable(-100.0)

    @tf.function
    def search() -> None:
        for x in ds:
            if x > largest:
                largest.assign(x)

    search()
    return largest.read_value()


@client(F32)
def with_a_variable_in_a_map(ds: Any) -> Any:
    count = variable(0.0)
    ds = ds.map(lambda x: x + count.assign_add(1.0))
    return ds.batch(2).reduce(np.float32(0), lambda s, x: s * 0.9 + tf.reduce_sum(x))


@client(F32, F32)
@tf.function
def with_an_iterator_in_a_reduce(xs: Any, ys: Any) -> Any:
    iterator = iter(ys)
    total = xs.reduce(0.0, lambda s, x: s * 0.5 + x * iterator.get_next())
    return total, iterator.get_next()


@client(F32)
def in_nested_functions(ds: Any) -> Any:
    @tf.function
    def inner(part: Any, scale: Any) -> Any:
        return part.reduce(np.float32(0), lambda s, x: s * scale + x)

    @tf.function
    def outer(whole: Any) -> Any:
        return inner(whole.take(3), 0.5) + inner(whole.skip(3), tf.constant(0.25))

    return outer(ds)


@client(F32, np.bool_)
@tf.function
def in_branches(ds: Any, squares: Any) -> Any:
    iterator = iter(ds)
    total = tf.constant(0.0)
    if squares:
        total += next(iterator) ** 2
    else:
        total += ds.reduce(np.float32(0), lambda s, x: s - x)
    return total * 0.9 + next(iterator)


@client(F32)
def with_constants_named_alike(ds: Any) -> Any:
    """A loop takes `Const` and `Const_1`, and has its own `Const` and `Const_2`."""
    scale, shift = tf.constant(2.0, name="Const"), tf.constant(3.0, name="Const_1")

    def step(state: Any, x: Any) -> Any:
        scaled = tf.constant(5.0, name="Const") * x
        return state * scale + scaled - shift * tf.constant(7.0, name="Const_2")

    return ds.reduce(np.float32(0), step)


@client(BATCHED)
def with_keras_layers(ds: Any) -> Any:
    initializer: Any = keras.initializers.RandomUniform(seed=1)
    layer: Any = keras.layers.Dense(2, kernel_initializer=initializer)
    layer.build((None, 3))

    def step(state: Any, batch: Any) -> Any:
        logits, *_ = layer.stateless_call(layer.trainable_variables, [], batch["x"])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
        return state + tf.reduce_mean(losses)

    return ds.reduce(np.float32(0), step)


@client(TEXT)
def with_a_table(ds: Any) -> Any:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1
    )
    return (
        ds.map(table.lookup)
        .batch(2)
        .reduce(np.int32(0), lambda s, x: s * 10 + tf.reduce_sum(x))
    )


@client(I32)
def with_assertions(ds: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        tf.debugging.assert_less(x, 5, "too large")
        return state + x

    return ds.reduce(0, step)


@client(F32)
def called(ds: Any) -> Any:
    return reduced()(ds.batch(2).map(tf.reduce_sum)) + reduced()(ds)


@client(F32)
def with_growing_state(ds: Any) -> Any:
    return ds.reduce(tf.zeros([0]), lambda s, x: tf.concat([s, [x]], 0))


CLIENTS: list[Any] = [
    pytest.param(reduced, numbers(5), id="reduce"),
    pytest.param(reduced, [], id="reduce of nothing"),
    pytest.param(reduced, numbers(1), id="reduce of one"),
    pytest.param(looped, numbers(5), id="for"),
    pytest.param(looped, [], id="for over nothing"),
    pytest.param(looped_to_a_break, [0.5, 0.25, 2.0, 0.5], id="break"),
    pytest.param(looped_to_a_break, [0.5, 0.25], id="break that never comes"),
    pytest.param(looped_with_continue, numbers(7), id="continue"),
    pytest.param(iterated, numbers(5), id="for over an iterator"),
    pytest.param(iterated, [], id="for over an iterator of nothing"),
    pytest.param(taken_by_next, numbers(4), id="next"),
    pytest.param(taken_as_optionals, numbers(5), id="optionals"),
    pytest.param(taken_as_optionals, [], id="optionals of nothing"),
    pytest.param(iterated_twice_in_a_loop, numbers(4), id="iterators in a loop"),
    pytest.param(
        iterated_to_a_condition, [1.0, 0.5, 2.0, 0.1], id="iterator of a take_while"
    ),
    pytest.param(epochs_in_a_loop, numbers(4), id="for in a for"),
    pytest.param(loop_in_a_loop, (numbers(3), numbers(5)), id="loop in a loop"),
    pytest.param(two_passes, numbers(6), id="two passes"),
    pytest.param(
        several_sequences, (vectors(3), numbers(4), 0.3), id="several sequences"
    ),
    pytest.param(mapped_and_batched, vectors(10), id="map, batch, ragged last"),
    pytest.param(mapped_with_captures, (vectors(4), 0.7), id="map with captures"),
    pytest.param(batches_without_the_rest, vectors(10), id="drop_remainder"),
    pytest.param(batches_in_parallel, vectors(8), id="parallel batch, options"),
    pytest.param(repeated_batches, vectors(5), id="repeat, batch, take"),
    pytest.param(repeated_batches, [], id="repeat, batch, take of nothing"),
    pytest.param(batches_repeated, vectors(5), id="batch, repeat, skip"),
    pytest.param(repeated_for_ever, [3, 1, 4], id="endless repeat, take, shard"),
    pytest.param(filtered, [1, 2, 3, 4, 5, 6, 7], id="filter, batch"),
    pytest.param(filtered, [3, 6], id="filter that keeps nothing"),
    pytest.param(scanned, [1, 2, 3, 4, 5, 6], id="scan, take_while, map"),
    pytest.param(enumerated, numbers(4), id="enumerate"),
    pytest.param(zipped, numbers(5), id="zip of other datasets"),
    pytest.param(cached, [1, 2, 3], id="cache"),
    pytest.param(joined, ["a", "ä", "c"], id="strings"),
    pytest.param(of_batches, batches(4, 4, 1), id="batches of the user"),
    pytest.param(of_batches, [], id="no batches of the user"),
    pytest.param(of_batches, batches(2, 0, 3), id="batches of any size"),
    pytest.param(of_batches_of_batches, batches(2, 2, 2), id="batches of batches"),
    pytest.param(of_tuples, list(zip([1, 2, 3], vectors(3), strict=True)), id="tuples"),
    pytest.param(of_named_tuples, [Point(1, 2.5), Point(3, 0.5)], id="named tuples"),
    pytest.param(of_dicts, (examples(7), (vectors(1)[0], 0.5)), id="dicts"),
    pytest.param(with_gradients_and_metrics, examples(10), id="gradients, metrics"),
    pytest.param(with_variables, batched(4, 4, 2), id="variables"),
    pytest.param(with_variables_in_a_loop, numbers(6), id="variables in a for"),
    pytest.param(with_a_variable_in_a_map, numbers(5), id="variable in a map"),
    pytest.param(
        with_an_iterator_in_a_reduce,
        (numbers(3), numbers(5)),
        id="iterator in a reduce",
    ),
    pytest.param(in_nested_functions, numbers(5), id="nested tf.functions"),
    pytest.param(in_branches, (numbers(5), True), id="iterator in a branch"),
    pytest.param(in_branches, (numbers(5), False), id="reduce in a branch"),
    pytest.param(with_constants_named_alike, numbers(4), id="constants named alike"),
    pytest.param(with_keras_layers, batched(4, 3), id="Keras layers"),
    pytest.param(with_a_table, ["a", "b", "c"], id="table"),
    pytest.param(with_assertions, [1, 4, 2], id="assertions"),
    pytest.param(called, numbers(5), id="computations in a computation"),
    pytest.param(with_growing_state, numbers(3), id="state that grows"),
]


def message_of(comp: Comp) -> Any:
    return comp.to_proto().tensorflow


def lower(comp: Comp) -> Any:
    return lowering.lower(message_of(comp), comp.type_signature)


def run_written(comp: Comp, arg: Any) -> list[Any]:
    """Return what the graph of a computation gives as it was written."""
    message, parameter = message_of(comp), comp.type_signature.parameter
    graph_def = graph_message.graph_of(message)
    loader.isolate(graph_def, message.initialize_op or None)
    function = loader.import_function(
        graph_def,
        graph_message.bound_names(message.parameter),
        graph_message.bound_names(message.result),
    )
    tensors = list(
        normal_forms.flatten(normal_forms.normalize(arg, parameter), parameter)
    )
    return [
        tensor.numpy()
        for tensor in function(graph_message.to_bound(tensors, message.parameter))
    ]


def feeds_of(value: Any, type_spec: fl.Type) -> Iterator[tf.Tensor]:
    match type_spec:
        case fl.StructType():
            parts = structs.struct_elements(value, type_spec)
            for element_type, _, element in parts:
                yield from feeds_of(element, element_type)
        case fl.SequenceType():
            sequence: Any = plain_values.to_plain(value, type_spec)
            yield from datasets.to_tensors(sequence, type_spec.element)
        case _:
            yield normal_forms.normalize(value, type_spec)


def load(lowered: lowering.Lowered) -> Callable[[list[Any]], list[Any]]:
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(lowered.graph_def)
    loader.isolate(graph_def, lowered.initialize_op)
    return loader.import_function(graph_def, list(lowered.feeds), list(lowered.fetches))


def run_lowered(comp: Comp, arg: Any) -> list[Any]:
    """Return what the lowered graph gives, which has no op of tf.data."""
    lowered = lower(comp)
    assert isinstance(lowered, lowering.Lowered), lowered
    assert not {op for op in ops_of(lowered.graph_def) if is_of_data(op)}
    feeds = list(feeds_of(arg, comp.type_signature.parameter))
    return [tensor.numpy() for tensor in load(lowered)(feeds)]


def sizes_of(sequence: Any) -> Sizes | None:
    found = [column.splits for column in sequence.columns]
    each = [None if s is None else sorted(set(np.diff(s).tolist())) for s in found]
    if any(sizes is not None and len(sizes) > 1 for sizes in each):
        return None
    batches = tuple(None if sizes is None else [*sizes, 0][0] for sizes in each)
    return Sizes(sequence.length, batches)


def known_feeds_of(
    value: Any, type_spec: fl.Type
) -> "Iterator[tuple[Sizes | None, list[tf.Tensor]]]":
    """Yield of each leaf its sizes, where all elements are alike, and what to feed."""
    match type_spec:
        case fl.StructType():
            parts = structs.struct_elements(value, type_spec)
            for element_type, _, element in parts:
                yield from known_feeds_of(element, element_type)
        case fl.SequenceType():
            sequence: Any = plain_values.to_plain(value, type_spec)
            sizes = sizes_of(sequence)
            if sizes is None:
                yield None, list(feeds_of(value, type_spec))
                return
            pairs = zip(sequence.columns, sizes.batches, strict=True)
            yield (
                sizes,
                [
                    tf.constant(
                        column.rows
                        if batch is None
                        else column.rows.reshape(
                            sizes.length, batch, *column.rows.shape[1:]
                        )
                    )
                    for column, batch in pairs
                ],
            )
        case _:
            yield None, list(feeds_of(value, type_spec))


def ops_of(graph_def: Any) -> set[str]:
    functions = graph_def.library.function
    nodes = [*graph_def.node, *(node for f in functions for node in f.node_def)]
    return {node.op for node in nodes}


def is_of_data(op: str) -> bool:
    return any(part in op for part in ("Dataset", "Iterator", "Optional"))


class Written(NamedTuple):
    """A computation, its argument, and what its graph gives as it was written."""

    comp: Comp
    arg: Any
    results: list[Any]


@pytest.fixture(
    scope="module", params=[pytest.param(case.values, id=case.id) for case in CLIENTS]
)
def written(request: pytest.FixtureRequest) -> Written:
    make, arg = request.param
    comp = make()
    return Written(comp, arg, run_written(comp, arg))


def test_results_are_the_same_bit_for_bit(written: Written) -> None:
    found = run_lowered(written.comp, written.arg)

    for value, wanted in zip(found, written.results, strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.slow
def test_functions_that_are_called_give_the_same_bits(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inlining, "LARGE", 1)

    test_results_are_the_same_bit_for_bit(written)


def _reduced_by(add: Any, ds: Any) -> Any:
    return ds.reduce(0.0, add)


def test_large_function_is_called_and_one_that_draws_is_copied() -> None:
    def summed(draws: bool) -> Callable[[Any, Any], Any]:
        def add(total: Any, x: Any) -> Any:
            for _ in range(inlining.LARGE):
                x = x * 0.5 + 1.0
            return total + x + (tf.random.uniform([]) if draws else 0.0)

        return add

    calls: list[bool] = []
    for draws in (False, True):
        reduce = functools.partial(_reduced_by, summed(draws))
        comp = rtf.computation(reduce, F32)
        lowered = lower(comp)
        calls.append("PartitionedCall" in ops_of(lowered.graph_def))

    assert calls == [True, False]


def test_known_sizes_change_no_results(written: Written) -> None:
    comp, arg, results = written
    known = list(known_feeds_of(arg, comp.type_signature.parameter))
    sizes = [sizes for sizes, _ in known]

    for unrolled in (False, True):
        lowered = lowering.lower(
            message_of(comp), comp.type_signature, sizes, unrolled=unrolled
        )

        assert isinstance(lowered, lowering.Lowered), lowered
        found = load(lowered)([tensor for _, fed in known for tensor in fed])
        for value, wanted in zip(found, results, strict=True):
            if unrolled and value.dtype.is_floating:  # one sum is made of several
                np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-5)
            else:
                np.testing.assert_array_equal(value.numpy(), wanted)


def test_passes_over_known_sizes_are_unrolled() -> None:
    def totals(ds: Any) -> Any:
        return ds.batch(2).reduce(0.0, lambda total, x: total + float_sum(x))

    comp = rtf.computation(totals, F32)
    sizes = [Sizes(5, (None,))]

    looped, unrolled = (
        lowering.lower(message_of(comp), comp.type_signature, sizes, unrolled=flag)
        for flag in (False, True)
    )

    assert isinstance(looped, lowering.Lowered)
    assert isinstance(unrolled, lowering.Lowered)
    assert any("While" in op for op in ops_of(looped.graph_def))
    assert not any("While" in op for op in ops_of(unrolled.graph_def))


def test_no_more_than_some_elements_are_unrolled() -> None:
    comp = rtf.computation(lambda ds: ds.reduce(0.0, tf.add), F32)
    sizes = [Sizes(101, (None,))]

    lowered = lowering.lower(
        message_of(comp), comp.type_signature, sizes, unrolled=True
    )

    assert lowered == Fallback("more than 100 elements without a loop")


class TestFallback:
    """What is left as it was written, and the reason that is given."""

    def test_keeps_no_frames_and_travels_with_a_plan(self) -> None:
        reason = lower(rtf.computation(lambda ds: ds.batch(2), F32))

        assert isinstance(reason, Fallback)
        assert reason.__traceback__ is None
        assert reason.__context__ is None
        assert pickle.loads(pickle.dumps(reason)) == Fallback("sequence result")

    @pytest.mark.parametrize(
        ("fn", "types", "reason"),
        [
            pytest.param(
                lambda ds: ds.batch(2), [F32], "sequence result", id="sequence result"
            ),
            pytest.param(
                lambda ds: (ds.reduce(0.0, lambda s, x: s + x), ds.take(1)),
                [F32],
                "sequence result",
                id="sequence in the result",
            ),
            pytest.param(
                lambda ds: ds.flat_map(tf.data.Dataset.from_tensors).reduce(
                    0.0, lambda s, x: s + x
                ),
                [F32],
                "FlatMapDataset",
                id="flat_map",
            ),
            pytest.param(
                lambda ds: ds.interleave(tf.data.Dataset.from_tensors).reduce(
                    0.0, lambda s, x: s + x
                ),
                [F32],
                "InterleaveDataset",
                id="interleave",
            ),
            pytest.param(
                lambda ds: ds.window(2).reduce(
                    np.int64(0),
                    lambda s, w: s + w.reduce(np.int64(0), lambda n, _: n + 1),
                ),
                [F32],
                "WindowDataset",
                id="window",
            ),
            pytest.param(
                lambda ds: ds.padded_batch(2).reduce(
                    np.int32(0), lambda s, x: s + tf.size(x)
                ),
                [BATCHES],
                "PaddedBatchDatasetV2",
                id="padded_batch",
            ),
            pytest.param(
                lambda ds: ds.cardinality(),
                [F32],
                "DatasetCardinality",
                id="cardinality",
            ),
            pytest.param(
                lambda ds: ds.get_single_element(),
                [F32],
                "DatasetToSingleElement",
                id="single element",
            ),
            pytest.param(
                lambda ds: ds.cache("/nowhere").reduce(0.0, lambda s, x: s + x),
                [F32],
                "a cache in a file",
                id="cache in a file",
            ),
            pytest.param(
                lambda ds: (
                    ds.map(lambda x: x + tf.random.uniform([]))
                    .filter(lambda x: x > 0.0)
                    .reduce(0.0, lambda s, x: s + x)
                ),
                [F32],
                "a filter of random or endless elements",
                id="filter of random elements",
            ),
            pytest.param(
                lambda ds: (
                    ds.scan(0.0, lambda s, x: (s + x, s))
                    .batch(2)
                    .reduce(0.0, lambda s, x: s + tf.reduce_sum(x))
                ),
                [F32],
                "BatchDatasetV2 after a scan or take_while",
                id="batch of a scan",
            ),
            pytest.param(
                lambda ds: ds.reduce(np.int32(0), lambda s, x: s + tf.size(x)),
                [fl.SequenceType(fl.TensorType(np.float32, (None, None)))],
                "elements of unknown shape",
                id="unknown shape",
            ),
            pytest.param(
                lambda ds: (
                    ds.map(lambda x: tf.py_function(lambda y: y, [x], tf.float32))
                    .skip(1)
                    .reduce(0.0, lambda s, x: s + x)
                ),
                [F32],
                "elements with effects, skipped",
                id="skipped effects",
            ),
        ],
    )
    def test_says_the_reason(self, fn: Any, types: list[Any], reason: str) -> None:
        comp = rtf.computation(fn, *types)

        assert lower(comp) == Fallback(reason)


def with_serialized_parameter(message: Any, type_spec: fl.FunctionType) -> Any:
    """Return a message whose sequence is bound as the graph of its dataset."""
    bound = type(message)()
    bound.CopyFrom(message)
    graph_def = graph_message.graph_of(message)
    name = message.parameter.sequence.variant_tensor_name.split(":")[0]
    for node in graph_def.node:
        for index, source in enumerate(node.input):
            if source == name:
                node.input[index] = "deserialized"
    node = graph_def.node.add(name="deserialized", op="DatasetFromGraph")
    node.input.append(name)
    placeholder = next(node for node in graph_def.node if node.name == name)
    placeholder.attr["dtype"].type = tf.string.as_datatype_enum
    bound.graph_def.Pack(graph_def)
    bound.parameter.sequence.graph_def_tensor_name = f"{name}:0"
    return bound


class TestMessages:
    def test_sequence_bound_by_the_graph_of_its_dataset(self) -> None:
        comp = batches_repeated()
        message = with_serialized_parameter(message_of(comp), comp.type_signature)

        lowered = lowering.lower(message, comp.type_signature)

        assert isinstance(lowered, lowering.Lowered)
        feeds = list(feeds_of(vectors(5), VECTORS))
        [found] = load(lowered)(feeds)
        assert found.numpy() == run_written(comp, vectors(5))[0]
        assert not {op for op in ops_of(lowered.graph_def) if is_of_data(op)}

    def test_without_sequences_it_is_what_it_was(self) -> None:
        comp = rtf.computation(lambda x, y: (x + y, x), np.float32, np.float32)

        lowered = lower(comp)

        message = message_of(comp)
        assert lowered.graph_def == graph_message.graph_of(message)
        assert list(lowered.feeds) == graph_message.bound_names(message.parameter)
        assert list(lowered.fetches) == graph_message.bound_names(message.result)

    def test_feeds_are_in_the_order_of_the_type(self) -> None:
        comp = of_dicts()

        lowered = lower(comp)

        nodes = {node.name: node for node in lowered.graph_def.node}
        placed = [nodes[name.split(":")[0]] for name in lowered.feeds]
        dims = [[dim.size for dim in node.attr["shape"].shape.dim] for node in placed]
        # y before x, as the type has it; tf.data has x before y.
        assert dims == [[-1], [-1, 3], [], [3], []]
        assert [tf.as_dtype(node.attr["dtype"].type) for node in placed] == [
            tf.int32, tf.float32, tf.int64, tf.float32, tf.float32,
        ]  # fmt: skip

    def test_batches_of_the_user_have_splits(self) -> None:
        lowered = lower(of_batches())

        nodes = {node.name: node for node in lowered.graph_def.node}
        dims = [
            [dim.size for dim in nodes[name.split(":")[0]].attr["shape"].shape.dim]
            for name in lowered.feeds
        ]
        assert dims == [[-1, 3], [-1], []]

    def test_one_graph_takes_any_number_of_elements(self) -> None:
        comp = mapped_and_batched()
        function = load(lower(comp))

        for count in (1, 4, 9):
            [found] = function(list(feeds_of(vectors(count), VECTORS)))
            [expected] = run_written(comp, vectors(count))
            np.testing.assert_array_equal(found.numpy(), expected)

    def test_is_the_same_whatever_was_traced_before(self) -> None:
        message, type_spec = message_of(scanned()), scanned().type_signature
        first: Any = lowering.lower(message, type_spec)
        tf.function(lambda x: x + 1)(1)  # moves on what TensorFlow counts

        second: Any = lowering.lower(message, type_spec)

        names = [f.signature.name for f in first.graph_def.library.function]
        assert [f.signature.name for f in second.graph_def.library.function] == names
        ops = [
            [node.op for node in f.node_def] for f in first.graph_def.library.function
        ]
        assert ops == [
            [node.op for node in f.node_def] for f in second.graph_def.library.function
        ]

    def test_variables_start_afresh_on_every_call(self) -> None:
        function = load(lower(with_variables()))
        feeds = list(feeds_of(batched(2, 2), BATCHED))

        first, second = function(feeds), function(feeds)

        assert first[2].numpy() == second[2].numpy() == 2
        np.testing.assert_array_equal(first[1].numpy(), second[1].numpy())


class TestErrors:
    def test_assertions_still_hold(self) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            run_lowered(with_assertions(), [1, 7, 2])

    def test_next_past_the_end(self) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="End of sequence"):
            run_lowered(taken_by_next(), [1.0, 2.0])

    def test_batches_that_do_not_stack(self) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run_lowered(of_batches_of_batches(), batches(2, 1))


@client(I64)
def shuffled(ds: Any) -> Any:
    return ds.shuffle(3).reduce(
        tf.zeros([0], tf.int64), lambda s, x: tf.concat([s, [x]], 0)
    )


@client(I64)
@tf.function
def shuffled_twice(ds: Any) -> Any:
    ds = ds.shuffle(100).repeat(2).batch(2)
    return ds.reduce(tf.zeros([0], tf.int64), lambda s, x: tf.concat([s, x], 0))


@client(I64)
def shuffled_in_batches(ds: Any) -> Any:
    ds = ds.shuffle(100).batch(2).repeat(3)
    return ds.reduce(tf.zeros([0], tf.int64), lambda s, x: tf.concat([s, x], 0))


@client(I64)
def shuffled_for_ever(ds: Any) -> Any:
    ds = ds.shuffle(100).repeat().take(7)
    return ds.reduce(tf.zeros([0], tf.int64), lambda s, x: tf.concat([s, [x]], 0))


@client(I64)
def shuffled_in_one_order(ds: Any) -> Any:
    ds = ds.shuffle(100, reshuffle_each_iteration=False).repeat(2)
    return ds.reduce(tf.zeros([0], tf.int64), lambda s, x: tf.concat([s, [x]], 0))


class TestShuffles:
    """Orders are drawn anew, but come out as often as from tf.data's buffer."""

    def test_orders_are_as_likely_as_from_a_buffer(self) -> None:
        with tf.Graph().as_default() as traced:
            tf.random.set_seed(1)
            three, two = tf.constant(3, tf.int64), tf.constant(2, tf.int64)
            order = draw_order(three, two, three)
            session = tf.compat.v1.Session(graph=traced)
            drawn = [tuple(session.run(order).tolist()) for _ in range(2000)]

        counts = collections.Counter(drawn)
        # Two to choose from, twice; so four orders, and 2 is never first.
        assert sorted(counts) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)]
        deviation = (2000 * 0.25 * 0.75) ** 0.5
        assert all(abs(count - 500) < 5 * deviation for count in counts.values())

    @pytest.mark.parametrize("buffer", [1, 4, 9, 20, -2])
    def test_orders_are_permutations_that_a_buffer_reaches(self, buffer: int) -> None:
        reach = 9 if buffer < 0 else buffer
        for limit in (0, 1, 4, 9, 20):
            sizes = [tf.constant(size, tf.int64) for size in (9, buffer, limit)]

            order = draw_order(*sizes).numpy().tolist()

            assert len(order) == len(set(order)) == min(9, limit)
            assert all(index < place + reach for place, index in enumerate(order))
            assert set(order) <= set(range(9))
            assert buffer != 1 or order == list(range(min(9, limit)))

    @pytest.mark.parametrize("count", [0, 1, 6])
    def test_every_element_comes_once_a_pass(self, count: int) -> None:
        elements = list(range(count))

        [once] = run_lowered(shuffled(), elements)
        [twice] = run_lowered(shuffled_twice(), elements)
        [thrice] = run_lowered(shuffled_in_batches(), elements)

        assert sorted(once) == elements
        assert sorted(twice[:count]) == sorted(twice[count:]) == elements
        assert len(thrice) == 3 * count
        for start in range(0, 3 * count, max(count, 1)):
            assert sorted(thrice[start : start + count]) == elements

    def test_each_pass_has_an_order_of_its_own(self) -> None:
        [drawn] = run_lowered(shuffled_for_ever(), list(range(3)))
        [many] = run_lowered(shuffled_twice(), list(range(50)))

        assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]
        assert len(drawn) == 7
        assert many[:50].tolist() != many[50:].tolist()

    def test_unless_it_is_asked_not_to(self) -> None:
        [drawn] = run_lowered(shuffled_in_one_order(), list(range(50)))

        assert drawn[:50].tolist() == drawn[50:].tolist()
        assert sorted(drawn[:50]) == list(range(50))
        assert drawn[:50].tolist() != list(range(50))
