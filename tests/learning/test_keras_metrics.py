"""Every loss and metric of Keras over labels of each kind, beside its own `compile`.

A cell is a loss or a metric, as a name, a function or an object, of an output and its
labels. It has Keras' number over the same batches, or it is refused where Keras has
none, or one that depends on how rows are cut into batches.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning import Model

SIZES = [3, 1, 5, 4, 11]
NUM_ROWS = sum(SIZES)

ALIASES = ["accuracy", "acc", "crossentropy", "ce", "bce", "mse", "MSE"]


def absolute_error(labels: Any, predictions: Any) -> Any:
    return keras.ops.abs(labels - predictions)


NEEDED: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 4, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": 4},
    "OneHotIoU": {"num_classes": 4, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 4},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": absolute_error},
}
"""Arguments that classes cannot do without; a new class of Keras may need some here."""


def all_of(module: Any) -> dict[str, Callable[[], Any]]:
    """Return makers of all in a module of Keras: of objects, of functions' names."""
    cells: dict[str, Callable[[], Any]] = {name: lambda n=name: n for name in ALIASES}
    for name in dir(module):
        member = getattr(module, name)
        if name in ("get", "serialize", "deserialize") or not callable(member):
            continue
        if isinstance(member, type):
            arguments = NEEDED.get(name, {}) | {"name": f"object_{name}"}
            cells[f"{name}()"] = lambda m=member, a=arguments: m(**a)
        else:
            cells[name] = lambda n=name: n
    return cells


class Layout:
    """An output and its labels, in batches of unequal sizes."""

    def __init__(self, units: int, labels: Any) -> None:
        random = np.random.default_rng(1)
        self.labels = labels
        self.x = random.normal(size=(NUM_ROWS, 3)).astype(np.float32)
        activation = "softmax" if units > 1 else "sigmoid"
        dense = keras.layers.Dense(units, activation=activation)
        self.keras: Any = keras.Sequential([keras.Input((3,)), dense])
        dense.set_weights([random.normal(size=(3, units)), np.zeros(units)])
        self.label_type = fl.TensorType(labels.dtype.type, [None, *labels.shape[1:]])

    @property
    def columns(self) -> "Layout":
        """The same with labels `[rows, 1]`, if they are `[rows]` of one value."""
        units = self.keras.output_shape[-1]
        is_flat = self.labels.ndim == 1 and units == 1
        return Layout(1, self.labels[:, None]) if is_flat else self

    def cut(self, sizes: list[int]) -> Iterator[Any]:
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            yield self.x[end - size : end], self.labels[end - size : end]

    def model(self, **options: Any) -> Model:
        return Model.from_keras(self.keras, label_type=self.label_type, **options)

    def measure(self, **options: Any) -> dict[str, Any]:
        """Return what three clients count, added up."""
        model = self.model(**options)
        weights = model.initial_weights()
        clients = [model.totals.zero() for _ in range(3)]
        for index, (x, y) in enumerate(self.cut(SIZES)):
            batch = {"x": tf.constant(x), "y": tf.constant(y)}
            passed = model.forward(weights, batch, clients[index % 3], training=False)
            clients[index % 3] = passed.totals
        added: Any = tf.nest.map_structure(add_up, *clients)
        return read(model.totals.finish(added))

    def evaluate(self, sizes: list[int] = SIZES, **options: Any) -> dict[str, Any]:
        """Return what Keras evaluates, batch by batch."""
        self.keras.compile(run_eagerly=True, **options)
        batches = Batches(list(self.cut(sizes)))
        return read(self.keras.evaluate(batches, verbose=0, return_dict=True))


