"""Every loss and metric of Keras over labels of each kind, beside its own `compile`.

A cell is a loss or a metric, as a name, a function or an object, of an output and its
labels. It has Keras' number over the same batches, or it is refused where Keras has
none, or one that depends on how rows are cut into batches.
"""

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
from ray_fed.learning import Model

SIZES = [3, 1, 5, 4, 11]
NUM_ROWS = sum(SIZES)

ALIASES = [
    *("accuracy", "acc", "Accuracy", "crossentropy", "ce"),
    *("bce", "kld", "mae", "mape", "mse", "msle", "BCE", "KLD", "MAE", "MSE"),
]


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
    """Return makers of all that a module of Keras has: names, functions, objects."""
    cells: dict[str, Callable[[], Any]] = {name: lambda n=name: n for name in ALIASES}
    for name in dir(module):
        member = getattr(module, name)
        if name in ("get", "serialize", "deserialize") or not callable(member):
            continue
        if isinstance(member, type):
            arguments = NEEDED.get(name, {}) | {"name": f"object_{name}"}
            cells[f"{name}()"] = lambda m=member, a=arguments: m(**a)
            snake = re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", name).lower()
            cells |= {n: lambda n=n: n for n in (name, snake)}
        else:
            cells[f"function {name}"] = lambda m=member: m
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
    """Return results by name, in order, with those that are dictionaries laid out."""
    return {name: np.asarray(value, np.float64) for name, value in results.items()}


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
        "integers of one value": (1, binary),
        "classes": (4, classes),
        "column of classes": (4, classes[:, None]),
        "one-hot": (4, one_hot.astype(np.float32)),
        "integers one-hot": (4, one_hot),
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
            with pytest.raises(tf.errors.InvalidArgumentError):
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows of one value", (131, 46, 4)),
        pytest.param("column of one value", (131, 46, 4), marks=pytest.mark.slow),
        pytest.param("integers of one value", (130, 51, 0), marks=pytest.mark.slow),
        pytest.param("classes", (15, 166, 0), marks=pytest.mark.slow),
        ("column of classes", (98, 83, 0)),
        ("one-hot", (128, 53, 0)),
        pytest.param("integers one-hot", (127, 54, 0), marks=pytest.mark.slow),
    ],
)
def test_metrics_have_the_numbers_of_keras_or_are_refused(
    name: str, expected: tuple[int, int, int]
) -> None:
    cells = all_of(keras.metrics)
    layout = make_layout(name)
    functions = {n: cells.pop(n) for n in list(cells) if n.startswith("function ")}

    counts = judge_metrics(layout, cells) + judge_metrics(layout, functions)

    assert (counts["equal"], counts["refused"], counts["raised"]) == expected
