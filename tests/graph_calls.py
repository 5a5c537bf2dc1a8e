"""Records which graphs TensorFlow runs, and which subrounds are evaluated.

A record is a line of a file, so that a test can read the records of other processes:
"graph inside" for a graph that an `EagerTFExecutor` runs, "graph outside" for any other
graph, and "subround".
"""

import contextvars
import functools
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

VARIABLE = "GRAPH_CALLS_FILE"
"""Environment variable with the path of the file."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


def tell(line: str) -> None:
    with pathlib.Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _marked(verb: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(verb):

        @functools.wraps(verb)
        def run_now(*args: Any, **options: Any) -> Any:
            token = _inside.set(True)
            try:
                return verb(*args, **options)
            finally:
                _inside.reset(token)

        return run_now

    @functools.wraps(verb)
    async def run(*args: Any, **options: Any) -> Any:
        token = _inside.set(True)
        try:
            return await verb(*args, **options)
        finally:
            _inside.reset(token)

    return run


def tell_of_subrounds() -> None:
    """Record each subround that is evaluated in this process."""
    from ray_fed.plan import plans
    from ray_fed.worker import evaluation

    evaluate = evaluation.evaluate_plan

    @functools.wraps(evaluate)
    async def run(comp: Any, *args: Any) -> Any:
        if isinstance(comp, plans.Subround):
            tell("subround")
        return await evaluate(comp, *args)

    evaluation.evaluate_plan = run


def tell_of_graphs() -> None:
    """Record each graph that runs in this process."""

    from ray_fed.executors.eager_tf import EagerTFExecutor
    from ray_fed.tensorflow.kernels.server_kernels import KernelCache

    from tensorflow.python.eager import context, execute  # isort: skip

    process: Any = context.context()

    def counted(run: Any) -> Any:
        def count(name: Any, *args: Any, **options: Any) -> Any:
            if process.has_function(name):
                tell("graph inside" if _inside.get() else "graph outside")
            return run(name, *args, **options)

        return count

    execute.execute = counted(execute.execute)
    execute.execute_with_cancellation = counted(execute.execute_with_cancellation)
    for name in ("create_value", "create_call", "run_kernel"):
        setattr(EagerTFExecutor, name, _marked(getattr(EagerTFExecutor, name)))
    KernelCache._get = _marked(KernelCache._get)  # pyright: ignore[reportPrivateUsage]


def in_ray_process() -> None:
    """Record subrounds and, once TensorFlow is loaded, graphs in a process of Ray."""
    from ray_fed.cluster.ray_strategy import RayFederatingStrategy
    from ray_fed.cluster.worker_actor import LeafWorker

    tell_of_subrounds()
    evaluate, load = RayFederatingStrategy.evaluate, LeafWorker.load_now

    @functools.wraps(evaluate)
    async def evaluate_and_tell(*args: Any, **options: Any) -> Any:
        tell("subround")
        return await evaluate(*args, **options)

    @functools.wraps(load)
    def load_and_tell(self: LeafWorker) -> None:
        load(self)
        tell_of_graphs()

    RayFederatingStrategy.evaluate = evaluate_and_tell
    LeafWorker.load_now = load_and_tell
