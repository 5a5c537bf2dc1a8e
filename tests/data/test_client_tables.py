"""Clients out of tables: files, memory; sorted or not; what does not fit is named."""

import itertools
import pathlib
import pickle
import platform
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_fed.errors as errors
from ray_fed.program import ClientData
from tests.data import tables
from tests.data.tables import NAMES, write


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "not sorted"])
@pytest.mark.parametrize("copy_bytes", [0, 2**20], ids=["from files", "sorted"])
def test_one_file_gives_each_client_its_rows(
    tmp_path: pathlib.Path, is_sorted: bool, copy_bytes: int
) -> None:
    table = tables.make_table()
    laid = table if is_sorted else tables.shuffled(table)

    for group_rows, batch_size in itertools.product((1, 5, 1000), (None, 3)):
        path = write(laid, tmp_path / f"{group_rows}", row_group_size=group_rows)
        data = ClientData.from_parquet(
            path, **NAMES, batch_size=batch_size, copy_bytes=copy_bytes
        )

        wanted = tables.expected(table, [["a", "b"], "y"], batch_size)
        tables.assert_same(tables.read(data), wanted)
        assert data.weights is not None
        np.testing.assert_array_equal(data.weights, np.bincount(table["who"]))
        if batch_size:
            assert data.type_signature == tables.BATCHES


def test_many_files_and_pickled_sources_give_the_same(tmp_path: pathlib.Path) -> None:
    table = tables.make_table(9)
    bounds = [0, 7, 8, 20, len(table["who"])]
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part = {name: column[start:stop] for name, column in table.items()}
        write(part, tmp_path / f"t/part{index}.parquet", row_group_size=4)

    folder = ClientData.from_parquet(tmp_path / "t", **NAMES)
    files = sorted((tmp_path / "t").iterdir())
    listed = ClientData.from_parquet(files, **NAMES)

    (tmp_path / "u").mkdir()
    files[-1].rename(tmp_path / "u/last.parquet")
    folders = ClientData.from_parquet([tmp_path / "t", tmp_path / "u"], **NAMES)

    wanted = tables.expected(table, [["a", "b"], "y"], None)
    tables.assert_same(tables.read(folders), wanted)
    (tmp_path / "u/last.parquet").rename(files[-1])
    pattern = ClientData.from_parquet(tmp_path / "t/part*.parquet", **NAMES)
    for each in (folder, listed, pattern):
        tables.assert_same(tables.read(each), wanted)
    source = pickle.loads(pickle.dumps(folder.source))
    again = folder.source.read(3)
    for column, other in zip(source.read(3).columns, again.columns, strict=True):
        np.testing.assert_array_equal(column.rows, other.rows)


def test_hive_folders_are_clients(tmp_path: pathlib.Path) -> None:
    for client in ("anna", "bert"):
        count = len(client) - 2 * (client == "bert")
        rows = {"a": np.arange(count, dtype=np.float32)}
        write(rows, tmp_path / f"t/who={client}/rows.parquet")

    for path in ("t", "t/who=*/*.parquet"):
        data = ClientData.from_parquet(tmp_path / path, client="who", x="a")

        assert data.ids == ("anna", "bert")
        assert [len(rows) for rows in tables.read(data).values()] == [4, 2]


@pytest.mark.parametrize("name", ["t.parquet", "t.par*"])
def test_uris_of_fsspec_are_read(name: str) -> None:
    table = tables.make_table()
    with fsspec.open("memory://ratings/t.parquet", "wb") as file:
        pq.write_table(pa.table(table), file)

    data = ClientData.from_parquet(f"memory://ratings/{name}", **NAMES)

    wanted = tables.expected(table, [["a", "b"], "y"], None)
    tables.assert_same(tables.read(data), wanted)


