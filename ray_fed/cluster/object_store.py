"""Values that many calls take: put into the object store once, passed by reference."""

from typing import Any, cast

import ray

import ray_fed.values as values

_INLINE_BYTES = 64 * 1024
"""Smaller values travel inside of a call: a trip to the object store costs more."""


def store(value: Any) -> Any:
    """Put a large plain value into the object store; pass a small one on.

    Clients become a run that is sliced without being read.
    """
    if values.count_bytes(value) < _INLINE_BYTES:
        return value
    reference = ray.put(value)
    if isinstance(value, list):
        return values.StoredClients(reference, 0, len(cast("list[Any]", value)))
    return values.Stored(reference)
