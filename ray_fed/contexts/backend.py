"""The seam between a context and what runs its subrounds: Ray, or threads."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import federated_language as fl

from ray_fed.contexts.first_calls import AwaitReady
from ray_fed.language.structs import Plain
from ray_fed.observability import events
from ray_fed.rounds.client_cuts import RoundPolicy
from ray_fed.values.stored import ArgumentPart


@dataclasses.dataclass(frozen=True)
class Backend:
    """What runs the subrounds of a context.

    Attributes:
        runners: run subrounds; closed by `close`.
        num_workers: the number of workers, and of a round's subrounds where
            `Config.subrounds` has none; a function is called as each round begins.
        close: closes the runners, and what they run on.
        store: see `RoundPolicy`.
        fetch: reads a value that `store` or a runner put in a store; returns any other
            value as it is. None: values are never stored.
        await_ready: see `AwaitReady`; None: workers are threads, which are always
            ready.
        check: raises a ContextStateError once what the runners run on is gone.
        spreads_subrounds: whether a runner may use several workers for one subround.
        place: which Ray it is on, in a few words; empty: none.
        sinks: receive the events of all rounds.
    """

    runners: Sequence[fl.framework.AsyncContext]
    num_workers: int | Callable[[], Awaitable[int]]
    close: Callable[[], None]
    store: Callable[[ArgumentPart], tuple[ArgumentPart, int]] = RoundPolicy.store
    fetch: Callable[[ArgumentPart], Awaitable[Plain]] | None = None
    await_ready: AwaitReady | None = None
    check: Callable[[], None] = lambda: None
    spreads_subrounds: bool = False
    place: str = ""
    sinks: Sequence[events.EventSink] = ()
