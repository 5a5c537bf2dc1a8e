"""Every kind of column as clients and as values: what pandas has, or what to type."""

# pyright: reportUnknownLambdaType=false

import datetime as dt
import decimal
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_fed.errors as errors
from ray_fed.learning import partition
from ray_fed.program import ClientData

WHO = ["b", "a", "b", "a"]
X = np.arange(4, dtype=np.float32)
DAY = dt.date(2020, 2, 3)
NO_CLIENT = r'1 null from row 1 on.*`frame.dropna\(subset=\["who"\]\)`\.'
AS_TEXT = r'whole numbers or strings.*`frame.astype\(\{"who": "str"\}\)`'

CLIENTS: dict[str, tuple[Any, str | None]] = {
    "int": ([2, 1, 2, 1], None),
    "uint64": (np.array([2**63 + 5, 7, 2**63 + 5, 7], np.uint64), None),
    "one uint64": (np.array([2**64 - 1] * 4, np.uint64), None),
    "str": (["b", "a", "b", "a"], None),
    "bytes": ([b"b", b"a", b"b", b"a"], None),
    "Int64": (pd.array([2, 1, 2, 1], "Int64"), None),
    "string": (pd.array(WHO, "string"), None),
    "string[pyarrow]": (pd.array(WHO, "string[pyarrow]"), None),
    "category": (pd.Categorical(WHO), None),
    "unused categories": (pd.Categorical(WHO, ["z", "b", "y", "a"]), None),
    "unused numbers": (pd.Categorical([2, 1, 2, 1], [3, 2, 0, 1]), None),
    "large_binary": (
        pd.array([b"b", b"a"] * 2, pd.ArrowDtype(pa.large_binary())),
        None,
    ),
    "fixed binary": (pd.array([b"b", b"a"] * 2, pd.ArrowDtype(pa.binary(1))), None),
    "int and None": (
        [2, None, 2, 1],
        NO_CLIENT.replace(r"`\.", r'.astype\({"who": "int64"}\)`\.'),
    ),
    "str and None": (["b", None, "b", "a"], NO_CLIENT),
    "str and NaN": (["b", np.nan, "b", "a"], NO_CLIENT),
    "Int64 and NA": (pd.array([2, None, 2, 1], "Int64"), NO_CLIENT),
    "string and NA": (pd.array(["b", None, "b", "a"], "string"), NO_CLIENT),
    "category and None": (pd.Categorical(["b", None, "b", "a"]), NO_CLIENT),
    "boolean and NA": (pd.array([True, None, False, True], "boolean"), NO_CLIENT),
    "None": ([None] * 4, "nulls from row 0 on"),
    "bool": ([True, False, True, False], AS_TEXT),
    "date": ([DAY] * 4, AS_TEXT),
    "datetime": (pd.to_datetime(["2020-02-03"] * 4), AS_TEXT),
    "timedelta": (pd.to_timedelta([1, 2, 1, 2], "s"), AS_TEXT),
    "decimal": ([decimal.Decimal("1.5")] * 4, AS_TEXT),
    "category of dates": (pd.Categorical([DAY] * 4), AS_TEXT),
    "list": ([[1]] * 4, AS_TEXT),
    "float": ([2.0, 1.0, 2.0, 1.0], r'found `double`.*\{"who": "int64"\}'),
    "int and str": (["b", 1, "b", 1], "values of one type"),
}
"""Columns of clients, and what an error says of them; None: there is none."""


def as_bytes(column: Any) -> Any:
    return column.astype("object").map(lambda cell: str(cell).encode())


def same(column: Any) -> Any:
    return column


def cast(dtype: Any) -> Any:
    return lambda column: column.astype(dtype)


GAP = [1, None, 2, 4]
F32: dict[str, Any] = {"dtypes": {"x": np.float32}}
I64: dict[str, Any] = {"dtypes": {"x": np.int64}}
KEEP: dict[str, Any] = {"missing": "keep"}
DROP: dict[str, Any] = {"missing": "drop"}
TIMES = pd.to_datetime(["2020-02-03", "1969-12-31", "2020-02-05", "2021-01-01"])
GAPPED_TIMES = TIMES.where(np.array([True, False, True, True]))
LISTS = [[1.0, 2.0], [3.0], [], [4.0]]
CODES = r'StringLookup.*`frame\["x"\].astype\("category"\).cat.codes`'
NULLS = r'client \'a\', found 1 null: fill them.*"drop"`'
NAN = NULLS + r', or as NaN with `dtypes=\{"x": np.float32\}` and `missing="keep"`'
UNIT = r'`dtypes=\{"x": np.int64\}` for whole numbers in its unit \(.*1970'

