"""Tables in files that a machine sorts by client: once, exactly, shared, swept."""

import json
import logging
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pytest

import ray_fed.errors as errors
from ray_fed.data import ClientData
from ray_fed.files import sorted_rows
from ray_fed.values import read_limits
from tests.data import tables
from tests.data.tables import NAMES, write


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where this machine sorts tables."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ray_fed-{os.getuid()}"


WRITE: dict[str, Callable[[pd.DataFrame, pathlib.Path], Any]] = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "json": lambda frame, path: frame.to_json(
        path, orient="records", lines=True, double_precision=15
    ),
    "arrow": pyarrow.feather.write_feather,
}


@pytest.mark.parametrize(
    ("kind", "ids"), [("csv", "numbers"), ("json", "text"), ("arrow", "numbers")]
)
def test_files_of_every_format_are_the_groups_of_pandas(
    tmp_path: pathlib.Path, kind: str, ids: str
) -> None:
    table = tables.shuffled(tables.make_table())
    frame = pd.DataFrame(table).astype({"a": "float64", "b": "float64", "y": "int64"})
    if ids == "text":
        frame["who"] = "c" + frame["who"].astype(str)

    WRITE[kind](frame, tmp_path / "t")
    data = getattr(ClientData, f"from_{kind}")(tmp_path / "t", **NAMES)

    groups = dict(iter(frame.groupby("who")))
    assert list(data.ids) == list(groups)
    assert str(data.type_signature) == "<x=float64[2],y=int64>*"
    for client, rows in groups.items():
        x, y = data.select([client])[0].read().columns
        np.testing.assert_allclose(x.rows, rows[["a", "b"]].to_numpy(), rtol=1e-12)
        np.testing.assert_array_equal(y.rows, rows["y"].to_numpy())


def test_files_in_folders_of_text_are_one_table(tmp_path: pathlib.Path) -> None:
    for client, cells in (("anna", "1,x\n2,\n"), ("bert", "3,y\n")):
        (tmp_path / f"t/who={client}").mkdir(parents=True)
        (tmp_path / f"t/who={client}/rows.csv").write_text(f"n,word\n{cells}")

    data = ClientData.from_csv(tmp_path / "t", client="who", x="n", y="word")

    assert tables.read(data) == {"anna": [[1, b"x"], [2, b""]], "bert": [[3, b"y"]]}
    (tmp_path / "t/who=bert/rows.csv").write_text("m,word\n3,y\n")
    with pytest.raises(errors.ConfigError, match=r"a column `n` in .*bert/rows\.csv"):
        ClientData.from_csv(tmp_path / "t", client="who", x="n")


def test_text_that_does_not_fit_its_column_names_the_file(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("who,x\n" + "1,2\n" * 300_000 + "1,word\n")

    with pytest.raises(errors.ValueMismatchError, match=r"t\.csv.*'word'"):
        ClientData.from_csv(path, client="who", x="x")[0].read()
    with pytest.raises(errors.ConfigError, match=r"at most 9 bytes .*`copy_bytes`"):
        ClientData.from_csv(path, client="who", x="x", copy_bytes=9)


@pytest.mark.parametrize("group_rows", [7, 1000])
def test_buckets_of_any_size_give_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(sorted_rows, "_BUCKET_BYTES", 64)
    table = tables.make_table(30)
    laid = tables.shuffled(table)
    path = write(laid, tmp_path / "t.parquet", row_group_size=group_rows)

    found = tables.read(ClientData.from_parquet(path, **NAMES))

    tables.assert_same(found, tables.expected(table, [["a", "b"], "y"], None))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 3, 1, 2]])
def test_strings_lists_and_images_are_what_the_files_have(
    tmp_path: pathlib.Path, order: list[int]
) -> None:
    rows = pa.table(
        {
            "who": ["a", "b", "b", "c", "c"],
            "word": ["one", "", "three", "\u00e9", "five"],
            "tags": [[1], [], [2, 3], [], [4, 5, 6]],
            "names": [["x"], [], ["yy", ""], ["z"], []],
            "flag": [True, False, True, True, False],
            "image": pa.FixedSizeListArray.from_arrays(
                pa.FixedSizeListArray.from_arrays(pa.array(range(20), pa.uint8()), 2), 2
            ),
        }
    )
    path = write(rows.take(order), tmp_path / "t.parquet")
    names: dict[str, Any] = {"x": {n: n for n in rows.column_names[1:]}}

    mapped = ClientData.from_parquet(path, client="who", **names)
    in_place = ClientData.from_parquet(path, client="who", **names, copy_bytes=0)

    assert mapped.ids == in_place.ids
    assert mapped.type_signature == in_place.type_signature
    for one, other in zip(mapped, in_place, strict=True):
        for column, wanted in zip(
            one.read().columns, other.read().columns, strict=True
        ):
            assert column.rows.dtype == wanted.rows.dtype
            np.testing.assert_array_equal(column.rows, wanted.rows)
            assert (column.splits is None) == (wanted.splits is None)
            if column.splits is not None:
                np.testing.assert_array_equal(column.splits, wanted.splits)


