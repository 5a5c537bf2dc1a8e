"""Contexts on a session that outlives them, for tests that hold its pool."""

import ray_fed
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import Backend, ExecutionContext


def context_over(session: Session, config: ray_fed.Config) -> ExecutionContext:
    """Return a context on the workers of a session, which stays open after it."""
    backend = Backend(
        session.runners(),
        session.count_workers,
        lambda: None,
        session.store,
        session.fetch,
        session.await_change,
        session.check,
        spreads_subrounds=True,
        place=session.place,
    )
    return ExecutionContext(config, backend)