class Batches(keras.utils.PyDataset):
    """Batches of unequal sizes, as Keras takes them."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    @override
    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def add_up(*values: Any) -> Any:
    return sum(values)


def read(results: Any) -> dict[str, Any]:
    """Return numbers by name, those of a dictionary as Keras does: by its names."""
    found: dict[str, Any] = {}
    for name, value in results.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            found[part or name] = np.asarray(number, np.float64)
    return found


def is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    return np.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def make_layout(name: str) -> Layout:
    random = np.random.default_rng(1)
    binary = random.integers(0, 2, NUM_ROWS).astype(np.int32)
    classes = random.integers(0, 4, NUM_ROWS).astype(np.int32)
    one_hot = np.eye(4, dtype=np.int32)[classes]
    units, labels = {
        "rows of one value": (1, binary.astype(np.float32)),
        "column of one value": (1, binary[:, None].astype(np.float32)),
        "classes": (4, classes),
        "column of classes": (4, classes[:, None]),
        "one-hot": (4, one_hot.astype(np.float32)),
    }[name]
    return Layout(units, labels)


def mean_output(labels: Any, predictions: Any) -> Any:
    """A loss that any labels go with."""
    del labels
    return tf.reduce_mean(predictions)


def name_of(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return getattr(metric, "name", None) or metric.__name__


def alone(layout: Layout, metric: Any, sizes: list[int]) -> Any:
    """Return what a metric of Keras comes to by itself, None where it raises."""
    try:
        found: Any = keras.metrics.get(metric)
        if not isinstance(found, keras.metrics.Metric):
            found = keras.metrics.MeanMetricWrapper(found)
        for x, y in layout.cut(sizes):
            labels = tf.constant(y)
            found.update_state(labels, layout.keras(x), sample_weight=None)
        return np.asarray(found.result(), np.float64)
    except Exception:  # noqa: BLE001 (whatever Keras says)
        return None


def judge_metrics(layout: Layout, cells: dict[str, Any]) -> Counter[str]:
    """Return how many cells have Keras' number, are refused, or raise as Keras does."""
    accepted: dict[str, Any] = {}
    counts = Counter(equal=0, refused=0, raised=0)
    for cell, make in cells.items():
        try:
            layout.model(loss=mean_output, metrics=[make()])
        except errors.ValueMismatchError:
            counts["refused"] += 1
            cuts = [NUM_ROWS], SIZES, [1] * NUM_ROWS, [2] * (NUM_ROWS // 2)
            whole, *others = (alone(layout.columns, make(), cut) for cut in cuts)
            assert not all(is_same(whole, other) for other in others), cell
            continue
        # No class is 1 where there is one value: of these rows Keras raises, too.
        is_sparse = re.search("sparse_?categorical_?crossentropy", cell.lower())
        if is_sparse and alone(layout.columns, make(), SIZES) is None:
            counts["raised"] += 1
            with pytest.raises(errors.ValueMismatchError, match="InvalidArgument"):
                layout.measure(loss=mean_output, metrics=[make()])
            continue
        accepted[cell] = make
    metrics = [make() for make in accepted.values()]
    found = layout.measure(loss=mean_output, metrics=metrics)
    metrics = [make() for make in accepted.values()]
    expected = layout.columns.evaluate(loss=mean_output, metrics=metrics)
    for cell, metric in zip(accepted, metrics, strict=True):
        name = name_of(metric)
        assert is_same(found[name], expected[name]), cell
        counts["equal"] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows of one value", (63, 11, 2)),
        ("classes", (8, 68, 0)),
        ("column of classes", (47, 29, 0)),
        ("one-hot", (61, 15, 0)),
    ],
)
def test_metrics_have_the_numbers_of_keras_or_are_refused(
    name: str, expected: tuple[int, int, int]
) -> None:
    cells = all_of(keras.metrics)
    layout = make_layout(name)

    counts = judge_metrics(layout, cells)

    assert (counts["equal"], counts["refused"], counts["raised"]) == expected


def loss_of_keras(layout: Layout, loss: Any) -> Any:
    """Return the mean of batches' losses by their sizes, None where Keras raises."""
    layout.keras.compile(loss=loss, run_eagerly=True)
    total = 0.0
    try:
        for x, y in layout.cut(SIZES):
            predictions, labels = layout.keras(x), tf.constant(y)
            found = layout.keras.compute_loss(x=x, y=labels, y_pred=predictions)
            total += len(x) * float(found)
    except Exception:  # noqa: BLE001 (whatever Keras says)
        return None
    return total / NUM_ROWS


def judge_losses(layout: Layout, cells: dict[str, Any]) -> Counter[str]:
    """Return how many cells have Keras' number, or are refused where it raises."""
    counts = Counter(equal=0, refused=0)
    for cell, make in cells.items():
        expected = loss_of_keras(layout, make())
        try:
            found = layout.measure(loss=make())["loss"]
        except errors.ValueMismatchError:
            assert expected is None, cell
            counts["refused"] += 1
        else:
            assert is_same(found, expected), cell
            counts["equal"] += 1
    return counts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows of one value", (43, 12)),
        pytest.param("classes", (7, 48), marks=pytest.mark.slow),
        pytest.param("column of classes", (42, 13), marks=pytest.mark.slow),
        pytest.param("one-hot", (44, 11), marks=pytest.mark.slow),
    ],
)
def test_losses_have_the_numbers_of_keras_or_are_refused(
    name: str, expected: tuple[int, int]
) -> None:
    cells = all_of(keras.losses)
    for reduction in ("sum", "mean", "mean_with_sample_weight"):
        cells[reduction] = functools.partial(
            keras.losses.MeanSquaredError, reduction=reduction
        )

    counts = judge_losses(make_layout(name), cells)

    assert (counts["equal"], counts["refused"]) == expected