def test_a_machine_sorts_once_and_frees_with_the_owner(
    tmp_path: pathlib.Path, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tables.make_table(), tmp_path / "t.parquet")
    first = ClientData.from_parquet(path, **NAMES).source
    second = pickle.loads(pickle.dumps(first))

    wanted = first.read(3).columns[0].rows
    np.testing.assert_array_equal(second.read(3).columns[0].rows, wanted)
    assert caplog.text.count("Sorted 7 clients") == 1
    assert len(list(folder.iterdir())) == 1

    del first
    np.testing.assert_array_equal(second.read(2).columns[0].rows.shape[1:], [2])
    assert not list(folder.iterdir())


SORTING = """
import os, pickle, signal, sys
source = pickle.load(open(sys.argv[1], "rb"))
source.read(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_sorted_serves_others_and_is_swept(
    tmp_path: pathlib.Path, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tables.make_table(), tmp_path / "t.parquet")
    data = ClientData.from_parquet(path, **NAMES)
    (tmp_path / "source").write_bytes(pickle.dumps(data.source))
    killed = subprocess.run(
        [sys.executable, "-c", SORTING, str(tmp_path / "source")],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (folder / "left by another").write_bytes(b"of a program that was killed")
    (kept,) = [p for p in folder.iterdir() if p.name != "left by another"]

    wanted = tables.expected(tables.make_table(), [["a", "b"], "y"], None)
    tables.assert_same(tables.read(data), wanted)
    assert not caplog.text

    other = ClientData.from_parquet(path, **NAMES)
    tables.assert_same(tables.read(other), wanted)
    found = set(folder.iterdir())
    assert kept in found
    assert len(found) == 2


def test_a_file_that_is_cut_short_is_sorted_again(
    tmp_path: pathlib.Path, folder: pathlib.Path
) -> None:
    path = write(tables.make_table(), tmp_path / "t.parquet")
    data = ClientData.from_parquet(path, **NAMES)
    copy = pickle.loads(pickle.dumps(data.source))
    data[0].read()
    (sorted_file,) = folder.iterdir()
    content = sorted_file.read_bytes()
    sorted_file.unlink()
    sorted_file.write_bytes(content[: len(content) // 2])

    assert len(copy.read(3)) == len(data[3].read())
    assert sorted_file.stat().st_size == len(content)


def test_waiting_ends_when_nobody_waits(
    tmp_path: pathlib.Path, folder: pathlib.Path
) -> None:
    import fcntl

    data = ClientData.from_parquet(
        write(tables.make_table(), tmp_path / "t.parquet"), **NAMES
    )
    copy = pickle.loads(pickle.dumps(data.source))
    data[0].read()
    (path,) = folder.iterdir()
    path.unlink()

    def give_up() -> None:
        raise read_limits.AbandonedError("nobody waits")

    with (
        path.open("ab") as held,
        read_limits.limited(read_limits.limits(), lambda: None),
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            read_limits.limited(read_limits.limits(), give_up),
            pytest.raises(errors.ClusterError),
        ):
            copy.read(0)


def test_a_client_that_does_not_fit_fails_alone(tmp_path: pathlib.Path) -> None:
    table = tables.make_table(5)
    table["a"][np.flatnonzero(table["who"] == 3)[0]] = np.nan
    data = ClientData.from_parquet(write(table, tmp_path / "t.parquet"), **NAMES)

    found = tables.read(data.select([0, 1, 2, 4]))

    wanted = tables.expected(table, [["a", "b"], "y"], None)
    del wanted[3]
    tables.assert_same(found, wanted)
    with pytest.raises(
        errors.ValueMismatchError, match=r"`a` .* client 3, found 1 val"
    ):
        data[3].read()


def test_no_room_is_named(
    tmp_path: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ClientData.from_parquet(
        write(tables.make_table(), tmp_path / "t.parquet"), **NAMES
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=10)

    def give(_: str) -> object:
        return usage

    monkeypatch.setattr(shutil, "disk_usage", give)

    with pytest.raises(errors.ResourceError, match=r"found 10 bytes.*copy_bytes=0"):
        data[0].read()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "changed", ["n,who\n1,a\n2,c\n", "n,who\n1,a\n2,a\n"], ids=["others", "rows"]
)
def test_copies_of_text_with_other_clients_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("n,who\n1,a\n2,b\n")
    data = ClientData.from_csv(path, client="who", x="n")

    monkeypatch.setattr("platform.node", lambda: "another")
    path.write_text(changed)

    with pytest.raises(errors.ValueMismatchError, match="when the `ClientData` was"):
        data[0].read()


def test_json_with_lists_has_lists(tmp_path: pathlib.Path) -> None:
    rows = [{"who": "a", "x": [1, 2]}, {"who": "b", "x": []}, {"who": "a", "x": [3]}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = tables.read(ClientData.from_json(path, client="who", x="x"))

    lists = {c: [r[0].tolist() for r in each] for c, each in found.items()}
    assert lists == {"a": [[1, 2], [3]], "b": [[]]}
