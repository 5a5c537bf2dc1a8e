"""Moments of clients' inputs: those that a layer of Keras adapts to on pooled rows."""

# pyright: reportUnknownLambdaType=false

from typing import Any

import federated_language as fl
import keras
import numpy as np
import pandas as pd
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.program import ClientData

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "who": RNG.integers(0, 9, 200) ** 2 // 8,
        "a": RNG.normal(5, 2, 200),
        "b": RNG.lognormal(0, 2, 200),
        "year": RNG.integers(1990, 2030, 200),
        "flag": RNG.random(200) < 0.3,
        "far": 1.7e9 + RNG.normal(0, 1, 200),
        "constant": np.full(200, 1e6 / 3),
        "word": ["w"] * 200,
    }
)
NUMBERS = {"year": np.float64, "flag": np.float64}
IMAGES = {i: RNG.normal(3, i + 1, [4, 3, 3, 2]) for i in range(5)}


def moments_of(data: ClientData) -> Any:
    return learning.build_normalization(data.type_signature)(data)


def assert_adapted(moments: Any, pooled: Any, axis: Any) -> None:
    """Compare with numpy's moments, and with what a layer adapts to and makes."""
    keep = axis is not None
    over = tuple(range(pooled.ndim - keep))
    exact = np.asarray(pooled, np.float64)
    np.testing.assert_allclose(moments["mean"], exact.mean(over), rtol=1e-12)
    variance = exact.var(over)
    np.testing.assert_allclose(moments["variance"], variance, rtol=1e-9, atol=1e-12)
    adapted = keras.layers.Normalization(axis=axis, dtype="float64")
    adapted.adapt(exact)
    layer = keras.layers.Normalization(axis=axis, dtype="float64", **moments)
    np.testing.assert_allclose(layer(exact), adapted(exact), rtol=1e-6, atol=1e-6)
    clone = keras.layers.Normalization.from_config(layer.get_config())
    np.testing.assert_allclose(clone(exact), layer(exact), atol=1e-5)  # of float32


@pytest.mark.parametrize(
    ("batch_size", "clients_per_leaf"), [(None, 3), (1, 1), (7, 3), (1000, 1)]
)
def test_moments_are_those_of_pooled_rows(
    local_contexts: Any, batch_size: int | None, clients_per_leaf: int
) -> None:
    columns = ["a", "b", "year", "flag"]
    data = ClientData.from_table(
        FRAME,
        client="who",
        x={"some": columns, "one": "a"},
        y="year",
        dtypes=NUMBERS,
        batch_size=batch_size,
    )
    context = local_contexts(workers=2, clients_per_leaf=clients_per_leaf)
    compute = learning.build_normalization(data.type_signature)

    moments = context.invoke(compute, data)

    assert_adapted(moments["some"], FRAME[columns].to_numpy(np.float64), -1)
    assert_adapted(moments["one"], FRAME["a"].to_numpy(), None)


def test_values_far_from_zero_keep_their_variance() -> None:
    data = ClientData.from_table(FRAME, client="who", x=["far", "constant"])

    moments = moments_of(data.batch(16))

    exact = FRAME[["far", "constant"]].to_numpy()
    np.testing.assert_allclose(moments["mean"], exact.mean(0), rtol=1e-14)
    np.testing.assert_allclose(moments["variance"][0], exact[:, 0].var(), rtol=1e-6)
    assert 0 <= moments["variance"][1] < 1e-14


def test_images_have_moments_for_each_channel() -> None:
    image = fl.TensorType(np.float64, [3, 3, 2])
    alone = ClientData.from_values(IMAGES, fl.SequenceType(image))
    pairs = {i: [{"x": x, "y": 0} for x in images] for i, images in IMAGES.items()}
    element = fl.StructWithPythonType([("x", image), ("y", np.int32)], dict)
    labeled = ClientData.from_values(pairs, fl.SequenceType(element))
    pooled = np.concatenate(list(IMAGES.values()))

    for data in (alone, alone.batch(3), labeled, labeled.batch(3)):
        assert_adapted(moments_of(data), pooled, -1)


def test_clients_without_rows_count_for_nothing() -> None:
    data = ClientData.from_values(
        {"a": [], "b": [1.0, 3.0], "c": []}, fl.SequenceType(np.float32)
    )

    moments = moments_of(data)

    assert (moments["mean"], moments["variance"]) == (2.0, 1.0)
    assert np.isnan(moments_of(data.select(["a"]))["variance"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (fl.SequenceType([("z", np.float32)]), "inputs named `x`"),
        (fl.SequenceType([("x", np.str_)]), "inputs that are numbers, found `str`"),
        (fl.TensorType(np.float32), r"pass `data\.type_signature`"),
        (3, r"pass `data\.type_signature`"),
    ],
)
def test_what_has_no_moments_is_refused(given: Any, message: str) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        learning.build_normalization(given)
