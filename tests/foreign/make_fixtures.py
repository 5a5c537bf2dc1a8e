"""Makes the fixtures of `test_foreign.py` with TensorFlow Federated itself.

    python tests/foreign/make_fixtures.py [NAME...]

needs Python 3.11 and an environment of its own, with what the fixtures here were made
with: tensorflow-federated 0.87.0, installed without its requirements as one of them is
gone, then tensorflow 2.14.1, numpy 1.26, scikit-learn 1.4, tensorflow-privacy 0.9.0,
tensorflow-probability 0.22.1, tensorflow-model-optimization 0.7.5, dp-accounting 0.4.3,
google-vizier 0.1.11, jax 0.4.14 and jaxlib 0.4.13.

Each fixture is made in a process of its own, so that functions of different fixtures
have the same names. It holds serialized computations, and what TensorFlow Federated's
own runtime returns for the calls that `foreign_cases.py` makes.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportUntypedFunctionDecorator=false, reportOptionalSubscript=false
# ruff: noqa: T201

import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import foreign_cases
import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).parent / "fixtures"


def fed_avg(tff: Any, tf: Any) -> Any:
    """Keras model, momentum at clients, Adam at the server, weighted by examples."""
    build = tff.learning.optimizers
    return tff.learning.algorithms.build_weighted_fed_avg(
        _keras_model(tff, tf), build.build_sgdm(0.1, 0.9), build.build_adam(0.1)
    )


def fed_sgd(tff: Any, tf: Any) -> Any:
    """Federated SGD: gradients of all of a client's batches, one step."""
    return tff.learning.algorithms.build_fed_sgd(
        _keras_model(tff, tf), tff.learning.optimizers.build_sgdm(0.5)
    )


def mime_lite(tff: Any, tf: Any) -> Any:
    """An algorithm with a second aggregation, and an optimizer's state in its own."""
    return tff.learning.algorithms.build_weighted_mime_lite(
        _keras_model(tff, tf), tff.learning.optimizers.build_sgdm(0.1, 0.9)
    )


def fed_eval(tff: Any, tf: Any) -> Any:
    """Evaluation of a Keras model."""
    return tff.learning.algorithms.build_fed_eval(_keras_model(tff, tf))


def _batch_spec(tf: Any) -> Any:
    return collections.OrderedDict(
        x=tf.TensorSpec([None, foreign_cases.NUM_FEATURES], tf.float32),
        y=tf.TensorSpec([None, 1], tf.int32),
    )


def _keras_model(tff: Any, tf: Any) -> Callable[[], Any]:
    def build() -> Any:
        constant = tf.keras.initializers.Constant
        layers = [
            tf.keras.layers.Dense(
                5, "relu", input_shape=(4,), kernel_initializer=constant(0.1)
            ),
            tf.keras.layers.Dense(3, kernel_initializer=constant(0.2)),
        ]
        return tff.learning.models.from_keras_model(
            tf.keras.Sequential(layers),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
            input_spec=_batch_spec(tf),
        )

    return build


def _update_type(tff: Any) -> Any:
    return tff.to_type([(np.float32, (3,)), np.float32])


def robust(tff: Any, tf: Any) -> Any:
    """Zeroing and clipping by norms whose quantiles are estimated round by round."""
    factory = tff.learning.robust_aggregator()
    return factory.create(_update_type(tff), tff.to_type(np.float32))


def secure(tff: Any, tf: Any) -> Any:
    """The same with secure sums of quantized values."""
    factory = tff.learning.secure_aggregator()
    return factory.create(_update_type(tff), tff.to_type(np.float32))


def compressed(tff: Any, tf: Any) -> Any:
    """A mean of values that are quantized on the way."""
    factory = tff.learning.compression_aggregator(zeroing=False, clipping=False)
    return factory.create(_update_type(tff), tff.to_type(np.float32))


def tree_noise(tff: Any, tf: Any) -> Any:
    """Differential privacy by a tree of noise: draws that must not be compared."""
    factory = tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
        noise_multiplier=1e-9,
        clients_per_round=4.0,
        l2_norm_clip=1.0,
        record_specs=tf.TensorSpec([3]),
        noise_seed=7,
    )
    return factory.create(tff.TensorType(np.float32, [3]))


def control_flow(tff: Any, tf: Any) -> Any:
    """Functions with loops, branches and calls: while, cond, case, partitioned."""

    @tf.function
    def collatz(number: Any) -> Any:
        steps = 0
        while number > 1:
            if number % 2 == 0:
                number //= 2
            else:
                number = 3 * number + 1
            steps += 1
        return steps

    @tff.tensorflow.computation(np.int32)
    def steps(number: Any) -> Any:
        branches = [lambda: 10, lambda: collatz(number), lambda: collatz(number + 1)]
        return tf.switch_case(number % 3, branches), collatz(number)

    @tff.tensorflow.computation(np.int32)
    def triangle(number: Any) -> Any:
        powers = tf.map_fn(lambda x: x * x, tf.range(number))
        _, total = tf.while_loop(
            lambda index, _: index < number,
            lambda index, total: (index + 1, total + powers[index]),
            (0, 0),
        )
        slope = tf.gradients(tf.cast(total, tf.float32) * 2.0, [powers])[0]
        return total if slope is None else tf.cast(slope[0], tf.int32)

    return {"steps": steps, "triangle": triangle}


