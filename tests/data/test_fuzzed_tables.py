"""Three hundred tables drawn by a seed: read as they are, or named in an error."""

import pathlib
from typing import Any

import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.program import ClientData
from tests.data import fuzzed

_SPAN = 30


def read(table: fuzzed.Fuzzed) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows of each client, as the files' own reader would give them."""
    inputs = [name for name in table.rows.column_names if name.startswith("x")]
    data = ClientData.from_parquet(
        table.folder,
        client="who",
        x={name: name for name in inputs},
        y="y",
        copy_bytes=table.copy_bytes,
    )
    found: dict[Any, list[dict[str, Any]]] = {}
    for member in data:
        rows = member.read()
        found[member.id] = [
            dict(zip([*inputs, "y"], map(as_python, tensors), strict=True))
            for tensors in rows
        ]
    return found


def try_to_read(table: fuzzed.Fuzzed) -> tuple[dict[Any, Any], str]:
    """Return the rows, or the message of a named error."""
    try:
        return read(table), ""
    except errors.UserError as error:
        return {}, str(error)


def as_python(tensor: Any) -> Any:
    if isinstance(tensor, bytes):
        return tensor
    return np.asarray(tensor).tolist()


def expected(table: fuzzed.Fuzzed) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in table.rows.to_pylist():
        values = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in row.items()
            if name != "who"
        }
        found.setdefault(row["who"], []).append(values)
    return dict(sorted(found.items()))


@pytest.mark.parametrize("first", range(0, 300, _SPAN))
def test_tables_are_read_or_named(tmp_path: pathlib.Path, first: int) -> None:
    for seed in range(first, first + _SPAN):
        folder = tmp_path / f"table{seed}"
        folder.mkdir()
        table = fuzzed.write(folder, seed)
        about = f"seed {seed}: {table.fault}"

        found, told = try_to_read(table)

        if told:
            assert any(name in told for name in table.names), (about, told)
        elif table.fault != "damage":  # a changed value may be one like any other
            assert not table.names, about
            assert found == expected(table), about
