"""The tree of errors that ray_fed raises.

    RayFedError
    ├── UserError                        fix the call
    │   ├── ConfigError                  (ValueError)  a wrong setting or argument
    │   ├── ValueMismatchError           (TypeError)   a value of another type
    │   ├── UnsupportedError             (ValueError)  something that is not supported
    │   ├── KindMismatchError            (TypeError, ValueError) both classes above
    │   ├── MissingIntrinsicError        (NotImplementedError) no such intrinsic
    │   ├── CardinalityError             (ValueError)  the wrong number of clients
    │   ├── MissingFileError             (FileNotFoundError) a data file is missing
    │   ├── ContextStateError            (RuntimeError) init, shutdown out of order
    │   ├── ComputationError             (RuntimeError) the user's computation raised
    │   │   └── WorkerMemoryError        memory was full: retried on Ray
    │   ├── SavedStateError              (ValueError)  a file of saved state is damaged
    │   │   ├── StateFormatError         or was written by another version of ray_fed
    │   │   └── StorageError             (OSError)     it cannot be read or written
    │   ├── CallbackError                (RuntimeError) a callback of a run raised
    │   ├── UpToMergeTypeError           (TypeError)   \
    │   ├── MergeTypeNotAssignableError  (TypeError)    } MergeableCompForm refuses
    │   └── AfterMergeStructureError     (ValueError)  /
    ├── CompileError                     (ValueError)  no mergeable form exists
    └── ClusterError                     (RuntimeError)
        ├── ResourceError                asked for more than there is
        ├── DeadlineError                (TimeoutError) something took too long
        └── RetryBudgetError             retried often enough; has the last failure

The base LocatedError of ComputationError, DeadlineError and RetryBudgetError says where
in a round they happened.

Messages have one form: "Expected X, found Y", then what to do. Every error can be
pickled, because most of them come from another machine.
"""

import copy
import dataclasses
import difflib
import itertools
import reprlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Self

from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.tracebacks as tracebacks

MAX_SHOWN = 200
"""Largest number of characters of a value in an error message."""

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel = 4
_SHORTENED.maxlist = _SHORTENED.maxtuple = _SHORTENED.maxdict = 20
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = MAX_SHOWN


def describe(value: object) -> str:
    """Return a short text of a value for a message, however large or deep it is."""
    try:
        text = _SHORTENED.repr(value)
    except Exception as error:  # noqa: BLE001 (ints of 5,000 digits, any class at all)
        text = f"<no text of it: {type(error).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    """Return a text for a message, cut if it is long."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


_MAX_COMPARED = 10_000


def suggest(name: object, known: Iterable[object]) -> str:
    """Return a sentence that suggests the known name nearest to `name`, or "".

    A known name of another type, such as 7 for "7", is shown as Python writes it. For a
    whole number that resembles no known name, the nearest whole number is suggested.
    """
    given, text = [*itertools.islice(known, _MAX_COMPARED)], str(name)
    by_text = {str(each): each for each in given}
    near = difflib.get_close_matches(text, by_text, 1) or [
        each
        for each in by_text
        if len(each) > 1 and (text.startswith(each) or each.startswith(text))
    ]
    if not text or not (near or given):
        return ""
    if not near:
        wholes = [each for each in given if isinstance(each, int)]
        if not isinstance(name, int) or not wholes:
            return ""
        near = [str(min(wholes, key=lambda each: abs(each - name)))]
    nearest = by_text[near[0]]
    are_text = isinstance(name, str) and isinstance(nearest, str)
    return f" Did you mean `{nearest if are_text else describe(nearest)}`?"


class RayFedError(Exception):
    """Base of all errors of ray_fed."""

    # With this constructor, an error keeps its class when autograph adds the user's
    # line.
    __init__ = Exception.__init__


class UserError(RayFedError):
    """An error that the caller fixes by changing the call."""


class ConfigError(UserError, ValueError):
    """A setting is unknown, of the wrong kind, or out of range."""


class ValueMismatchError(UserError, TypeError):
    """A value does not match the federated type declared for it.

    Attributes:
        location: Which client has the value, or None if it is not known.
    """

    location: "Location | None" = None


class UnsupportedError(UserError, ValueError):
    """A kind of value, device or file that is not supported, or a missing package."""


class KindMismatchError(ValueMismatchError, UnsupportedError):
    """A value whose kind does not fit its type.

    It is a TypeError and a ValueError, because the documented classes differ.
    """


class MissingIntrinsicError(UserError, NotImplementedError):
    """An executor does not implement this intrinsic."""


class CardinalityError(UserError, ValueError):
    """The computation cannot run with this number of clients."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that a computation or an argument names is missing where it is read."""


class ContextStateError(UserError, RuntimeError):
    """A context was used after it was closed, or installed twice."""