class Positives(keras.metrics.Metric):
    """As in Keras' documentation: its result is its variable."""

    def __init__(self, threshold: float, **settings: Any) -> None:
        super().__init__(name="positives", **settings)
        self._threshold = threshold  # which its config lacks
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        is_above: Any = keras.ops.cast(y_pred > self._threshold, "float32")
        self.count.assign_add(keras.ops.sum(is_above * y_true))

    @override
    def result(self) -> Any:
        return self.count


class Moments(keras.metrics.Metric):
    """Made of other metrics; its result has two names."""

    def __init__(self) -> None:
        super().__init__(name="moments")
        self.first = keras.metrics.Mean()
        self.second = keras.metrics.Mean()

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.first.update_state(y_pred)
        self.second.update_state(y_pred**2)

    @override
    def result(self) -> Any:
        return {"mean": self.first.result(), "square": self.second.result()}


class OwnSqueeze(keras.metrics.MeanMetricWrapper):
    """It takes labels `[rows]` against an output `[rows, 1]`, and these alone."""

    def __init__(self) -> None:
        super().__init__(self._compare, name="own_squeeze")

    def _compare(self, labels: Any, predictions: Any) -> Any:
        return keras.ops.abs(labels - predictions[:, 0])


def metrics_of_all_kinds() -> list[Any]:
    return [
        *("accuracy", "mae", "auc", "r2_score", "poisson", "binary_crossentropy"),
        absolute_error,
        keras.metrics.F1Score(threshold=0.4),
        keras.metrics.PrecisionAtRecall(0.5, name="precision"),
        keras.metrics.BinaryIoU(name="overlap"),
        keras.metrics.MeanSquaredError("half", dtype="float16"),
        Positives(0.4),
        Moments(),
    ]


@pytest.mark.slow
def test_clients_and_training_have_the_metrics_of_keras() -> None:
    layout = make_layout("rows of one value")
    metrics = [*metrics_of_all_kinds(), OwnSqueeze()]
    model = layout.model(loss="mse", metrics=metrics)
    evaluation = learning.build_fed_eval(model)
    training = learning.build_fed_avg(model, keras.optimizers.SGD(0.0))
    batches = [{"x": x, "y": y} for x, y in layout.cut(SIZES)]
    data = [batches[:2], [], batches[2:]]

    evaluated = evaluation.next(evaluation.initialize(), data)
    _, trained = training.next(training.initialize(), data)

    metrics = metrics_of_all_kinds()
    expected = layout.columns.evaluate([NUM_ROWS], loss="mse", metrics=metrics)
    options = {"loss": "mse", "metrics": [OwnSqueeze()]}
    expected |= layout.evaluate([NUM_ROWS], **options)
    for found in (read(evaluated), read(trained)):
        assert found.pop("num_examples") == NUM_ROWS
        assert sorted(found) == sorted(expected)
        for metric, value in found.items():
            np.testing.assert_allclose(
                value, expected[metric], rtol=2e-3, err_msg=metric
            )


class Kept(keras.metrics.Metric):
    """Keeps of all rows so far what a test says."""

    def __init__(self, update: Any) -> None:
        super().__init__(name="kept")
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")
        self._update = update

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(self._update(self.value, y_pred))

    @override
    def result(self) -> Any:
        return self.value


def keep_largest(value: Any, predictions: Any) -> Any:
    return keras.ops.maximum(value, keras.ops.max(predictions))


def keep_last(value: Any, predictions: Any) -> Any:
    del value
    return keras.ops.sum(predictions)


def add_mean(value: Any, predictions: Any) -> Any:
    return value + keras.ops.mean(predictions)


