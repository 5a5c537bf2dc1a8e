"""Contexts on a session that stays open, so that tests can use one pool."""

import ray_fed
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import Backend, ExecutionContext


def context_over(session: Session, config: ray_fed.Config) -> ExecutionContext:
    """Return a context on a session's workers. Its `close` leaves the session open."""
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