def same_names(tff: Any, tf: Any) -> Any:
    """Functions that bear the names of those in `control_flow`, with other bodies."""

    @tf.function
    def collatz(number: Any) -> Any:
        steps = 100
        while number > 2:
            if number % 3 == 0:
                number //= 3
            else:
                number = number - 1
            steps += 2
        return steps

    @tff.tensorflow.computation(np.int32)
    def steps(number: Any) -> Any:
        branches = [lambda: 20, lambda: collatz(number), lambda: collatz(number + 2)]
        return tf.switch_case(number % 3, branches), collatz(number)

    return {"steps": steps}


def strings(tff: Any, tf: Any) -> Any:
    """Strings in and out, in vectors and alone."""

    @tff.tensorflow.computation(tff.TensorType(np.str_, [None]), np.str_)
    def comp(words: Any, separator: Any) -> Any:
        parts = tf.strings.split(words).flat_values
        return collections.OrderedDict(
            parts=parts,
            joined=tf.strings.join([parts, tf.fill(tf.shape(parts), separator)]),
            lengths=tf.strings.length(words),
            upper=tf.strings.upper(words, "utf-8"),
        )

    return {"strings": comp}


def bfloat16(tff: Any, tf: Any) -> Any:
    """A parameter and results of bfloat16."""

    @tff.tensorflow.computation(tff.TensorType(np.float32, [4]))
    def narrow(x: Any) -> Any:
        return tf.cast(x, tf.bfloat16)

    @tff.tensorflow.computation(tff.TensorType(ml_dtypes.bfloat16, [4]))
    def scale(x: Any) -> Any:
        return x * tf.constant(3, tf.bfloat16)

    return {"narrow": narrow, "scale": scale}


def unknown_dims(tff: Any, tf: Any) -> Any:
    """Parameters and results whose sizes are known at run time only."""

    @tff.tensorflow.computation(tff.TensorType(np.float32, [None, 2]))
    def rows(x: Any) -> Any:
        return tf.boolean_mask(x, x[:, 0] > 0.1), tf.matmul(x, x, transpose_b=True)

    return {"rows": rows}


def constant(tff: Any, tf: Any) -> Any:
    """A constant of four megabytes, which compress well."""
    table = np.tile(np.arange(1000, dtype=np.int32), 1000)

    @tff.tensorflow.computation(np.int32)
    def comp(index: Any) -> Any:
        return tf.constant(table)[index] + index

    return {"constant": comp}


def state(tff: Any, tf: Any) -> Any:
    """A variable, a table and an initialization."""

    @tff.tensorflow.computation(tff.TensorType(np.str_, [None]), np.int32)
    def comp(keys: Any, increment: Any) -> Any:
        initializer = tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], [1, 2, 3])
        table = tf.lookup.StaticHashTable(initializer, -1)
        variable = tf.Variable(10)
        with tf.control_dependencies([variable.assign_add(increment)]):
            return table.lookup(keys), variable.read_value()

    return {"state": comp}


def random(tff: Any, tf: Any) -> Any:
    """Stateful random ops, one of them in a function."""

    @tf.function
    def dice(count: Any) -> Any:
        return tf.random.uniform([count], 0, 6, tf.int32)

    @tff.tensorflow.computation(np.int32)
    def comp(count: Any) -> Any:
        return tf.random.normal([count]), dice(count)

    return {"random": comp}


def datasets(tff: Any, tf: Any) -> Any:
    """Datasets as arguments and results; names that are not in sorted order."""
    row = collections.OrderedDict(z=np.int32, a=tff.TensorType(np.float32, [2]))

    @tff.tensorflow.computation(tff.SequenceType(row))
    def comp(dataset: Any) -> Any:
        return dataset.map(lambda r: (r["a"] * 2.0, r["z"] + 1)).batch(2), dataset

    @tff.tensorflow.computation(tff.SequenceType(tff.TensorType(np.int64, [None])))
    def lengths(dataset: Any) -> Any:
        return dataset.map(tf.size), dataset.reduce(
            np.int64(0), lambda total, x: total + tf.reduce_sum(x)
        )

    @tff.tensorflow.computation(np.int64)
    def count(stop: Any) -> Any:
        return tf.data.Dataset.range(stop).filter(lambda x: x != 1)

    return {"datasets": comp, "lengths": lengths, "range": count}


