"""Statistics over clients equal NumPy's over all of their rows."""

# pyright: reportUnknownLambdaType=false

from collections import Counter
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import analytics
from ray_fed.data import ClientData

ROW = fl.SequenceType(
    [
        ("age", np.float32),
        ("visits", np.int64),
        ("word", np.str_),
        ("x", (np.int32, [2])),
    ]
)
WORDS = ["to", "be", "or", "not", "ü"]
EDGES = [-1.0, 0.0, 0.5, 2.0, 2.0, 3.0]


def _rows() -> dict[str, list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    sizes = {"anna": 40, "bert": 0, "carla": 7, "dora": 53}
    return {
        name: [
            {
                "age": np.float32(rng.normal(1.0, 2.0)).round(1),
                "visits": rng.integers(-(2**60), 2**60),
                "word": rng.choice(WORDS).encode(),
                "x": rng.integers(-3, 4, 2).astype(np.int32),
            }
            for _ in range(size)
        ]
        for name, size in sizes.items()
    }


ROWS = _rows()
ALL = [row for rows in ROWS.values() for row in rows]


def column(name: str) -> Any:
    return np.array([row[name] for row in ALL]).reshape(-1)


@pytest.fixture
def data(local_contexts: Callable[..., Any]) -> ClientData:
    fl.framework.set_default_context(local_contexts(workers=1))
    return ClientData.from_values(ROWS, ROW)


def test_count_and_mean(data: ClientData) -> None:
    assert analytics.count(data, "age") == 100
    assert analytics.count(data, "x") == 200
    assert analytics.mean(data, "age") == pytest.approx(
        column("age").astype(np.float64).mean(), rel=1e-14
    )
    assert analytics.mean(data, lambda row: row["x"][0] > 0) == np.mean(
        column("x").reshape(-1, 2)[:, 0] > 0
    )


def test_batches_count_as_their_rows(data: ClientData) -> None:
    batches = data.batch(16)

    assert analytics.count(batches, "word") == 100
    assert analytics.heavy_hitters(batches, 2, "word") == analytics.heavy_hitters(
        data, 2, "word"
    )


def test_histogram(data: ClientData) -> None:
    found = analytics.histogram(data, EDGES, "age")

    expected, _ = np.histogram(column("age").astype(np.float64), EDGES)
    assert found.tolist() == expected.tolist()
    assert found.dtype == np.int64


@pytest.mark.parametrize("name", ["age", "visits", "x"])
def test_quantiles(data: ClientData, name: str) -> None:
    q = [0.0, 0.05, 0.5, 0.77, 1.0]

    found = analytics.quantiles(data, q, name)

    expected = np.quantile(column(name).astype(np.float64), q)
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=0)


def test_distinct_values_and_heavy_hitters(data: ClientData) -> None:
    for name in ("word", "age", "x"):
        expected = np.unique(column(name))
        assert analytics.distinct(data, name).tolist() == expected.tolist()
    ordered = sorted(
        Counter(column("word").tolist()).items(), key=lambda i: (-i[1], i[0])
    )
    assert list(analytics.heavy_hitters(data, 3, "word").items()) == ordered[:3]


def test_clients_of_one_value_each(local_contexts: Callable[..., Any]) -> None:
    fl.framework.set_default_context(local_contexts(workers=1))
    values = [np.inf, -0.0, 2.5, -np.inf, 2.5]
    data = ClientData.from_values(values, np.float64)

    assert analytics.count(data) == 5
    assert analytics.quantiles(data, [0, 0.5, 1]).tolist() == [-np.inf, 2.5, np.inf]
    assert analytics.heavy_hitters(data, 1) == {2.5: 2}


def test_no_values_and_nan(local_contexts: Callable[..., Any]) -> None:
    fl.framework.set_default_context(local_contexts(workers=1))
    numbers = fl.SequenceType(np.float32)
    empty = ClientData.from_values([[], []], numbers)

    assert analytics.count(empty) == 0
    assert np.isnan(analytics.mean(empty))
    assert np.isnan(analytics.quantiles(empty, [0.5])).all()
    assert analytics.distinct(empty).tolist() == []
    broken = ClientData.from_values([[1.0, np.nan], [2.0]], numbers)
    assert analytics.histogram(broken, [0, 1.5, 3]).tolist() == [1, 1]
    with pytest.raises(errors.ValueMismatchError, match="found 1 NaN"):
        analytics.quantiles(broken, 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (analytics.count, "one tensor of an element, found 4 for"),
        (lambda d: analytics.count(d, "agee"), "found 0 for `agee`: pass a name of"),
        (lambda d: analytics.mean(d, "word"), "found values of `string`"),
        (
            lambda d: analytics.histogram(d, [2, 1], "age"),
            "increasing edges of bins",
        ),
        (lambda d: analytics.histogram(d, 10, "age"), "increasing edges of bins"),
        (lambda d: analytics.quantiles(d, [0.5, 1.1], "age"), "between 0 and 1"),
        (lambda d: analytics.heavy_hitters(d, 0, "age"), "`k`"),
    ],
)
def test_wrong_arguments(
    data: ClientData, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises((errors.UserError, TypeError), match=message):
        call(data)


def test_functions_of_an_element_see_tensors(data: ClientData) -> None:
    found = analytics.heavy_hitters(data, 5, lambda row: tf.strings.length(row["word"]))

    lengths = Counter(map(len, column("word").tolist()))
    assert found == dict(lengths.most_common())
