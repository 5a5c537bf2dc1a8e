"""Ids of clients in files: no two clients become one in silence."""

import bz2
import contextlib
import functools
import gzip
import json
import logging
import lzma
import pathlib
import sqlite3
import struct
from collections.abc import Callable
from typing import Any

import federated_language as fl
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_fed.errors as errors
from ray_fed.learning import ClientStates
from ray_fed.program import ClientData
from ray_fed.tensorflow import external_data
from tests.data import tables
from tests.data.test_client_sqlite import FEATURES, example

NAMES: dict[str, Any] = {"client": "who", "x": "x"}


def write_csv(ids: list[str], folder: pathlib.Path) -> Callable[..., ClientData]:
    path = folder / "t.csv"
    rows = [f"{client},{row}.5\n" for row, client in enumerate(ids)]
    path.write_text("who,x\n" + "".join(rows))
    return functools.partial(ClientData.from_csv, path, **NAMES)


def write_hive(ids: list[str], folder: pathlib.Path) -> Callable[..., ClientData]:
    for row, client in enumerate(ids):
        (folder / f"t/who={client}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [row + 0.5]}), folder / f"t/who={client}/a")
    return functools.partial(ClientData.from_parquet, folder / "t", **NAMES)


def write_json(ids: list[str], folder: pathlib.Path) -> Callable[..., ClientData]:
    path = folder / "t.json"
    rows = [f'{{"who": {client}, "x": {row}.5}}\n' for row, client in enumerate(ids)]
    path.write_text("".join(rows))
    return functools.partial(ClientData.from_json, path, **NAMES)


CASES = [
    pytest.param(write_csv, ["007", "7", "12"], "'007' and '7'", id="zeros"),
    pytest.param(write_csv, ["12", "7", "0007", "007"], "'0007' and '", id="only odd"),
    pytest.param(write_csv, ['"007"', '"7"'], "'007' and '7'", id="quotes"),
    pytest.param(write_csv, ["0x10", "16"], "'0x10' and '16'", id="hexadecimal"),
    pytest.param(write_csv, [" 7", "7"], "' 7' and '7'", id="spaces by a number"),
    pytest.param(write_csv, ["a", " a", "a "], None, id="spaces"),
    pytest.param(write_csv, ["NA", "null", "nan", "x"], None, id="names of null"),
    pytest.param(write_csv, ["7", "NA"], "found 'NA': pass", id="null of numbers"),
    pytest.param(write_csv, ["2020-01-01", "2020-01-02"], "`date32", id="dates"),
    pytest.param(
        write_csv, ["2020-01-01 10:00", "2020-01-01 10:00:00"], "`timestamp", id="times"
    ),
    pytest.param(write_csv, ["true", "True", "1"], "found `bool`", id="booleans"),
    pytest.param(write_csv, ["1", "1.0"], "found `double`", id="fractions"),
    pytest.param(write_csv, ["1e3", "1000"], "found `double`", id="exponents"),
    pytest.param(write_csv, [f"{10**19}", f"{10**19 + 1}"], "found `double`", id="big"),
    pytest.param(write_hive, ["007", "7"], "'007' and '7'", id="folders"),
    pytest.param(write_hive, ["7", "a%20b"], None, id="folders of text"),
    pytest.param(write_json, ['"007"', '"7"'], None, id="JSON"),
    pytest.param(
        write_json, ['"2020-01-01"', '"2020-01-01 00"'], "`timestamp", id="JSON times"
    ),
]


@pytest.mark.parametrize(("write", "ids", "found"), CASES)
def test_ids_as_text_are_as_they_are_written(
    tmp_path: pathlib.Path, write: Any, ids: list[str], found: str | None
) -> None:
    read = write(ids, tmp_path)
    written = sorted(client.strip('"').replace("%20", " ") for client in ids)

    data = read(id_type=str)

    assert list(data.ids) == written
    assert all(len(rows) == 1 for rows in tables.read(data).values())
    if found is None:
        assert read().ids == data.ids
        return
    with pytest.raises(errors.ValueMismatchError, match=f"{found}.*`id_type=str`"):
        read()


@pytest.mark.parametrize("write", [write_csv, write_hive])
def test_ids_as_whole_numbers_are_one_client(
    tmp_path: pathlib.Path, write: Any
) -> None:
    read = write(["007", "7", "12"], tmp_path)

    data = read(id_type=int)

    assert {client: len(rows) for client, rows in tables.read(data).items()} == {
        7: 2,
        12: 1,
    }


def test_numbers_that_lose_their_text_are_told_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    read = write_csv(["007", "12", "007"], tmp_path)

    with caplog.at_level(logging.WARNING, "ray_fed"):
        assert read().ids == (7, 12)
        assert [record.args for record in caplog.records] == [
            ("who", f"`{tmp_path / 't.csv'}`", "007", 7)
        ]
        assert read(id_type=int).ids == (7, 12)
        assert len(caplog.records) == 1


def test_text_after_many_numbers_is_refused(tmp_path: pathlib.Path) -> None:
    read = write_csv([*map(str, range(200_000)), "abc"], tmp_path)

    with pytest.raises(errors.ValueMismatchError, match=r"in the first rows.*'abc'"):
        read()
    with pytest.raises(errors.ValueMismatchError, match=r"`who` .* pass `id_type=str`"):
        read(id_type=int)
    assert read(id_type=str)["abc"].weight == 1


@pytest.mark.parametrize(
    ("write", "ids", "options", "match"),
    [
        (write_csv, ["a", ""], {}, "every row .* found empty text"),
        (write_csv, ["7", ""], {"id_type": str}, "every row .* found empty text"),
        (write_csv, ["7", ""], {}, "found '': leave rows without a client out"),
        (write_csv, ["7", "1.5"], {"id_type": int}, "`id_type=int` reads .*'1.5'"),
        (write_hive, ["7", "a"], {"id_type": int}, "whole numbers, .*'a': pass"),
        (write_json, ["7", '"7"'], {"id_type": str}, "one type in each .*number to"),
        (write_json, ["7", "7.0"], {"id_type": str}, "`id_type=str` reads .*floating"),
        (write_csv, ["7"], {"id_type": float}, "`str`, `int` or None, found <class"),
    ],
)
def test_what_is_no_id_is_refused(
    tmp_path: pathlib.Path,
    write: Any,
    ids: list[str],
    options: dict[str, Any],
    match: str,
) -> None:
    read = write(ids, tmp_path)

    with pytest.raises(errors.UserError, match=match):
        read(**options)


@pytest.mark.parametrize(
    ("ids", "id_type", "expected"),
    [
        (["007", "7"], None, ("007", "7")),
        (["007", "7"], int, (7,)),
        (pd.Categorical(["007", "7"]), str, ("007", "7")),
        ([7, 8], str, ("7", "8")),
        ([True, False], str, ("false", "true")),
        ([7, "7"], str, "values of one type"),
        ([7.0, 8.0], str, "`id_type=str` reads .*floating"),
    ],
)
def test_ids_of_tables_in_memory(ids: Any, id_type: Any, expected: Any) -> None:
    frame = pd.DataFrame({"who": ids, "x": np.zeros(2, np.float32)})

    def read() -> ClientData:
        return ClientData.from_table(frame, id_type=id_type, **NAMES)

    if isinstance(expected, str):
        with pytest.raises(errors.ValueMismatchError, match=expected):
            read()
    else:
        assert read().ids == expected


@pytest.mark.parametrize(
    ("metadata", "examples"),
    [("TEXT", "TEXT"), ("TEXT COLLATE NOCASE", "TEXT COLLATE RTRIM"), ("TEXT", "INT")],
)
def test_ids_of_sqlite_are_compared_as_text(
    tmp_path: pathlib.Path, metadata: str, examples: str
) -> None:
    ids = ["007", "7", "A", "a", "a "]
    with contextlib.closing(sqlite3.connect(tmp_path / "c.sqlite")) as connection:
        connection.executescript(
            f"CREATE TABLE examples (split_name TEXT, client_id {examples},"
            " serialized_example_proto BLOB);"
            f"CREATE TABLE client_metadata (client_id {metadata}, split_name TEXT,"
            " num_examples INTEGER);"
            "CREATE INDEX by_client ON examples (client_id);"
        )
        for client in ids:
            row = ("train", client, example(client, 0))
            connection.execute("INSERT INTO examples VALUES (?, ?, ?)", row)
            row = (client, "train", 1)
            connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", row)
        connection.commit()

    def read() -> ClientData:
        return ClientData.from_sqlite(tmp_path / "c.sqlite", features=FEATURES)

    if examples == "INT":
        with pytest.raises(errors.ValueMismatchError, match=r"\['INTEGER', 'TEXT'\]"):
            read()
        return
    data = read()
    assert list(data.ids) == ids
    for client, rows in tables.read(data).items():
        np.testing.assert_array_equal(rows[0][0], [0, len(client)])


@pytest.mark.parametrize("build", [dict, pd.DataFrame])
@pytest.mark.parametrize("ids", [["7", b"7"], [7, "7"], [2**70, 1]])
def test_ids_of_several_types_are_refused(build: Any, ids: list[Any]) -> None:
    table = build({"who": ids, "x": [0.5, 1.5]})

    with pytest.raises(errors.ValueMismatchError, match="values of one type"):
        ClientData.from_table(table, **NAMES)


def test_ids_are_compared_as_python_does() -> None:
    def load(_: Any) -> Any:
        return np.float32(1)

    def build(*ids: Any) -> ClientData:
        return ClientData.from_function(ids, load, np.float32)

    assert len(build("7", b"7", 7)) == 3
    for same in ((1, 1.0), (1, True), ("a", np.str_("a")), (0.5, np.float64(0.5))):
        with pytest.raises(errors.ConfigError, match="2 times"):
            build(*same)
    assert repr(build(np.float64(0.5), np.int8(2)).ids) == "(0.5, 2)"
    states = ClientStates({"n": np.zeros(1)})
    for client in (True, 1.0):
        with pytest.raises(errors.ConfigError, match="Expected ids of clients"):
            states.put([client], [{"n": np.ones(1)}])  # pyright: ignore[reportArgumentType]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def pzstd(content: bytes) -> bytes:
    """Return two frames, each behind its size, as `pzstd` writes them."""
    frames = [zstd(content[:9]), zstd(content[9:])]
    sizes = [b"\x50\x2a\x4d\x18" + struct.pack("<II", 4, len(f)) for f in frames]
    return sizes[0] + frames[0] + sizes[1] + frames[1]


CODECS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".GZ": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
    ".BZ2": lambda content: bz2.compress(b"") + bz2.compress(content),
    ".zstd": pzstd,
    "": gzip.compress,
}