def sequences(tff: Any, tf: Any) -> Any:
    """An intrinsic of sequences, at clients."""

    @tff.tensorflow.computation(np.int32, np.int32)
    def add(x: Any, y: Any) -> Any:
        return x + y

    @tff.federated_computation(tff.SequenceType(np.int32))
    def work(sequence: Any) -> Any:
        return tff.sequence_reduce(sequence, 100, add)

    at_clients = tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)

    @tff.federated_computation(at_clients)
    def comp(data: Any) -> Any:
        return tff.federated_map(work, data)

    return {"sequences": comp}


def intrinsics(tff: Any, tf: Any) -> Any:
    """Broadcast, map, aggregations of all kinds, zips and literals in one."""
    vector = tff.TensorType(np.float32, [2])

    @tff.tensorflow.computation(vector, vector)
    def scale(x: Any, y: Any) -> Any:
        return x * y

    @tff.tensorflow.computation
    def zero() -> Any:
        return tf.zeros([2]), 0

    accumulator = tff.to_type([vector, np.int32])

    @tff.tensorflow.computation(accumulator, vector)
    def accumulate(total: Any, x: Any) -> Any:
        return total[0] + x, total[1] + 1

    @tff.tensorflow.computation(accumulator, accumulator)
    def merge(x: Any, y: Any) -> Any:
        return x[0] + y[0], x[1] + y[1]

    @tff.tensorflow.computation(accumulator)
    def report(total: Any) -> Any:
        return total[0] / tf.cast(total[1], tf.float32)

    members = (vector, np.float32, np.int32)
    at_clients = [tff.FederatedType(member, tff.CLIENTS) for member in members]

    @tff.federated_computation(*at_clients, tff.FederatedType(vector, tff.SERVER))
    def comp(x: Any, weights: Any, integers: Any, server: Any) -> Any:
        scaled = tff.federated_map(scale, (x, tff.federated_broadcast(server)))
        return (
            tff.federated_mean(scaled, weights),
            tff.federated_sum(integers),
            tff.federated_min(integers),
            tff.federated_max(integers),
            tff.federated_secure_sum(integers, 12),
            tff.federated_aggregate(scaled, zero(), accumulate, merge, report),
            tff.federated_map(scale, (server, tff.federated_mean(x))),
            tff.federated_value(3, tff.SERVER),
            scaled,
        )

    return {"intrinsics": comp}


def server(tff: Any, tf: Any) -> Any:
    """No clients: work at the server, a struct, a literal, an unplaced value."""

    @tff.tensorflow.computation(np.int32, np.int32)
    def add(x: Any, y: Any) -> Any:
        return x + y

    @tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER))
    def comp(x: Any) -> Any:
        ten = tff.federated_value(10, tff.SERVER)
        total = tff.federated_map(add, (x, ten))
        return collections.OrderedDict(total=total, both=tff.federated_zip([x, total]))

    return {"server": comp}


def _computations(built: Any) -> Mapping[str, Any]:
    if isinstance(built, Mapping):
        return built
    return {"initialize": built.initialize, "next": built.next}


def make(name: str) -> None:
    """Write one fixture, and say how big it is."""
    import tensorflow as tf
    import tensorflow_federated as tff

    tff.backends.test.set_sync_test_cpp_execution_context()  # has secure sums
    messages = {
        comp_name: tff.framework.serialize_computation(comp)
        for comp_name, comp in _computations(globals()[name](tff, tf)).items()
    }
    # What was read back knows no Python containers, as it does where the test runs.
    read = {
        comp_name: tff.framework.deserialize_computation(message)
        for comp_name, message in messages.items()
    }
    arrays = {
        f"computation/{comp_name}": np.frombuffer(
            message.SerializeToString(deterministic=True), np.uint8
        )
        for comp_name, message in messages.items()
    }
    for index, leaf in enumerate(foreign_cases.leaves(foreign_cases.CASES[name](read))):
        arrays[f"result/{index}"] = _storable(leaf)
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]
    sizes = sum(array.nbytes for array in arrays.values())
    print(f"{name}: {len(arrays)} arrays, {sizes} bytes, {path.stat().st_size} stored")


def _storable(leaf: Any) -> Any:
    """Return an array of a dtype that numpy stores without pickles."""
    if leaf.dtype == ml_dtypes.bfloat16:
        return leaf.astype(np.float32)
    if leaf.dtype == object:
        return np.vectorize(lambda s: s if isinstance(s, bytes) else s.encode(), "S")(
            leaf
        )
    return leaf


def main(names: list[str]) -> None:
    """Make each fixture in a process of its own, and end what the runtime starts."""
    FOLDER.mkdir(exist_ok=True)
    failed = []
    for name in names or foreign_cases.CASES:
        code = f"import make_fixtures; make_fixtures.make({name!r})"
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=pathlib.Path(__file__).parent,
            env=environment,
            start_new_session=True,
        )
        if child.wait():
            failed.append(name)
        with contextlib.suppress(ProcessLookupError):  # it started nothing
            os.killpg(child.pid, signal.SIGTERM)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main(sys.argv[1:])
