"""Sources of what clients have: values at hand, or a function that reads them."""

import traceback
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plain as plain
import ray_fed.values as values
from ray_fed.client_runs import ClientSource
from ray_fed.values import Plain


class HeldSource(ClientSource):
    """Values at hand in this process.

    Args:
        held: plain, by position.
    """

    is_resident = True

    def __init__(self, held: Sequence[Plain]) -> None:
        self.token = uuid.uuid4().hex
        self.held = held
        self.num_bytes = values.count_bytes(list(held))

    @override
    def read(self, position: int) -> Plain:
        return self.held[position]


class FunctionSource(ClientSource):
    """What a function returns for a client, wherever the function is called.

    Args:
        load: returns what the client of an id has; the same each time.
        ids: by position.
        type_spec: of what it returns.
    """

    is_resident = False

    def __init__(
        self, load: Callable[[Any], Any], ids: Sequence[Hashable], type_spec: fl.Type
    ) -> None:
        self.token = uuid.uuid4().hex
        self._load = load
        self._ids = ids
        self._type_spec = type_spec

    @override
    def read(self, position: int) -> Plain:
        client = self._ids[position]
        try:
            value = self._load(client)
        except Exception as error:
            raise errors.ComputationError(
                f"Expected a value for client {client!r}, found that the function that"
                f" loads it raised {type(error).__name__}: {error}",
                cause_text=traceback.format_exc(),
            ) from error
        return plain.to_plain(value, self._type_spec, f"what client {client!r} has")