@dataclasses.dataclass(frozen=True)
class Location:
    """Where in a round something happened. Fields are None if they do not apply.

    Attributes:
        round_index: Number of earlier calls of the context.
        subround_index: Position of the subround in its round.
        client_index: Position of the client in the round's cohort.
        node: Address of the machine.
        attempt: Number of the attempt at the subround, 1 for the first.
    """

    round_index: int | None = None
    subround_index: int | None = None
    client_index: int | None = None
    node: str | None = None
    attempt: int | None = None

    @override
    def __str__(self) -> str:
        fields = {
            "call": self.round_index,
            "subround": self.subround_index,
            "client at position": self.client_index,
            "node": self.node,
            "attempt": self.attempt,
        }
        return ", ".join(f"{k} {v}" for k, v in fields.items() if v is not None)


class LocatedError(RayFedError):
    """An error that knows where in a round it happened.

    Its texts can be encoded, and are cut after `error_texts.MAX_CHARACTERS`. A note
    names the line of the user's code, if the traceback has one.

    Attributes:
        message: The message without the location.
        location: The location, as far as it is known.
        cause_text: The traceback on the machine where it happened, or "" if it was
            lost.
    """

    def __init__(
        self, message: str, location: Location | None = None, cause_text: str = ""
    ) -> None:
        self.message = error_texts.bound(message)
        super().__init__(self.message)
        self.location = location or Location()
        self.cause_text = error_texts.bound(cause_text)
        place = tracebacks.find_place(cause_text)
        if place:
            self.add_note(place)

    @override
    def __str__(self) -> str:
        where = str(self.location)
        return f"{self.message} [{where}]" if where else self.message

    def located(self, **fields: Any) -> Self:
        """Return a copy of the error with fields of its location set."""
        found = copy.copy(self)
        found.location = dataclasses.replace(self.location, **fields)
        return found


def sendable(error: RayFedError) -> RayFedError:
    """Change an error so that its texts, and its cause, can be encoded.

    Ray loses a worker whose error has a text that cannot be encoded, even in a cause.
    """
    error.args = tuple(
        error_texts.bound(arg) if isinstance(arg, str) else arg for arg in error.args
    )
    if error.__cause__ is not None:
        text = error_texts.traceback_of(error.__cause__)
        error.__cause__ = tracebacks.WorkerTraceback(text)
    error.__suppress_context__ = True
    return error


class ComputationError(LocatedError, UserError, RuntimeError):
    """The user's computation raised. It is never retried.

    Attributes:
        failures: Errors, as text, of all failed clients that ran together, by index in
            the cohort. Empty if `Config.max_dropped_clients` is 0.
    """

    failures: Mapping[int, str] = types.MappingProxyType({})

    def naming(self, failures: Mapping[int, str]) -> Self:
        """Return a copy of the error with `failures`."""
        found = copy.copy(self)
        found.failures = dict(failures)
        return found


class WorkerMemoryError(ComputationError):
    """Memory was full while a computation ran. Ray retries it a few times.

    Either a batch is too large for any worker, or other data fills the worker's memory.
    """


class SavedStateError(UserError, ValueError):
    """A file of saved program state is damaged, or of another format."""


class StateFormatError(SavedStateError):
    """Saved state has a format that this version of ray_fed does not know.

    The version that wrote it can read it.
    """


class StorageError(SavedStateError, OSError):
    """A place for saved state is missing, full, or not allowed."""


class CallbackError(UserError, RuntimeError):
    """A callback of a run raised. The run was saved before it ended."""


class UpToMergeTypeError(UserError, TypeError):
    """`up_to_merge` of a MergeableCompForm does not return a server-placed value."""


class MergeTypeNotAssignableError(UserError, TypeError):
    """`merge` of a MergeableCompForm does not fit the result of `up_to_merge`."""


class AfterMergeStructureError(UserError, ValueError):
    """`after_merge` of a MergeableCompForm does not accept its arguments."""


class CompileError(RayFedError, ValueError):
    """A computation has no mergeable form, or cannot be serialized."""


class ClusterError(RayFedError, RuntimeError):
    """The cluster failed, or cannot run a call that may be correct."""


class ResourceError(ClusterError):
    """A call needs more resources than the cluster has, now or ever."""


class DeadlineError(LocatedError, ClusterError, TimeoutError):
    """Work or a transfer of values took longer than `Config` allows."""


class RetryBudgetError(LocatedError, ClusterError):
    """A subround failed more often than `Config.retry` allows.

    Attributes:
        failure_class: "crash", "preemption", "memory" or "fatal".
        location: Where the last failure happened.
        cause_text: The text of the last failure on its worker.
    """

    def __init__(
        self,
        message: str,
        failure_class: str = "crash",
        location: Location | None = None,
        cause_text: str = "",
    ) -> None:
        super().__init__(message, location, cause_text)
        self.failure_class = failure_class
