"""What a context runs on: a Ray session, or threads of this process."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import federated_language as fl

from ray_fed.contexts.first_calls import AwaitReady
from ray_fed.rounds.policy import RoundPolicy


@dataclasses.dataclass(frozen=True)
class Backend:
    """What runs the subrounds of a context.

    Attributes:
        runners: run subrounds; closed by `close`.
        num_workers: subrounds of a round where `Config.subrounds` leaves it open; a
            function is asked as each round begins.
        close: releases what the runners run on, and the runners.
        store: see `RoundPolicy`.
        fetch: reads what `store`, or a runner, left in a store; passes on the rest.
            None: nothing is left in one.
        await_ready: from a pair (num_ready, num_workers) to the next one, once that
            differs; from None to the present one. None: workers are threads, which are
            always ready.
    """

    runners: Sequence[fl.framework.AsyncContext]
    num_workers: int | Callable[[], Awaitable[int]]
    close: Callable[[], None]
    store: Callable[[Any], tuple[Any, int]] = RoundPolicy.store
    fetch: Callable[[Any], Awaitable[Any]] | None = None
    await_ready: AwaitReady | None = None
