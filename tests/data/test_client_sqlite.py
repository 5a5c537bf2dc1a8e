"""Clients out of SQLite files in the schema of TensorFlow Federated's client data."""

import contextlib
import pathlib
import sqlite3
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.program import ClientData
from tests.data import tables

FEATURES: dict[str, Any] = {
    "pixels": (np.float32, [2]),
    "label": tf.TensorSpec([], tf.int64),
    "words": (np.str_, [None]),
}
SIZES = {"anna": 3, "bert": 1, "carla": 2}


def example(client: str, index: int) -> bytes:
    words = [client.encode()] * index
    features = {
        "pixels": tf.train.Feature(float_list={"value": [index, len(client)]}),
        "label": tf.train.Feature(int64_list={"value": [index]}),
        "words": tf.train.Feature(bytes_list={"value": words}),
    }
    return tf.train.Example(features={"feature": features}).SerializeToString()


def write(path: pathlib.Path, *, is_indexed: bool = False) -> pathlib.Path:
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT,"
        " serialized_example_proto BLOB);"
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT,"
        " num_examples INTEGER);"
    )
    for index in range(3):  # clients in turn: none has its rows together
        for client, size in SIZES.items():
            if index < size:
                row = ("train", client, example(client, index))
                connection.execute("INSERT INTO examples VALUES (?, ?, ?)", row)
    counts = [(client, "train", size) for client, size in SIZES.items()]
    connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    connection.execute("INSERT INTO client_metadata VALUES ('dora', 'test', 1)")
    if is_indexed:
        connection.execute("CREATE INDEX by_client ON examples (client_id)")
    connection.commit()
    connection.close()
    return path


def test_split_decides_what_a_resume_compares(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "c.sqlite")
    train = ClientData.from_sqlite(path, features=FEATURES, split="train")

    both = ClientData.from_sqlite(path, features=FEATURES).select(train.ids)

    assert both.describe() == {**train.describe(), "split": None}


@pytest.mark.parametrize("is_indexed", [True, False], ids=["index", "no index"])
def test_each_client_has_its_examples(tmp_path: pathlib.Path, is_indexed: bool) -> None:
    path = write(tmp_path / "c.sqlite", is_indexed=is_indexed)

    data = ClientData.from_sqlite(path, features=FEATURES, split="train")

    assert str(data.type_signature) == "<pixels=float32[2],label=int64,words=str[?]>*"
    assert data.ids == ("anna", "bert", "carla")
    assert data.weights is not None
    assert data.weights.tolist() == [3, 1, 2]
    for client, rows in tables.read(data).items():
        assert len(rows) == SIZES[client]
        for index, (pixels, label, words) in enumerate(rows):
            np.testing.assert_array_equal(pixels, [index, len(client)])
            assert label == index
            assert list(words) == [client.encode()] * index


def test_examples_become_batches_of_inputs_and_labels(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "c.sqlite")
    features = {name: FEATURES[name] for name in ("pixels", "label")}
    data = ClientData.from_sqlite(path, features=features, split="train")

    batches = data.map(lambda e: {"x": e["pixels"], "y": e["label"]}).batch(2)

    assert str(batches.type_signature) == "<x=float32[?,2],y=int64[?]>*"
    assert [len(x) for x, _ in tables.read(batches)["anna"]] == [2, 1]


def test_client_with_other_examples_than_the_file_says_is_named(
    tmp_path: pathlib.Path,
) -> None:
    data = ClientData.from_sqlite(write(tmp_path / "c.sqlite"), features=FEATURES)

    with pytest.raises(errors.ValueMismatchError, match=r"'dora'.*found 0"):
        data.select(["dora"])[0].read()


def test_feature_that_an_example_lacks_is_named(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "c.sqlite")
    data = ClientData.from_sqlite(path, features={"size": np.int64}, split="train")

    with pytest.raises(errors.ValueMismatchError, match=r"'size'.*'anna'"):
        data[0].read()


@pytest.mark.parametrize(
    ("damage", "is_indexed"),
    [
        (b"\xff\xffjunk", True),
        (b"junk", False),
        ("text", True),
        (None, False),
        (7, True),
    ],
    ids=repr,
)
def test_damaged_example_is_named(
    tmp_path: pathlib.Path, damage: Any, is_indexed: bool
) -> None:
    path = write(tmp_path / "c.sqlite", is_indexed=is_indexed)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "UPDATE examples SET serialized_example_proto = ? WHERE rowid = 1"
        connection.execute(query, (damage,))
        connection.commit()

    data = ClientData.from_sqlite(path, features=FEATURES, split="train")

    with pytest.raises(errors.ValueMismatchError, match=r"client 'anna' in .*\.sqlite"):
        data[0].read()
    assert len(data[1].read()) == 1


def test_what_is_no_such_file_is_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "c.sqlite")
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    sqlite3.connect(tmp_path / "empty.sqlite").close()

    with pytest.raises(errors.ConfigError, match=r"'val'.*\['test', 'train'\]"):
        ClientData.from_sqlite(path, features=FEATURES, split="val")
    with pytest.raises(errors.ValueMismatchError, match=r"`label`, found `float64`"):
        ClientData.from_sqlite(path, features={"label": np.float64})
    with pytest.raises(errors.ValueMismatchError, match="cannot be read"):
        ClientData.from_sqlite(tmp_path / "text.sqlite", features=FEATURES)
    with pytest.raises(errors.ValueMismatchError, match="a table `examples`"):
        ClientData.from_sqlite(tmp_path / "empty.sqlite", features=FEATURES)
    with pytest.raises(errors.MissingFileError, match="found none"):
        ClientData.from_sqlite(tmp_path / "none.sqlite", features=FEATURES)