def test_only_row_groups_of_the_client_are_read(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    table = {"who": np.repeat(np.arange(20), 10_000), "a": rng.normal(size=200_000)}
    path = write(table, tmp_path / "t.parquet", row_group_size=10_000)
    data = ClientData.from_parquet(path, client="who", x="a", copy_bytes=0)
    data[0].read()
    before = count_read()

    data[3].read()
    data[17].read()

    assert count_read() - before < 5 * 80_000 < path.stat().st_size


def count_read() -> int:
    """Return the bytes that this process has asked the system to read."""
    (line, *_) = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(line.removeprefix("rchar:"))


@pytest.mark.parametrize("kind", [pd.DataFrame, pa.table, dict])
def test_tables_in_memory_give_each_client_its_rows(kind: Any) -> None:
    table = tables.make_table()
    wanted = tables.expected(table, [["a", "b"], "y"], 2)

    for laid in (table, tables.shuffled(table)):
        data = ClientData.from_table(kind(laid), **NAMES, batch_size=2)

        tables.assert_same(tables.read(data), wanted)


def test_a_grouped_table_is_copied_once_for_all_clients() -> None:
    table = pa.table(tables.make_table())

    data = ClientData.from_table(table, client="who", x="a", y="y")

    whole = table.column("a").chunk(0).to_numpy()
    rows = [client.read().columns[0].rows for client in data]
    assert not any(np.shares_memory(whole, part) for part in rows)
    assert len({id(part.base) for part in rows}) == 1


def test_named_inputs_strings_lists_and_images() -> None:
    table = {
        "who": ["b", "a", "b"],
        "word": ["one", "two", "three"],
        "tags": [[1], [], [2, 3]],
        "image": pa.FixedSizeListArray.from_arrays(
            pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.uint8()), 2), 2
        ),
        "kind": pa.array(["p", "q", "p"]).dictionary_encode(),
    }

    data = ClientData.from_table(
        table,
        client="who",
        x={"word": "word", "tags": "tags", "image": "image", "kind": "kind"},
    )

    assert str(data.type_signature) == (
        "<x=<word=str,tags=int64[?],image=uint8[2,2],kind=str>>*"
    )
    (first, second) = tables.read(data)["b"]
    assert first[0] == b"one"
    assert second[0] == b"three"
    np.testing.assert_array_equal(second[1], [2, 3])
    np.testing.assert_array_equal(first[2], [[0, 1], [2, 3]])
    assert second[3] == b"p"


def test_lists_of_one_length_are_batched_and_others_are_named() -> None:
    table = {"who": [1, 1, 2, 2], "x": [[1, 2], [3, 4], [1], [1, 2]]}

    data = ClientData.from_table(table, client="who", x="x", batch_size=2)

    np.testing.assert_array_equal(tables.read(data[:1])[1][0][0], [[1, 2], [3, 4]])
    with pytest.raises(errors.ValueMismatchError, match=r"client 2, found .*pad them"):
        data[1].read()


def test_dtypes_cast_and_name_what_does_not_fit() -> None:
    table = {"who": [1, 1, 2], "x": [1, 2, 300], "y": [0.5, 1.0, 2.0]}

    data = ClientData.from_table(
        table, client="who", x="x", y="y", dtypes={"y": np.float32}
    )

    assert str(data.type_signature) == "<x=int64,y=float32>*"
    with pytest.raises(errors.ValueMismatchError, match=r"column `x` .* client 2"):
        ClientData.from_table(table, client="who", x="x", dtypes={"x": np.uint8})


ROUTES = pytest.mark.parametrize("route", ["memory", "file", "sorted"])


@ROUTES
def test_what_a_cast_would_change_is_named(tmp_path: pathlib.Path, route: str) -> None:
    told = r"column `x` .* client 'v'"
    for cell, dtype in (
        (1e300, np.float32),
        (-1e300, np.float32),
        (70000.0, np.float16),
        (0.5, np.bool_),
        (2.0, np.bool_),
        (0.5, np.int32),
        (1e10, np.int32),
    ):
        table = {"who": ["u", "v", "v"], "x": [1.0, 0.0, cell]}
        build = _building(table, tmp_path, route)

        with pytest.raises(errors.ValueMismatchError, match=told):
            tables.read(build(x="x", dtypes={"x": dtype}))


def _building(table: Any, folder: pathlib.Path, route: str) -> Any:
    """Return a function that makes data of a table, by one of the routes."""
    path = write(pa.table(table), folder / "t.parquet")

    def build(**options: Any) -> ClientData:
        if route == "memory":
            return ClientData.from_table(table, client="who", **options)
        copy_bytes = 2**20 * (route == "sorted")
        return ClientData.from_parquet(
            path, client="who", **options, copy_bytes=copy_bytes
        )

    return build