VALUES: dict[str, tuple[Any, dict[str, Any], Callable[[Any], Any] | str]] = {
    "int64": ([1, 2, 3, 4], {}, same),
    "float16": (X.astype(np.float16), {}, same),
    "bool": ([True, False, False, True], {}, same),
    "bool as float": ([True, False, False, True], F32, cast("float32")),
    "Int64": (pd.array([1, 2, 3, 4], "Int64"), {}, same),
    "Int64, a gap": (pd.array(GAP, "Int64"), {}, NAN),
    "Int64, a gap is kept": (pd.array(GAP, "Int64"), KEEP, NAN),
    "Int64, a gap is NaN": (pd.array(GAP, "Int64"), KEEP | F32, cast("float32")),
    "Int64, a gap is dropped": (pd.array(GAP, "Int64"), DROP, lambda x: x.dropna()),
    "Float64, a gap is kept": (pd.array(GAP, "Float64"), KEEP, cast("float64")),
    "boolean, a gap": (pd.array([True, None] * 2, "boolean"), {}, "2 nulls"),
    "boolean, a gap is NaN": (
        pd.array([True, None, False, True], "boolean"),
        KEEP | F32,
        cast("Float32"),
    ),
    "infinite": ([-np.inf, np.inf, 0.0, np.inf], F32, cast("float32")),
    "float, a gap is no int": (pd.array(GAP, "Float64"), I64 | KEEP, NULLS),
    "float, a NaN": ([1.0, np.nan, 2.0, 3.0], {}, NULLS),
    "str": (["u", "v", "w", "u"], {}, as_bytes),
    "str, a gap": (["u", None, "w", "u"], {}, NULLS + ', or take each as `""` with'),
    "str, a gap is kept": (
        ["u", None, "w", "u"],
        KEEP,
        lambda x: as_bytes(x.fillna("")),
    ),
    "string, a gap is kept": (
        pd.array(["u", None, "w", "u"], "string[pyarrow]"),
        KEEP,
        lambda x: as_bytes(x.fillna("")),
    ),
    "str, a gap is dropped": (
        ["u", None, "w", "u"],
        DROP,
        lambda x: as_bytes(x.dropna()),
    ),
    "str of numbers": (["3", "-1", "2", "5"], I64, cast("int64")),
    "str of floats": (["3.5", "-1", "nan", "1e3"], F32 | KEEP, cast("float32")),
    "str of words": (["u", "v", "w", "u"], I64, CODES),
    "str as bool": (["u", "v", "w", "u"], {"dtypes": {"x": bool}}, "dtype of numbers"),
    "category": (pd.Categorical(["u", "v", "v", "u"], ["z", "v", "u"]), {}, as_bytes),
    "category of ints": (pd.Categorical([7, 5, 7, 5], [9, 7, 5]), {}, cast("int64")),
    "category of ints as float": (pd.Categorical([7, 5, 7, 5]), F32, cast("float32")),
    "category of digits": (pd.Categorical(["7", "5"] * 2), I64, cast("int64")),
    "category of words": (pd.Categorical(["u", "v"] * 2), I64, CODES),
    "category, a gap is kept": (
        pd.Categorical(["u", None, "v", "u"]),
        KEEP,
        lambda x: as_bytes(x.astype("object").fillna("")),
    ),
    "category, a gap is dropped": (
        pd.Categorical(["u", None, "v", "u"]),
        DROP,
        lambda x: as_bytes(x.dropna()),
    ),
    "datetime": (TIMES, {}, UNIT),
    "datetime as int64": (TIMES, I64, cast("int64")),
    "datetime[ns] as int64": (TIMES.as_unit("ns"), I64, cast("int64")),
    "datetime of a zone as int64": (
        TIMES.tz_localize("Europe/Vienna"),
        I64,
        cast("int64"),
    ),
    "datetime as float32": (TIMES, F32, "not in range.*a dtype other than float32"),
    "datetime as float64": (
        TIMES,
        {"dtypes": {"x": np.float64}},
        lambda x: x.astype("int64").astype("float64"),
    ),
    "NaT": (GAPPED_TIMES, I64, NAN),
    "NaT is dropped": (
        GAPPED_TIMES,
        I64 | DROP,
        lambda x: x.dropna().astype("int64"),
    ),
    "date": ([DAY] * 4, {}, UNIT),
    "date as float32": (
        [DAY] * 4,
        F32,
        lambda x: x.map(lambda day: (day - dt.date(1970, 1, 1)).days),
    ),
    "timedelta": (pd.to_timedelta([1, 2, 3, 4], "s"), {}, r"np\.int64\}` for whole"),
    "timedelta as int64": (pd.to_timedelta([1, 2, 3, 4], "s"), I64, cast("int64")),
    "time": ([dt.time(1, 2)] * 4, {}, r"`dtypes=\{\"x\": np\.int64\}`"),
    "decimal": ([decimal.Decimal("1.5")] * 4, {}, r"`dtypes=\{\"x\": np\.float64\}`"),
    "decimal as float32": ([decimal.Decimal("1.5")] * 4, F32, cast("float32")),
    "decimal as int64": ([decimal.Decimal("1.5")] * 4, I64, "data loss.*other than"),
    "None": ([None] * 4, {}, r"every cell.*np\.float32\}` and `missing=\"keep\"`"),
    "None is NaN": ([None] * 4, F32 | KEEP, lambda x: x.astype("float32")),
    "list": (LISTS, {}, same),
    "list as int64": (
        LISTS,
        I64,
        lambda x: x.map(lambda cells: [int(c) for c in cells]),
    ),
    "list, a gap": ([[1.0], None, [], [2.0]], {}, NULLS + r"\."),
    "list, a gap inside": ([[1.0], [None, 2.0], [], [2.0]], {}, NAN),
    "list, a gap is dropped": (
        [[1.0], [None, 2.0], [], [2.0]],
        DROP,
        lambda x: x[x.map(lambda cells: None not in cells)],
    ),
    "list of lists": ([[[1], []]] * 4, {}, "lists of them.*found `.*list<.*list<"),
    "arrays of two dimensions": ([np.ones((2, 2))] * 4, {}, "values of one type"),
    "struct": ([{"a": 1}] * 4, {}, "found `struct<"),
    "period": (pd.period_range("2020", periods=4, freq="D"), {}, "found `extension<"),
    "interval": (pd.interval_range(0, 4), {}, "found `extension<"),
    "sparse": (pd.arrays.SparseArray([0, 1, 0, 1]), {}, "values of one type"),
    "complex": ([1j] * 4, {}, "arrow has types for"),
    "int and str": ([1, "a", 2, 3], {}, "values of one type"),
}
"""Columns of values, options, and what pandas makes of them or what an error says."""


