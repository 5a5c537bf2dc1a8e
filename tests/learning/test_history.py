"""The history of a run as values, a table, a picture, and JSON."""

import json
import math
import pathlib
import pickle
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning import EarlyStopping, History, Model, RoundRecord
from ray_fed.learning.callbacks import ModelCheckpoint
from ray_fed.learning.history import (
    from_json,
    read_evaluation,
    read_metrics,
    read_training,
    to_json,
)
from tests.learning.test_callbacks import RECORDS

HISTORY = History(RECORDS, evaluates=True)


def test_values_go_by_full_and_bare_names() -> None:
    assert HISTORY.names() == ["training.loss", "evaluation.accuracy"]
    assert HISTORY.values("loss") == [3.0, 2.0, 1.5, 1.0]
    assert HISTORY.values("accuracy") == [None, 0.25, None, 0.75]
    assert HISTORY[1:].values("training.loss") == [2.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("los", "found `los`"),
        ("training.los", r"found `training\.los`"),
        ("evaluation.loss", r"found `evaluation\.loss`"),
        (3, "found 3"),
    ],
)
def test_metric_that_no_round_has_is_told_as_it_was_named(
    metric: Any, told: str
) -> None:
    with pytest.raises(errors.ConfigError, match=told):
        HISTORY.values(metric)


def test_bare_name_is_of_evaluation_where_there_will_be_one() -> None:
    assert History(RECORDS[:1], evaluates=True).values("loss") == [None]
    assert History(RECORDS[:1]).values("loss") == [3.0]


def test_table_has_a_row_a_round() -> None:
    frame = HISTORY.to_pandas()

    assert list(frame.index) == [1, 2, 3, 4]
    assert list(frame["training.loss"]) == [3.0, 2.0, 1.5, 1.0]
    assert list(frame["evaluation.accuracy"].dropna()) == [0.25, 0.75]


def test_picture_has_a_panel_a_metric() -> None:
    figure = HISTORY.plot()

    panels = {axes.get_ylabel(): axes.lines[0].get_xydata() for axes in figure.axes}
    assert panels["training.loss"].tolist() == [[1, 3.0], [2, 2.0], [3, 1.5], [4, 1.0]]
    assert panels["evaluation.accuracy"].tolist() == [[2, 0.25], [4, 0.75]]
    wide = History([RoundRecord(0, (0,), dict.fromkeys("abcdef", 1.0), None, 0.5)])
    figure = wide.plot()  # of four panels a row
    assert len(figure.axes) == 6
    assert figure.get_size_inches().tolist() == [18.0, 7.0]
    with pytest.raises(errors.ConfigError, match="without any number"):
        History().plot()
    assert (repr(History()), History().rows()) == ("<history of 0 rounds>", [])


def test_all_that_a_history_shows_counts_rounds_from_one(
    tmp_path: pathlib.Path,
) -> None:
    trace = tmp_path / "trace.json"

    HISTORY.write_trace(trace)

    events = json.loads(trace.read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "round"]
    assert named == ["round 1", "round 2", "round 3", "round 4"]
    assert list(HISTORY[1:3].plot().axes[0].lines[0].get_xdata()) == [2, 3]
    html: str = getattr(HISTORY, "_repr_html_")()  # noqa: B009
    assert re.findall("<tr><td>(.*?)</td>", html) == ["1", "2", "3", "4"]
    record = HISTORY[1]
    assert repr(record).startswith("<round 2: ")
    assert "round 2<" in getattr(record, "_repr_html_")()  # noqa: B009
    assert record.timeline().axes[0].get_title() == "round 2 of the run"


def test_notebook_shows_a_table_of_the_last_rounds() -> None:
    many = [
        RoundRecord(n, (0,), {"a<b": 1000 * n}, None, 0.1, bytes_sent=2_500_000)
        for n in range(30)
    ]

    shown = getattr(History(many), "_repr_html_")()  # noqa: B009

    assert shown.count("<tr>") == 21
    assert "30 rounds, the last 20 of them" in shown
    heads = re.findall("<th>(.*?)</th>", shown)
    assert heads[:3] == ["round", "training.<wbr>a&lt;b", "clients"]
    cells = re.findall("<td>(.*?)</td>", shown)[-len(heads) :]
    row = dict(zip(heads, cells, strict=True))
    assert (row["MB sent"], row["training.<wbr>a&lt;b"]) == ("2.500", "29,000")


