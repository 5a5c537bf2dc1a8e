"""A history as JSON and back, to the bit: metrics keep their dtypes and shapes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]  # numpy learns bfloat16
import numpy as np

import ray_fed.errors as errors
from ray_fed.learning.history import RoundRecord


def to_json(records: Sequence[RoundRecord]) -> list[Any]:
    """Return records as what `json` writes.

    Raises:
        ValueMismatchError: a metric is neither a number, text, bytes, an array, nor a
            structure of these.
    """
    return [
        {
            field.name: _encode(getattr(record, field.name), field.name)
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


def _encode(value: Any, label: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(value, label)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        pairs = [[str(k), _encode(v, f"{label}.{k}")] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(member, label) for member in value]}
    raise errors.ValueMismatchError(
        "Expected numbers, text, bytes, arrays, or dicts, lists and tuples of these as"
        f" metrics of a run with a `storage_path`, found a `{type(value).__name__}` as"
        f" `{label}`: convert it in `evaluate`."
    )


def _encode_array(value: Any, label: str) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in "biufV" or array.dtype.names:
        return _encode(array.tolist(), label)
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
