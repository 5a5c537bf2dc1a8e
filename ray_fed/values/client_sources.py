"""Sources of clients' values: values in this process, or a function that reads them."""

import logging
import threading
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import federated_language as fl
import numpy as np
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits, stored
from ray_fed.values.client_references import ClientSource
from ray_fed.values.columnar_sequence import ColumnarSequence

_logger = logging.getLogger(__name__)


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
        self._checked: set[int] = set()

    @override
    def read(self, position: int) -> Plain:
        return self.held[position]

    @override
    def check_batches(self, position: int, client: Hashable) -> None:
        if position not in self._checked:
            _check_rows(self.held[position], client)
            self._checked.add(position)


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
        self._checks_batches = False

    @property
    @override
    def function(self) -> Callable[[Any], Any]:
        return self._load

    @override
    def check_batches(self, position: int, client: Hashable) -> None:
        del position, client
        self._checks_batches = True

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
            plain = plain_values.to_plain(value, self._type_spec, label)
        except errors.RayFedError:
            raise
        except BaseException as error:
            raise _failure(client, "reading its value", error) from error
        if self._checks_batches:
            _check_rows(plain, client)
        return plain


def _check_rows(value: Plain, client: Hashable) -> None:
    """Raise unless each element's tensors of unknown first size have one size.

    Warns of values that are not a number.
    """
    if not isinstance(value, ColumnarSequence):
        return
    floats = (column.rows for column in value.columns if column.rows.dtype.kind == "f")
    num_nan = sum(int(np.isnan(rows).sum()) for rows in floats)
    if num_nan:
        _logger.warning(
            "The client with the id %r has values that are not a number (NaN): %d."
            " Weights that are trained on them are NaN.",
            client,
            num_nan,
        )
    held = [column.splits for column in value.columns if column.splits is not None]
    if not held:
        return
    sizes = np.stack([np.diff(splits) for splits in held])
    differing = np.flatnonzero((sizes != sizes[:1]).any(axis=0))
    if len(differing):
        batch = int(differing[0])
        raise errors.ValueMismatchError(
            f"Expected one number of rows in the batch {batch} of the client with the"
            f" id {client!r}, found {sizes[:, batch].tolist()}, in the order of its"
            " type."
        )


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
        f" raised {error_texts.summarize(error)}",
        cause_text=error_texts.traceback_of(error),
    )