class CountedMetrics(dict[str, float]):
    """Metrics that count how often they are read."""

    num_reads = 0

    @override
    def items(self) -> Any:
        CountedMetrics.num_reads += 1
        return super().items()


@pytest.mark.parametrize("metric", ["loss", "training.loss"])
def test_what_follows_a_round_reads_that_round_alone(
    tmp_path: pathlib.Path, linear_model: Model, metric: str
) -> None:
    losses = [3.0, float("nan"), 1.0, 2.0, 0.5, 0.7, 0.6, 0.8]
    stop = EarlyStopping(metric, patience=3)
    best = ModelCheckpoint(tmp_path / "best.keras", linear_model, metric)
    history = History()
    best.on_start(history)
    stops, saves, reads = [], [], []
    for index, loss in enumerate(losses):
        record = RoundRecord(index, (0,), CountedMetrics(loss=loss), None, 0.5)
        history = history.with_round(record)
        CountedMetrics.num_reads = 0
        best.on_round(record)
        stops.append(stop(history))
        saves.append(best.needs_state(record))
        reads.append(CountedMetrics.num_reads)

    assert saves == [True, False, True, False, True, False, False, False]
    assert stops == [False] * 7 + [True]
    assert [stop(history[:size]) for size in (8, 6, 7)] == [True, False, False]
    assert max(reads) <= 2  # by each of them
    assert pickle.loads(pickle.dumps(stop))(history)


def test_histories_that_part_keep_their_own_rounds() -> None:
    first, second = (History(RECORDS[:2]), History(RECORDS[:2]))
    longer = first.with_round(RECORDS[2])
    other = first.with_round(RECORDS[3])

    assert (list(first), list(longer)) == (RECORDS[:2], RECORDS[:3])
    assert list(other) == [*RECORDS[:2], RECORDS[3]]
    assert first == second
    assert (longer[-1], longer[::-1][0], len(first)) == (RECORDS[2], RECORDS[2], 2)
    with pytest.raises(IndexError):
        first[2]


def test_metrics_come_back_from_json_as_they_were() -> None:
    metrics = {
        "float": np.float32(0.1),
        "bfloat16": ml_dtypes.bfloat16(1.5),
        "counts": np.arange(6, dtype=np.int64).reshape(2, 3),
        "empty": np.zeros((0, 2), np.float32),
        "nan": float("nan"),
        "text": "a",
        "bytes": b"\0a",
        "flags": (True, None, [np.bool_(1)]),
        "inner": {"n": 2**70},
    }
    before = RoundRecord(3, (1, 2), metrics, None, 0.25, 1, (2,), 10, 20)

    (after,) = from_json([to_json(before)])

    assert repr(after) == repr(before)
    assert after == before
    assert History([after]) == History([before])
    assert isinstance(after.training["counts"], np.ndarray)
    assert after.training["bfloat16"].dtype == ml_dtypes.bfloat16


class Pair(NamedTuple):
    loss: Any
    names: Any


def test_metrics_are_read_as_they_come_back_from_json() -> None:
    inner = OrderedDict(count=np.arange(2), number=tf.constant(0.5))
    found = Pair(inner, np.array(["a", "b"]))

    metrics = read_metrics(found, "training")

    before = RoundRecord(0, (), metrics, None, 0.1)
    (after,) = from_json([to_json(before)])
    assert repr(after.training) == repr(before.training)
    assert type(metrics["loss"]) is dict
    assert metrics["loss"]["number"] == np.float32(0.5)
    assert metrics["names"] == ["a", "b"]


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": np.float32(2.0)},
        {"loss": [1.0]},
        {"loss": np.array([1.0, 1.0])},
        {"loss": math.nan},
        {"other": 1.0},
    ],
    ids=str,
)
def test_history_of_other_metrics_is_another(metrics: dict[str, Any]) -> None:
    history = History([RoundRecord(0, (), {"loss": 1.0}, None, 0.1)])

    assert history != History([RoundRecord(0, (), metrics, None, 0.1)])
    assert history != History()
    assert history != list(history)


