"""What a client has: the same number of rows in inputs and labels of a batch.

Lists, and values of `ClientData` that are at hand, are looked at here; what a function
loads is when a worker reads it. Files are not looked at.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

import ray_fed.errors as errors
from ray_fed.program import ClientReference

_logger = logging.getLogger("ray_fed.learning.run_loop")


def check_batches(clients: Mapping[int, Any]) -> None:
    """Raise unless inputs and labels of each batch have one number of rows.

    Logs a warning of labels that are not a number.

    Args:
        clients: what each has, by index: lists and references are looked at.

    Raises:
        ValueMismatchError: a batch has several; client and batch are named.
    """
    for client, batches in clients.items():
        if isinstance(batches, ClientReference):
            batches.check_batches()
        if not isinstance(batches, list):
            continue
        for number, batch in enumerate(cast("list[Any]", batches)):
            counts = dict(_counts(batch, ""))
            if len(set(counts.values())) > 1:
                shown = ", ".join(f"`{n}` {count}" for n, count in counts.items())
                raise errors.ValueMismatchError(
                    f"Expected one number of rows in the batch {number} of the client"
                    f" `data[{client}]`, found {shown}."
                )
            if _has_nan(batch):
                _logger.warning(
                    "The batch %d of the client `data[%d]` has labels that are not a"
                    " number (NaN): weights that are trained on them are NaN.",
                    number,
                    client,
                )


def count_rows(batches: Any) -> Any:
    """Return what a client has, by sizes: nothing is read for it.

    Args:
        batches: of a client.

    Returns:
        Of a list, the number of rows of each batch, by its first array; None for one
        without. Of another sequence, its length; None where it has none.
    """
    if not isinstance(batches, list):
        return len(batches) if hasattr(batches, "__len__") else None
    counts = (_counts(batch, "") for batch in cast("list[Any]", batches))
    return [found[0][1] if found else None for found in counts]


def _has_nan(batch: Any) -> bool:
    """Return whether labels, in arrays, are not a number."""
    labels = cast("Any", batch).get("y") if isinstance(batch, Mapping) else None
    if not isinstance(labels, np.ndarray) or labels.dtype.kind != "f":
        return False
    return bool(np.isnan(cast("Any", labels)).any())


def _counts(value: Any, name: str) -> Sequence[tuple[str, int]]:
    """Return how many rows each tensor of a batch has, by its name."""
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[str, Any]", value).items())
    elif isinstance(value, tuple) and not name:
        pairs = list(zip(("x", "y"), cast("tuple[Any, ...]", value), strict=False))
    else:
        shape = getattr(value, "shape", None)
        if shape is not None:
            return [(name, int(shape[0]))] if len(shape) else []
        return [(name, len(value))] if isinstance(value, list) else []
    return [
        found
        for key, inside in pairs
        for found in _counts(inside, f"{name}.{key}" if name else str(key))
    ]
