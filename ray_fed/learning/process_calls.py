"""How a run calls its process, and how it does so in any context."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import federated_language as fl
from typing_extensions import override

from ray_fed.learning.interrupts import Interrupts
from ray_fed.learning.processes import LearningProcess
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import RoundReport

flf = fl.framework


@dataclasses.dataclass(frozen=True)
class GoingRound:
    """A round that was called.

    Attributes:
        round_index: rounds of the run before it.
        state: after it, to be given to the next call; read by `ProcessCalls.read`.
        metrics: of the clients' training, plain, once they are there.
        kept: what its clients keep for later rounds, likewise; None where they keep
            nothing.
        take_report: returns its report, once; None where there is none.
        started_at: when it was called, in seconds since 1970.
    """

    round_index: int
    state: Any
    metrics: concurrent.futures.Future[Any]
    kept: concurrent.futures.Future[Any] | None
    take_report: Callable[[], RoundReport | None]
    started_at: float


class ProcessCalls(Protocol):
    """Calls the two computations of a process, and what `evaluate` calls."""

    def initialize(self) -> Any:
        """Return the initial state; call it first."""
        ...

    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        """Call a round.

        Args:
            state: before it.
            clients: what `next` takes of clients: their data; before these what they
                kept, where they keep something.
            round_index: rounds of the run before it.

        Raises:
            StopNow: the run is to end, and the call did not.
        """
        ...

    def read(self, state: Any) -> Any:
        """Return a state in this process, as plain values."""
        ...

    async def fetch(self, state: Any) -> Any:
        """Return what `read` does, on the I/O thread."""
        ...

    @property
    def bytes_read(self) -> int:
        """How many bytes of states came into this process so far."""
        ...

    def evaluating(self, round_index: int) -> None:
        """Prepare this thread for calls that evaluate the state of a round."""
        ...

    def close(self, num_rounds: int) -> None:
        """End calls that run; the context counts as many calls as rounds now."""
        ...

    @property
    def first_number(self) -> int:
        """The number of the call of round 0."""
        ...

    def resume(self, first_number: int) -> None:
        """Number rounds as the run did that is resumed."""
        ...

    def subscribe(self, sink: EventSink) -> None:
        """Send events of calls to a sink until `close`."""
        ...


def _done(value: Any) -> concurrent.futures.Future[Any]:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_result(value)
    return done


class DirectCalls(ProcessCalls):
    """Calls that return when they are done, with plain values.

    Args:
        process: to call.
        context: the default one, which threads of the run are to have too.
        interrupts: end a call.
    """

    def __init__(
        self, process: LearningProcess, context: Any, interrupts: Interrupts
    ) -> None:
        self._process = process
        self._context = context
        self._interrupts = interrupts

    @property
    @override
    def first_number(self) -> int:
        return 0

    @override
    def resume(self, first_number: int) -> None:
        """Do nothing: calls have no numbers."""

    @override
    def subscribe(self, sink: EventSink) -> None:
        """Do nothing: there are no events."""

    @override
    def initialize(self) -> Any:
        return self._process.initialize()

    @override
    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        started_at = time.time()
        with self._interrupts.breaking():
            new_state, *kept, metrics = self.call(round_index, (state, *clients))
        return GoingRound(
            round_index,
            new_state,
            _done(metrics),
            _done(kept[0]) if kept else None,
            lambda: None,
            started_at,
        )

    @override
    def read(self, state: Any) -> Any:
        return state

    @override
    async def fetch(self, state: Any) -> Any:
        return state

    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        """Return what the process returns of a round."""
        del round_index
        return self._process.next(*arguments)

    @property
    @override
    def bytes_read(self) -> int:
        return 0

    @override
    def evaluating(self, round_index: int) -> None:
        flf.set_default_context(self._context)

    @override
    def close(self, num_rounds: int) -> None:
        """Do nothing: no call runs."""
