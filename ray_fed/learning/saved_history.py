"""A history as JSON and back, to the bit: metrics keep their dtypes and shapes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]  # numpy learns bfloat16
import numpy as np

from ray_fed.learning.history import RoundRecord


def to_json(records: Sequence[RoundRecord]) -> list[Any]:
    """Return records as what `json` writes.

    Args:
        records: with metrics as `read_metrics` returns them.
    """
    return [
        {
            field.name: _encode(getattr(record, field.name))
            for field in dataclasses.fields(record)
        }
        for record in records
    ]


def from_json(content: Sequence[Any]) -> list[RoundRecord]:
    """Return the records that `to_json` described."""
    return [
        RoundRecord(**{name: _decode(value) for name, value in fields.items()})
        for fields in content
    ]


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(value)
    if isinstance(value, Mapping):
        return {"dict": [[name, _encode(member)] for name, member in value.items()]}
    kind = "list" if isinstance(value, list) else "tuple"
    return {kind: [_encode(member) for member in value]}


def _encode_array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "array": [_plain(item) for item in array.ravel().tolist()],
        "scalar": isinstance(value, np.generic),
    }


def _plain(item: Any) -> Any:
    return item if isinstance(item, bool | int | float) else float(item)


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    match value:
        case {"bytes": content}:
            found: Any = bytes.fromhex(content)
        case {"dict": pairs}:
            found = {name: _decode(member) for name, member in pairs}
        case {"list": members}:
            found = [_decode(member) for member in members]
        case {"tuple": members}:
            found = tuple(_decode(member) for member in members)
        case _:
            array = np.array(value["array"], np.dtype(value["dtype"]))
            array = array.reshape(value["shape"])
            found = array[()] if value["scalar"] else array
    return found
