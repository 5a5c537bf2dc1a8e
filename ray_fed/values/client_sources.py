"""Sources of clients' values: values in this process, or a function that reads them."""

import threading
import traceback
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language.structs import Plain
from ray_fed.values import plain_values, read_limits, stored
from ray_fed.values.client_references import ClientSource


class HeldSource(ClientSource):
    """Values in this process.

    Args:
        held: plain, by position.
    """

    is_resident = True

    def __init__(self, held: Sequence[Plain]) -> None:
        self.token = uuid.uuid4().hex
        self.held = held
        self.num_bytes = stored.count_bytes(list(held))

    @override
    def read(self, position: int) -> Plain:
        return self.held[position]


class FunctionSource(ClientSource):
    """Values that a function returns, one for each client, in any process.

    Args:
        load: returns the value of the client with an id; the same each time.
        ids: of the clients, by position.
        type_spec: of what `load` returns.
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
        read_limits.check()
        try:
            value = self._load(client)
        except BaseException as error:
            raise _failure(client, "the function that loads it", error) from error
        try:
            label = f"what the client with the id {client!r} has"
            return plain_values.to_plain(value, self._type_spec, label)
        except errors.RayFedError:
            raise
        except BaseException as error:
            raise _failure(client, "reading its value", error) from error


def _failure(
    client: object, raising: str, error: BaseException
) -> errors.ComputationError:
    """Return what a user's code raised as a failure of a client; `sys.exit`, too.

    Raises:
        KeyboardInterrupt: it is Ctrl-C, which Python raises on the main thread alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main:
        raise error
    return errors.ComputationError(
        f"Expected a value for the client with the id {client!r}, found that {raising}"
        f" raised {type(error).__name__}: {error}",
        cause_text="".join(traceback.format_exception(error)),
    )