def routes(frame: pd.DataFrame, folder: pathlib.Path) -> Iterator[Any]:
    """Yield functions that make data of a table by each of its readers."""
    yield lambda **options: ClientData.from_table(frame, **options)
    columns: Any = {name: frame[name] for name in frame}
    yield lambda **options: ClientData.from_table(columns, **options)
    try:
        table = pa.Table.from_pandas(frame)
    except (pa.ArrowException, TypeError):
        return
    pq.write_table(table, folder / "t.parquet", row_group_size=3)
    yield lambda **options: ClientData.from_table(table, **options)
    for copy_bytes in (0, 2**20):
        path = folder / "t.parquet"
        yield functools.partial(ClientData.from_parquet, path, copy_bytes=copy_bytes)


def read(data: ClientData) -> dict[Any, list[Any]]:
    return {
        member.id: [np.asarray(row[0]).tolist() for row in member.read()]
        for member in data
    }


def check(
    frame: pd.DataFrame, folder: pathlib.Path, expected: Any, **options: Any
) -> None:
    """Compare what all readers give with rows by client, or with a message."""
    for build in routes(frame, folder):
        if isinstance(expected, str):
            with pytest.raises(errors.UserError, match=f"(?s){expected}"):
                read(build(client="who", x="x", **options))
            continue
        found = read(build(client="who", x="x", **options))
        assert list(found) == sorted(expected)
        for client, rows in expected.items():
            np.testing.assert_equal(found[client], rows)


@pytest.mark.parametrize("kind", CLIENTS)
def test_clients_are_the_groups_of_pandas(tmp_path: pathlib.Path, kind: str) -> None:
    column, message = CLIENTS[kind]
    frame = pd.DataFrame({"who": column, "x": X})
    groups = {} if message else frame.groupby("who", observed=True)["x"]

    expected = message or {client: rows.tolist() for client, rows in groups}

    check(frame, tmp_path, expected)
    check_owners(pd.Series(column, index=[7, 0, 3, 1]), kind)
    if kind != "list":
        check_ids(pd.Series(column))


def check_owners(owners: Any, kind: str) -> None:
    """Compare parts by owner with the groups of pandas, whatever the index is."""
    if owners.isna().any() or kind in ("int and str", "list"):
        with pytest.raises(errors.ConfigError, match="of one type as `owners`"):
            partition.natural(owners)
        return
    groups = owners.reset_index(drop=True).groupby(owners.to_numpy(), observed=True)
    expected = [rows.index.tolist() for _, rows in groups]
    found = partition.natural(owners).values()
    assert [rows.tolist() for rows in found] == expected


