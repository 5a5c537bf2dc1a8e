"""Every error that ray_fed raises on purpose, as one tree.

    RayFedError
    ├── UserError                        fix the call
    │   ├── ConfigError                  (ValueError)  a setting that cannot be
    │   ├── ValueMismatchError           (TypeError)   a value that is not of its type
    │   ├── UnsupportedError             (ValueError)  a kind that an executor lacks
    │   ├── KindMismatchError            both of the two before: a kind and a type
    │   ├── MissingIntrinsicError        (NotImplementedError) an intrinsic it lacks
    │   ├── CardinalityError             (ValueError)  the wrong number of clients
    │   ├── MissingFileError             (FileNotFoundError) a data file that is named
    │   ├── ContextStateError            (RuntimeError) init, shutdown out of order
    │   ├── ComputationError             (RuntimeError) the user's computation raised
    │   │   └── WorkerMemoryError        and found no memory: retried on Ray
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
        ├── WorkerLost                   retried, never seen by a caller
        └── RetryBudgetError             retried often enough; has the last failure

Those of a round have the base LocatedError and say where in it they happened:
ComputationError, DeadlineError, RetryBudgetError.

Messages follow one form: "Expected X, found Y", then what to do. Every error
survives pickling, because most of them are born on another machine.
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
"""Characters of a value that an error message shows."""

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel = 4
_SHORTENED.maxlist = _SHORTENED.maxtuple = _SHORTENED.maxdict = 20
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = MAX_SHOWN


def describe(value: object) -> str:
    """Return a value as a message shows it: short, however large or deep it is."""
    try:
        text = _SHORTENED.repr(value)
    except Exception as error:  # noqa: BLE001 (ints of 5,000 digits, any class at all)
        text = f"<no text of it: {type(error).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    """Return a text as a message shows it, cut when long."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


_MAX_COMPARED = 10_000


def suggest(name: object, known: Iterable[object]) -> str:
    """Return a sentence on the known name that is nearest to one; "" if none is."""
    text, texts = str(name), list(map(str, itertools.islice(known, _MAX_COMPARED)))
    near = difflib.get_close_matches(text, texts, 1) or [
        each
        for each in texts
        if len(each) > 1 and (text.startswith(each) or each.startswith(text))
    ]
    return f" Did you mean `{near[0]}`?" if text and near else ""


class RayFedError(Exception):
    """Base of all errors of ray_fed."""

    # Only such errors keep their class when autograph adds the line of the user's code.
    __init__ = Exception.__init__


class UserError(RayFedError):
    """An error that the caller mends by changing the call."""


class ConfigError(UserError, ValueError):
    """A setting is unknown, of the wrong kind, or out of range."""


class ValueMismatchError(UserError, TypeError):
    """A value does not match the federated type declared for it.

    Attributes:
        location: of a value that a client has; None: not known.
    """

    location: "Location | None" = None


class UnsupportedError(UserError, ValueError):
    """An executor does not understand this kind of value, or has no such device."""


class KindMismatchError(ValueMismatchError, UnsupportedError):
    """A value is of a kind that does not go with its type.

    It is a TypeError and a ValueError, because the documented classes differ.
    """


class MissingIntrinsicError(UserError, NotImplementedError):
    """An executor does not implement this intrinsic."""


class CardinalityError(UserError, ValueError):
    """The number of clients is not one that the computation can run with."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that a computation or an argument names is not where it is read."""


class ContextStateError(UserError, RuntimeError):
    """A context was used after it was closed, or installed twice."""


@dataclasses.dataclass(frozen=True)
class Location:
    """Where in a round something happened; None where it does not apply.

    Attributes:
        round_index: calls of this context before this one.
        subround_index: position of the subround in its round.
        client_index: position of the client in the round's cohort.
        node: the address of the machine.
        attempt: 1 for the first try of a subround.
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

    Its texts can be encoded, and are cut beyond `error_texts.MAX_CHARACTERS`. A note
    names the line of the user's code, where the traceback has one.

    Attributes:
        message: without the location.
        location: as much of it as is known.
        cause_text: the traceback on the machine where it happened; empty where nothing
            was left to tell it.
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
        """Return the same error with more of its location known."""
        found = copy.copy(self)
        found.location = dataclasses.replace(self.location, **fields)
        return found


def sendable(error: RayFedError) -> RayFedError:
    """Return an error, changed to be encoded: its messages, and the text of its cause.

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
    """A computation of the user's raised while it ran; it is never retried.

    Attributes:
        failures: what each client of a leaf raised, by index in the cohort, where
            clients that fail may be dropped; else empty.
    """

    failures: Mapping[int, str] = types.MappingProxyType({})

    def naming(self, failures: Mapping[int, str]) -> Self:
        """Return the same error with all clients that failed with its own."""
        found = copy.copy(self)
        found.failures = dict(failures)
        return found


class WorkerMemoryError(ComputationError):
    """Work of a computation found no memory; on Ray it is tried again, within limits.

    A batch that is larger than what fits raises it wherever it runs; so does a worker
    whose memory is full of something else.
    """


class SavedStateError(UserError, ValueError):
    """A file of saved program state is damaged, or of another format."""


class StateFormatError(SavedStateError):
    """Saved state is of a format that this version of ray_fed does not know.

    It is no damage: the version that wrote it reads it.
    """


class StorageError(SavedStateError, OSError):
    """A place for saved state is not there, is full, or may not be used."""


class CallbackError(UserError, RuntimeError):
    """A callback of a run raised; the run was saved before it ended."""


class UpToMergeTypeError(UserError, TypeError):
    """`up_to_merge` of a MergeableCompForm does not return a server-placed value."""


class MergeTypeNotAssignableError(UserError, TypeError):
    """`merge` of a MergeableCompForm does not fit the result of `up_to_merge`."""


class AfterMergeStructureError(UserError, ValueError):
    """`after_merge` of a MergeableCompForm does not take what it is given."""


class CompileError(RayFedError, ValueError):
    """A computation has no mergeable form, or cannot be serialised."""


class ClusterError(RayFedError, RuntimeError):
    """The cluster could not do what was asked of it."""


class ResourceError(ClusterError):
    """More was asked for than the cluster has, now or ever."""


class DeadlineError(LocatedError, ClusterError, TimeoutError):
    """Something did not happen within its configured time."""


class WorkerLost(ClusterError):  # noqa: N818 (named for what happened, not to catch)
    """A worker died under a subround; Ray runs the subround again."""


class RetryBudgetError(LocatedError, ClusterError):
    """A subround failed more often than its class of failure may.

    Attributes:
        failure_class: "crash", "preemption", "memory" or "fatal".
        location: where the last failure was.
        cause_text: what the last failure was, as its worker told it.
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
