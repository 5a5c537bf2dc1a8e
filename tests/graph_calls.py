"""Tells of the graphs that TensorFlow runs: by an `EagerTFExecutor`, or outside of one.

Also of each fold that a `FederatingExecutor` drives. It is told in lines of a file, so
that a test reads what other processes did.
"""

import contextvars
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

VARIABLE = "RAY_FED_TEST_GRAPH_CALLS"
"""Environment variable: the file to append to."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


def tell(line: str) -> None:
    with pathlib.Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _marked(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    async def run(*args: Any, **options: Any) -> Any:
        token = _inside.set(True)
        try:
            return await verb(*args, **options)
        finally:
            _inside.reset(token)

    return run


def _told(owner: Any, name: str, line: str) -> None:
    verb = getattr(owner, name)

    @functools.wraps(verb)
    async def run(*args: Any, **options: Any) -> Any:
        tell(line)
        return await verb(*args, **options)

    setattr(owner, name, run)


def tell_of_folds() -> None:
    """Tell of each fold that a `FederatingExecutor` drives in this process."""
    from ray_fed.executors.federating import FederatingExecutor

    _told(FederatingExecutor, "fold", "fold")


def tell_of_graphs() -> None:
    """Tell of each graph that runs in this process."""

    from ray_fed.executors.eager_tf import EagerTFExecutor

    from tensorflow.python.eager import context, execute  # isort: skip

    run = execute.execute
    process: Any = context.context()

    def count(name: Any, *args: Any, **options: Any) -> Any:
        if process.has_function(name):
            tell("graph inside" if _inside.get() else "graph outside")
        return run(name, *args, **options)

    execute.execute = count
    for name in ("create_value", "create_call"):
        setattr(EagerTFExecutor, name, _marked(getattr(EagerTFExecutor, name)))


def in_ray_process() -> None:
    """Tell of what a process of Ray does; workers alone load TensorFlow."""
    tell_of_folds()
    _told_of_workers()


def _told_of_workers() -> None:
    from ray_fed.cluster.actors.leaf_worker import LeafWorker

    load = LeafWorker.load_now

    @functools.wraps(load)
    def load_and_tell(self: LeafWorker) -> None:
        load(self)
        tell_of_graphs()

    LeafWorker.load_now = load_and_tell