def check_ids(column: Any) -> None:
    """Compare ids that a function loads by with those that pandas has once each."""
    if column.isna().any():
        with pytest.raises(errors.ConfigError, match="such as by `dropna`"):
            ClientData.from_function(column.unique(), list, np.float32)
        return
    data = ClientData.from_function(column.unique(), list, np.float32)
    assert list(data.ids) == list(column.drop_duplicates())


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_those_of_pandas(tmp_path: pathlib.Path, kind: str) -> None:
    column, options, oracle = VALUES[kind]
    frame = pd.DataFrame({"who": WHO, "x": column})

    expected: Any = oracle
    if not isinstance(oracle, str):
        values = oracle(frame["x"])
        expected = {
            client: [np.nan if cell is pd.NA else cell for cell in rows]
            for client, rows in values.groupby(frame["who"])
        }

    check(frame, tmp_path, expected, **options)


def test_folders_without_a_client_are_no_client(tmp_path: pathlib.Path) -> None:
    for name in ("a", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"who={name}").mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / f"who={name}/rows.parquet")

    with pytest.raises(errors.ValueMismatchError, match="1 null from row 0 on"):
        ClientData.from_parquet(tmp_path, client="who", x="x")


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.large_string(), pa.utf8(), pa.binary_view()]
)
def test_text_of_arrow_is_text(kind: Any) -> None:
    words = pa.array(WHO, kind)

    data = ClientData.from_table({"who": words, "x": words}, client="who", x="x")

    assert list(read(data).values()) == [[b"a", b"a"], [b"b", b"b"]]


def test_a_dictionary_may_have_a_null() -> None:
    words = pa.array(["a", None, "b"])
    who = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), words)
    table = pa.table({"who": who, "x": [1, 2, 3], "word": who})

    with pytest.raises(errors.ValueMismatchError, match="1 null from row 1 on"):
        ClientData.from_table(table, client="who", x="x")
    kept = ClientData.from_table(table, client="x", x="word", missing="keep")
    assert read(kept) == {1: [b"a"], 2: [b""], 3: [b"a"]}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (["a", "n"], r"pass `dtypes=\{'n': 'float32'\}`, or name"),
        (["f", "f", "a"], r"pass `dtypes=\{'f': 'float32'\}`, or name"),
        (["f", "n"], r"pass `dtypes=\{'f': 'float32', 'n': 'float32'\}`, or name"),
        (["n", "u"], r"pass `dtypes=\{'u': 'int64'\}`, or name"),
        (["a", "who"], r"`who` str\[\].*`\{'who': 'who', \.\.\.\}`.*StringLookup"),
    ],
)
def test_columns_that_do_not_stack_say_what_to_type(x: Any, message: str) -> None:
    table: dict[str, Any] = {"who": WHO, "a": X, "n": [1, 2, 3, 4], "f": np.ones(4)}
    table["u"] = np.ones(4, np.uint8)

    with pytest.raises(errors.ValueMismatchError, match=message):
        ClientData.from_table(table, client="who", x=x)


@pytest.mark.parametrize("given", [{"x": "number"}, {"x": None}, np.float32, ["x"]])
def test_dtypes_that_are_none_are_named(given: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"`?np\.float32`?"):
        ClientData.from_table({"who": WHO, "x": X}, client="who", x="x", dtypes=given)


def test_columns_of_a_frame_go_by_the_text_of_their_names() -> None:
    frame = pd.DataFrame([["a", 1], ["b", 2]])

    assert read(ClientData.from_table(frame, client="0", x="1")) == {"a": [1], "b": [2]}


def test_labels_of_a_frame_go_by_place_and_not_by_index() -> None:
    labels = np.arange(12) // 3
    column = pd.Series(labels, index=np.random.default_rng(0).permutation(12))
    makers: list[Any] = [
        lambda given: partition.shards(given, 3, 2),
        lambda given: partition.dirichlet(given, 3, 5.0),
        lambda given: partition.split_by_label(given, 3, 1.0),
    ]

    for make in makers:
        np.testing.assert_equal(make(column), make(labels))
        with pytest.raises(errors.ConfigError, match="of one type as `labels`"):
            make(np.where(labels == 1, np.nan, labels))


def test_client_without_a_whole_row_is_none_as_in_pandas() -> None:
    frame = pd.DataFrame({"who": list("aab"), "x": [1.0, 2.0, np.nan]})

    data = ClientData.from_table(frame, client="who", x="x", missing="drop")

    assert list(data.ids) == [who for who, _ in frame.dropna().groupby("who")]


@pytest.mark.parametrize("columns", [("who", "bin"), ("bin", "x")], ids=["x", "client"])
def test_intervals_of_cut_are_told_in_words(columns: tuple[str, str]) -> None:
    frame = pd.DataFrame({"who": list("aab"), "x": [1.0, 2.0, 3.0]})
    frame["bin"] = pd.cut(frame.x, 2)
    client, x = columns

    with pytest.raises(errors.ConfigError, match=r"labels=\[...\]"):
        ClientData.from_table(frame, client=client, x=x)