def test_lists_of_one_length_in_memory_have_its_shape() -> None:
    rows = {"who": [1, 2], "image": [[[1, 2], [3, 4]]] * 2, "tags": [[1], [2, 3]]}

    for table in (rows, pd.DataFrame(rows)):
        data = ClientData.from_table(table, client="who", x={"i": "image", "t": "tags"})

        assert str(data.type_signature) == "<x=<i=int64[2,2],t=int64[?]>>*"
        np.testing.assert_array_equal(data.read(1)[0]["x"]["i"], [[1, 2], [3, 4]])


@pytest.mark.parametrize("cell", [None, np.nan], ids=["null", "NaN"])
@ROUTES
def test_missing_labels_never_reach_the_weights(
    tmp_path: pathlib.Path, cell: Any, route: str
) -> None:
    labels = pa.array([1.0, cell, 2.0, 3.0], pa.float64())
    table = pa.table({"who": ["a", "b", "b", "c"], "x": [1, 2, 3, 4], "y": labels})
    build = _building(table, tmp_path, route)

    with pytest.raises(errors.ValueMismatchError, match=r"column `y` .* client 'b'"):
        tables.read(build(x="x", y="y"))
    dropped = tables.read(build(x="x", y="y", missing="drop"))
    assert [len(rows) for rows in dropped.values()] == [1, 1, 1]
    kept = tables.read(build(x="x", y="y", missing="keep"))
    assert np.isnan(kept["b"][0][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "aa"}, "a column `aa` in .* Did you mean `a`"),
        ({"client": "who_is_it"}, "Did you mean `who`"),
        ({"client": "whom"}, "a column `whom`"),
        ({"x": ["a", "n"]}, "one dtype to stack.*`a` float32.*`n` int64"),
        ({"x": None}, "a list of columns or a dictionary of them .*, found None"),
        ({"x": 3}, "a list of columns or a dictionary of them .*, found 3"),
        ({"x": []}, "one dtype to stack.*found none"),
        ({"client": "a"}, "whole numbers or strings.*`a`.*found `float"),
        ({"missing": "ignore"}, "`missing` to be one of"),
        ({"dtypes": {"q": np.int8}}, r"for columns of `x` and `y`, found \['q'\]\.$"),
        ({"dtypes": {"aa": np.int8}}, r"found \['aa'\]\. Did you mean `a`\?"),
        (
            {"x": {"num": ["a", "n"]}, "dtypes": {"num": "float32"}},
            r"found \['num'\]: name the columns of `num`, \['a', 'n'\]\.",
        ),
        ({"batch_size": 0}, "`batch_size` to be a whole number of at least 1"),
        ({"x": "t"}, "column `t` of .*found `timestamp"),
    ],
)
def test_bad_columns_are_named(options: dict[str, Any], message: str) -> None:
    times = pa.array([0, 1], pa.timestamp("s"))
    columns = {"who": [1, 2], "a": pa.array([0, 1], pa.float32()), "n": [1, 2]}
    given: dict[str, Any] = {"client": "who", "x": "a"} | options

    with pytest.raises(errors.UserError, match=message):
        ClientData.from_table(pa.table(columns | {"t": times}), **given)


def test_empty_folders_have_no_columns_to_say(tmp_path: pathlib.Path) -> None:
    path = write({"who": ["a"], "x": [1]}, tmp_path / "t.parquet")
    (tmp_path / "empty").mkdir()

    data = ClientData.from_parquet([tmp_path / "empty", path], client="who", x="x")

    assert tables.read(data) == {"a": [[1]]}


def test_column_that_is_there_twice_is_named(tmp_path: pathlib.Path) -> None:
    arrays = [pa.array(["a", "b"]), pa.array([1.0, 2.0]), pa.array([3.0, 4.0])]
    table = pa.Table.from_arrays(arrays, ["who", "d", "d"])
    frame = pd.DataFrame([["a", 1, 2]], columns=["who", "d", "d"])
    pq.write_table(table, tmp_path / "t.parquet")
    given: dict[str, Any] = {"client": "who", "x": "d"}

    for found in (table, frame):
        with pytest.raises(errors.ConfigError, match=r"one column `d` .* found 2 of"):
            ClientData.from_table(found, **given)
    with pytest.raises(errors.ConfigError, match="found some of one name"):
        ClientData.from_parquet(tmp_path / "t.parquet", **given)


