"""Tables that a machine lays by client: once, in any order, and read exactly."""

import pathlib
import pickle
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_fed.errors as errors
from ray_fed.data.sources import LaidSource
from ray_fed.files import laying
from ray_fed.program import ClientData
from tests.data import tables

NAMES: dict[str, Any] = {"client": "who", "x": ["a", "b"], "y": "y"}


def write(table: Any, path: pathlib.Path, **options: Any) -> pathlib.Path:
    pq.write_table(pa.table(table), path, **options)
    return path


def source_of(data: ClientData) -> LaidSource:
    assert isinstance(data.source, LaidSource)
    return data.source


def test_no_byte_of_another_client_is_read(tmp_path: pathlib.Path) -> None:
    table = tables.shuffled(tables.make_table(9))
    data = ClientData.from_parquet(write(table, tmp_path / "t.parquet"), **NAMES)

    for position in (2, 7):
        data[position].read()

    rows = np.isin(table["who"], [2, 7]).sum()
    assert source_of(data).laid.num_bytes_read == rows * (2 * 4 + 4)


def test_parts_of_any_size_give_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laying, "_PART_BYTES", 64)
    table = tables.make_table(30)
    path = write(tables.shuffled(table), tmp_path / "t.parquet", row_group_size=7)

    data = ClientData.from_parquet(path, **NAMES)

    tables.assert_same(
        tables.read(data), tables.expected(table, [["a", "b"], "y"], None)
    )


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

    laid = ClientData.from_parquet(path, client="who", **names)
    unlaid = ClientData.from_parquet(path, client="who", **names, copy_bytes=0)

    source_of(laid)
    assert laid.ids == unlaid.ids
    assert laid.type_signature == unlaid.type_signature
    for one, other in zip(laid, unlaid, strict=True):
        for column, wanted in zip(
            one.read().columns, other.read().columns, strict=True
        ):
            assert column.rows.dtype == wanted.rows.dtype
            np.testing.assert_array_equal(column.rows, wanted.rows)
            assert (column.splits is None) == (wanted.splits is None)
            if column.splits is not None:
                np.testing.assert_array_equal(column.splits, wanted.splits)


def test_a_machine_lays_once_and_frees_with_the_last_reader(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[laying.ClientTable] = []
    lay = laying.lay

    def count(table: laying.ClientTable) -> list[int]:
        made.append(table)
        return lay(table)

    monkeypatch.setattr(laying, "lay", count)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = write(tables.make_table(), tmp_path / "t.parquet")
    first = ClientData.from_parquet(path, **NAMES).source
    second = pickle.loads(pickle.dumps(first))

    wanted = first.read(3).columns[0].rows
    np.testing.assert_array_equal(second.read(3).columns[0].rows, wanted)
    assert len(made) == 1
    (folder,) = tmp_path.glob("ray_fed-*")
    assert [file.name for file in folder.iterdir()] == [first.token]
    assert (folder / first.token).stat().st_size < 1000

    del first
    np.testing.assert_array_equal(second.read(3).columns[0].rows, wanted)
    assert not list(folder.iterdir())


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
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
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


def test_files_that_have_other_clients_now_are_refused(tmp_path: pathlib.Path) -> None:
    table = tables.make_table(4)
    path = write(table, tmp_path / "t.parquet")
    data = ClientData.from_parquet(path, **NAMES)
    write(table | {"who": table["who"] + 1}, path)

    with pytest.raises(errors.ValueMismatchError, match="when the data was named"):
        data[0].read()
