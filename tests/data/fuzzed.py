"""Tables drawn by a seed: good ones, and ones with a fault that an error is to name."""

# pyright: reportUnknownLambdaType=false

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

_KINDS: dict[str, Callable[[np.random.Generator, NDArray[np.int64]], Any]] = {
    "f32": lambda rng, n: pa.array(rng.normal(size=len(n)).astype(np.float32)),
    "f64": lambda rng, n: pa.array(rng.normal(size=len(n))),
    "i8": lambda _, n: pa.array(n.astype(np.int8)),
    "i64": lambda _, n: pa.array(n),
    "u16": lambda _, n: pa.array(n.astype(np.uint16)),
    "bool": lambda _, n: pa.array(n > 50),
    "text": lambda _, n: pa.array(["\u00e9" * (i % 4) for i in n.tolist()]),
    "bytes": lambda _, n: pa.array([b"\x00\xff" * (i % 3) for i in n.tolist()]),
    "pair": lambda _, n: pa.FixedSizeListArray.from_arrays(
        pa.array(np.repeat(n, 2).astype(np.float32)), 2
    ),
    "ragged": lambda _, n: pa.array(
        [list(range(i % 4)) for i in n.tolist()], pa.list_(pa.int32())
    ),
}
"""Kinds of columns: from numbers below 100, one a row, to an array of arrow."""

_REFUSED: dict[str, Any] = {
    "time": pa.timestamp("s"),
    "decimal": pa.decimal128(5, 2),
    "struct": pa.struct([("a", pa.int32())]),
    "nested": pa.list_(pa.list_(pa.int8())),
    "nothing": pa.null(),
}
FAULTS = (
    "none", "none", "none", "no column", "no client", "null", "NaN", "type changes",
    "column is gone", "kind", "damage", "cut", "no rows", "client is float",
)  # fmt: skip
"""What is wrong with a table; "none" as often as to test the good ones, too."""


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """A table in files, and what is to become of it.

    Attributes:
        folder: of the files.
        rows: a table of arrow, all rows, without a fault, in the order of the files.
        fault: one of `FAULTS`.
        names: of which an error is to name one; empty where there is none.
        copy_bytes: see `ClientData.from_parquet`.
    """

    folder: pathlib.Path
    rows: Any
    fault: str
    names: tuple[str, ...]
    copy_bytes: int


def write(folder: pathlib.Path, seed: int) -> Fuzzed:
    """Write the table of a seed."""
    rng = np.random.default_rng(seed)
    fault = FAULTS[seed % len(FAULTS)]
    rows = _rows(rng, int(rng.integers(1, 40)))
    count = int(rng.integers(1, 4))
    bounds = np.sort(
        rng.integers(0, len(rows), count - 1)
    ).tolist()  # the last has rows
    bounds = [0, *bounds, len(rows)]
    parts = [rows.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    if len(parts) == 1 and fault in ("type changes", "column is gone"):
        fault = "none"
    spoil, names = _SPOILED.get(fault, (_keep, ()))
    parts = spoil(rng, parts)
    for index, part in enumerate(parts):
        path = folder / f"part{index}.parquet"
        pq.write_table(part, path, row_group_size=int(rng.integers(1, 20)))
        if fault in ("damage", "cut"):
            _damage(rng, path, is_cut=fault == "cut")
            names = (*names, path.name)
    copy_bytes = int(rng.choice([0, 2**30]))
    return Fuzzed(folder, rows, fault, names, copy_bytes)


def _rows(rng: np.random.Generator, count: int) -> Any:
    who = np.sort(rng.integers(0, 9, count))
    if rng.random() < 0.5:
        rng.shuffle(who)
    ids = pa.array(who) if rng.random() < 0.5 else pa.array([f"c{i}" for i in who])
    columns: dict[str, Any] = {"who": ids}
    for index in range(int(rng.integers(1, 5))):
        columns[f"x{index}"] = _column(rng, count)
    columns["y"] = pa.array(rng.normal(size=count))
    return pa.table(columns)


def _column(rng: np.random.Generator, count: int) -> Any:
    kind = str(rng.choice(list(_KINDS)))
    return _KINDS[kind](rng, rng.integers(0, 100, count))


_Parts: TypeAlias = list[Any]


def _replace(part: Any, name: str, column: Any) -> Any:
    return part.set_column(part.column_names.index(name), name, column)


def _keep(_: np.random.Generator, parts: _Parts) -> _Parts:
    return parts


def _with_cell(name: str, cell: Any) -> Callable[[np.random.Generator, _Parts], _Parts]:
    def spoil(rng: np.random.Generator, parts: _Parts) -> _Parts:
        column = parts[-1].column(name)
        cells = column.to_pylist()
        cells[int(rng.integers(len(cells)))] = cell
        return [*parts[:-1], _replace(parts[-1], name, pa.array(cells, column.type))]

    return spoil


def _change_type(_: np.random.Generator, parts: _Parts) -> _Parts:
    changed = parts[-1].column("y").cast(pa.float32())
    return [*parts[:-1], _replace(parts[-1], "y", changed)]


def _refuse_kind(rng: np.random.Generator, parts: _Parts) -> _Parts:
    kind = _REFUSED[str(rng.choice(list(_REFUSED)))]
    return [_replace(part, "x0", pa.nulls(len(part), kind)) for part in parts]


_SPOILED: dict[str, Any] = {
    "no column": (lambda _, parts: [p.drop_columns(["y"]) for p in parts], ("`y`",)),
    "no client": (_with_cell("who", None), ("`who`",)),
    "null": (_with_cell("y", None), ("`y`",)),
    "NaN": (_with_cell("y", np.nan), ("`y`",)),
    "type changes": (_change_type, ("`y`",)),
    "column is gone": (
        lambda _, parts: [*parts[:-1], parts[-1].drop_columns(["y"])],
        ("`y`",),
    ),
    "kind": (_refuse_kind, ("`x0`",)),
    "no rows": (lambda _, parts: [p.slice(0, 0) for p in parts], ("found none",)),
    "client is float": (
        lambda _, parts: [_replace(p, "who", pa.array([0.5] * len(p))) for p in parts],
        ("`who`",),
    ),
}
"""By fault what makes it, and what an error names."""


def _damage(rng: np.random.Generator, path: pathlib.Path, *, is_cut: bool) -> None:
    content = bytearray(path.read_bytes())
    if is_cut:
        del content[int(rng.integers(1, len(content))) :]
    else:
        for _ in range(4):
            content[rng.integers(len(content))] = rng.integers(256)
    path.write_bytes(content)