def fail(value: Any, predictions: Any) -> Any:
    raise RuntimeError("nothing to keep")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Kept(keep_largest), "`kept`.*maximum"),
        (Kept(keep_last), "`kept`.*added up"),
        (Kept(add_mean), "`kept`.*mean of a batch"),
        (Kept(fail), "`kept` raises RuntimeError: nothing to keep"),
        (keras.losses.dice, "`dice`.*mean of a batch"),
        (keras.metrics.Mean(), "`mean` raises TypeError"),
        (keras.metrics.Metric(name="none"), "`none` raises NotImplementedError"),
        ("IoU", r"name of a Keras metric.*'IoU'.*target_class_ids"),
    ],
    ids=["maximum", "last", "batches", "raises", "dice", "Mean", "base", "IoU"],
)
def test_metrics_that_are_no_sums_over_rows_are_refused(
    metric: Any, message: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        make_layout("column of one value").model(loss="mse", metrics=[metric])


def test_a_metric_keeps_what_it_had() -> None:
    metric: Any = keras.metrics.MeanSquaredError("mine")
    metric.update_state([[1.0]], [[3.0]])
    layout = make_layout("column of one value")

    found = layout.measure(loss="mse", metrics=[metric])

    np.testing.assert_allclose(found["mine"], found["loss"], rtol=1e-6)
    assert float(metric.result()) == 4.0


class Vector(keras.losses.Loss):
    """As the one of Keras without reduction, by hand."""

    @override
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(y_pred, axis=-1)


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.MeanSquaredError(reduction="none", name="mine"),
        Vector(name="mine"),
    ],
    ids=["none", "vector"],
)
def test_losses_that_are_many_numbers_are_refused(loss: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"`mine`.*one a row"):
        make_layout("column of one value").measure(loss=loss)


class OwnLoss(keras.losses.Loss):
    """It would broadcast labels `[rows]` against an output `[rows, 1]`."""

    @override
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def squares(labels: Any, predictions: Any) -> Any:
    return keras.ops.square(labels - predictions)


@pytest.mark.parametrize(
    "loss",
    [squares, OwnLoss(), keras.losses.MeanSquaredError(reduction="sum")],
    ids=["function", "own", "sum"],
)
def test_one_client_trains_as_fit_does(loss: Any) -> None:
    layout = make_layout("rows of one value")
    training = learning.build_fed_avg(
        layout.model(loss=loss), keras.optimizers.SGD(0.05)
    )
    batches = [{"x": x, "y": y} for x, y in layout.cut([8, 8, 8])]

    state, _ = training.next(training.initialize(), [batches])

    layout.keras.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=True)
    for x, y in layout.columns.cut([8, 8, 8]):
        layout.keras.train_on_batch(x, y)
    expected = layout.keras.get_weights()
    for weight, of_keras in zip(state.weights.trainable, expected, strict=True):
        np.testing.assert_allclose(weight, of_keras, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_dict", [True, False], ids=["names", "a list"])
def test_several_outputs_have_the_losses_and_metrics_of_keras(*, as_dict: bool) -> None:
    random = np.random.default_rng(0)
    given = keras.Input((3,))
    chance = keras.layers.Dense(1, activation="sigmoid", name="chance")(given)
    kind = keras.layers.Dense(4, activation="softmax", name="kind")(given)
    outputs: Any = {"chance": chance, "kind": kind} if as_dict else [chance, kind]
    keras_model: Any = keras.Model(given, outputs)
    loss = {"chance": "crossentropy", "kind": keras.losses.CategoricalHinge()}
    metrics = {"chance": ["acc", "mse"], "kind": ["accuracy", absolute_error]}
    x = random.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    one_hot = np.eye(4, dtype=np.float32)[random.integers(0, 4, NUM_ROWS)]
    y = {"chance": random.integers(0, 2, (NUM_ROWS, 1)).astype("f"), "kind": one_hot}
    label_type = {
        "chance": fl.TensorType(np.float32, [None, 1]),
        "kind": fl.TensorType(np.float32, [None, 4]),
    }
    model = Model.from_keras(
        keras_model, loss=loss, metrics=metrics, label_type=label_type
    )
    evaluation = learning.build_fed_eval(model)
    ends = [(0, 5), (5, 6), (6, NUM_ROWS)]
    data = [
        [{"x": x[i:j], "y": {name: labels[i:j] for name, labels in y.items()}}]
        for i, j in ends
    ]

    found = read(evaluation.next(evaluation.initialize(), data))

    keras_model.compile(loss=loss, metrics=metrics, run_eagerly=True)
    expected = keras_model.evaluate(
        x, y, batch_size=NUM_ROWS, verbose=0, return_dict=True
    )
    assert found.pop("num_examples") == NUM_ROWS
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