@pytest.mark.parametrize("place", ["file", "folders", "memory"])
@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("suffix", CODECS)
def test_compressed_text_is_read(
    tmp_path: pathlib.Path, suffix: str, kind: str, place: str
) -> None:
    frame = pd.DataFrame({"who": ["a", "b", "a"], "x": [1.5, 2.5, 3.5]})
    content = {
        "csv": frame.to_csv(index=False),
        "json": frame.to_json(orient="records", lines=True),
    }[kind]
    root = "memory://compressed" if place == "memory" else str(tmp_path)
    folder = f"{root}/t" + "/year=2020" * (place == "folders")
    fsspec.filesystem("memory" if place == "memory" else "file").makedirs(
        folder, exist_ok=True
    )
    path = f"{folder}/t.{kind}{suffix}"
    fsspec.filesystem("memory" if place == "memory" else "file").pipe_file(
        path, CODECS[suffix](str(content).encode())
    )
    from_text = getattr(ClientData, f"from_{kind}")

    data = from_text(f"{root}/t" if place == "folders" else path, **NAMES)

    assert tables.read(data) == {"a": [[1.5], [3.5]], "b": [[2.5]]}
    column = external_data.read(f"{path}#x", fl.TensorType(np.float64, [None]))
    np.testing.assert_array_equal(column, [1.5, 2.5, 3.5])


def test_size_of_compressed_text_is_known(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.json.gz"
    row = json.dumps({"who": "a", "x": 0.5}) + "\n"
    path.write_bytes(gzip.compress(row.encode() * 50_000))

    ClientData.from_json(path, **NAMES, copy_bytes=2 * len(row) * 50_000)
    with pytest.raises(errors.ConfigError, match=f"about {2 * len(row) * 50_000}: rai"):
        ClientData.from_json(path, **NAMES, copy_bytes=10**6)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lzma.compress(b"who,x\na,1\n"), r"\['bz2', 'gzip', .*found compression by xz"),
        (b"PK\x03\x04 and more", "found compression by zip: decompress"),
        (gzip.compress(b"who,x\na,1\n" * 9)[:-12], "(?i)compress|truncated"),
    ],
    ids=["xz", "zip", "a part of gzip"],  # gzip writes the time, xdist compares names
)
def test_compression_that_is_not_read_is_named(
    tmp_path: pathlib.Path, content: bytes, match: str
) -> None:
    (tmp_path / "t.csv").write_bytes(content)

    with pytest.raises(errors.UserError, match=match):
        ClientData.from_csv(tmp_path / "t.csv", **NAMES)