@pytest.mark.parametrize(
    "value",
    [object(), 1j, np.array([object()]), tf.ragged.constant([[1], []])],
    ids=["object", "complex", "objects", "ragged"],
)
def test_metric_that_cannot_be_kept_is_told(value: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"`training\.model`"):
        read_metrics({"model": value}, "training")


@pytest.mark.parametrize(
    "metrics",
    [{"f1": [0.5, 0.7], "f1/0": 0.1}, {"a": {"b": 1}, "a/b": 2}, {1: 0.5, "1": 0.7}],
    ids=repr,
)
def test_numbers_of_one_name_are_refused(metrics: Any) -> None:
    for read in (read_evaluation, read_training):
        with pytest.raises(errors.ValueMismatchError, match="name"):
            read(metrics)


def test_array_of_one_number_is_a_number() -> None:
    metrics = {"loss": np.array([0.5]), "large": np.zeros(101), "text": "a"}

    history = History([RoundRecord(0, (), metrics, metrics, 0.1)])

    assert history.names() == ["training.loss", "evaluation.loss"]
    with pytest.raises(errors.ConfigError, match=r"found `training\.text`"):
        history.values("training.text")


def test_numbers_of_one_metric_have_names_each() -> None:
    metrics = {"f1": np.array([0.5, 0.25]), "pairs": [(1, 2.0)], "m": np.ones((1, 2))}
    history = History([RoundRecord(0, (), {}, metrics, 0.1)] * 2, evaluates=True)

    names = ["f1/0", "f1/1", "pairs/0/0", "pairs/0/1", "m/0/0", "m/0/1"]
    assert history.names() == [f"evaluation.{name}" for name in names]
    assert history.values("f1/1") == [0.25, 0.25]
    assert history.rows()[1]["evaluation.pairs/0/1"] == 2.0
    assert list(history.to_pandas()["evaluation.f1/0"]) == [0.5, 0.5]
    with pytest.raises(errors.ConfigError, match=r"evaluation\.f1/0.*found `f1`"):
        history.values("f1")
    with pytest.raises(errors.ConfigError, match="without any number"):
        history.plot()


@pytest.mark.parametrize("name", ["acc", "auc_1", "f1_score/0", "r2_score", "io_u/1/0"])
def test_more_of_some_metrics_is_better(name: str) -> None:
    history = History(RoundRecord(0, (), {name: v}, None, 0.1) for v in (0.5, 0.75))

    assert not EarlyStopping(name)(history)
    assert EarlyStopping(name, mode="min")(history)


@pytest.mark.parametrize(
    ("arguments", "stops"),
    [
        ({"monitor": "loss"}, False),
        ({"monitor": "loss", "mode": "max"}, True),
        ({"monitor": "loss", "min_delta": 1.25}, True),
        ({"monitor": "accuracy"}, False),
        ({"monitor": "accuracy", "mode": "min"}, True),
    ],
    ids=["falls", "falls and should rise", "falls by too little", "rises", "not less"],
)
def test_early_stopping_knows_better_from_worse(
    arguments: dict[str, str], stops: bool
) -> None:
    assert EarlyStopping(**arguments)(HISTORY) is stops  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "arguments",
    [{"patience": 1.5}, {"min_delta": -1.0}, {"min_delta": "a"}, {"mode": "up"}],
    ids=str,
)
def test_early_stopping_refuses_what_cannot_be(arguments: dict[str, object]) -> None:
    with pytest.raises(errors.ConfigError, match="Expected"):
        EarlyStopping(**{"monitor": "loss", **arguments})  # pyright: ignore[reportArgumentType]