def test_files_that_are_not_alike_are_refused(tmp_path: pathlib.Path) -> None:
    write({"who": [1], "a": np.zeros(1, np.float32)}, tmp_path / "t/1.parquet")
    write({"who": [2], "a": np.zeros(1, np.float64)}, tmp_path / "t/2.parquet")

    with pytest.raises(
        errors.ValueMismatchError, match=r"column `a` .*`float`.*2\.parquet.*`double`"
    ):
        ClientData.from_parquet(tmp_path / "t", client="who", x="a")
    write({"who": [2]}, tmp_path / "t/2.parquet")
    with pytest.raises(errors.ConfigError, match=r"column `a` in .*2\.parquet"):
        ClientData.from_parquet(tmp_path / "t", client="who", x="a")


def test_bytes_of_a_file_of_another_kind_are_not_shown(tmp_path: pathlib.Path) -> None:
    path = write({"who": ["a", "b"], "x": [1.0, 2.0]}, tmp_path / "t.parquet")

    with pytest.raises(errors.ValueMismatchError, match="from_parquet") as caught:
        ClientData.from_csv(path, client="who", x="x")

    assert str(caught.value).isprintable()
    assert caught.value.__suppress_context__  # of arrow, which has the same text


def test_what_is_no_table_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "empty").mkdir()

    with pytest.raises(errors.ValueMismatchError, match="whole parquet files"):
        ClientData.from_parquet(tmp_path / "t.parquet", client="who", x="a")
    with pytest.raises(errors.MissingFileError, match="found an empty folder"):
        ClientData.from_parquet(tmp_path / "empty", client="who", x="a")
    with pytest.raises(errors.ConfigError, match="as `path`, found none"):
        ClientData.from_parquet([], client="who", x="a")
    with pytest.raises(errors.ConfigError, match=r"`copy_bytes` to be .* found -1"):
        ClientData.from_parquet("t", client="who", x="a", copy_bytes=-1)
    for name in ("none.parquet", "none*.parquet"):
        with pytest.raises(errors.MissingFileError, match="found none"):
            ClientData.from_parquet(tmp_path / name, client="who", x="a")
    with pytest.raises(errors.ValueMismatchError, match=r"Expected a pyarrow\.Table"):
        ClientData.from_table(3, client="who", x="a")


@pytest.mark.parametrize("copy_bytes", [0, 2**20], ids=["from files", "sorted"])
@pytest.mark.parametrize(
    "changed",
    [
        {"who": [1, 1, 2], "a": [1.0, 2.0, 4.0]},
        {"who": [1, 2, 2], "a": [1.0, 2.0, 3.0]},
        {"who": [1, 1, 2], "a": [1.0, 2.0, 3.0], "b": [1, 2, 3]},
    ],
    ids=["values", "clients", "columns"],
)
def test_a_file_that_is_replaced_is_noticed(
    tmp_path: pathlib.Path, changed: Any, copy_bytes: int
) -> None:
    path = write({"who": [1, 1, 2], "a": [1.0, 2.0, 3.0]}, tmp_path / "t.parquet")
    named: dict[str, Any] = {"client": "who", "x": "a", "copy_bytes": copy_bytes}
    data = ClientData.from_parquet(path, **named)

    write(changed, path)

    with pytest.raises(
        errors.ValueMismatchError, match=r"\.parquet` when the `ClientData` was made"
    ):
        data[0].read()


def test_copies_of_a_file_on_other_machines_are_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write({"who": [1, 2], "a": [1.0, 2.0]}, tmp_path / "t.parquet")
    data = ClientData.from_parquet(path, client="who", x="a")

    monkeypatch.setattr(platform, "node", lambda: "another")
    path.write_bytes(path.read_bytes())

    assert tables.read(data) == {1: [[1.0]], 2: [[2.0]]}


def test_a_file_that_changes_is_an_error_of_its_client(tmp_path: pathlib.Path) -> None:
    path = write(tables.make_table(), tmp_path / "t.parquet")
    data = ClientData.from_parquet(path, **NAMES)
    path.unlink()

    with pytest.raises(errors.MissingFileError, match=r"t\.parquet"):
        data[0].read()
