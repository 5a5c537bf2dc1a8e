"""Builds the context of a configuration, with its backend on Ray or threads."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed.config import Config
from ray_fed.contexts.execution_context import Backend, ExecutionContext
from ray_fed.contexts.runners import LocalRunner
from ray_fed.observability.progress import WaitLine

_OF_RAY = ("num_gpus", "memory", "accelerator_type", "resources", "label_selector")
"""Names of the settings of workers that only Ray supports."""

_MAX_THREADS = 1024
"""Maximum number of workers of the local backend."""


def build_context(address: str | None, config: Config) -> ExecutionContext:
    """Return a new context on Ray or on threads of this process.

    `config.backend` decides. `address` is the address of Ray, and must be None for
    threads. Raises ConfigError if the backend does not support a setting, and
    ClusterError if there is no Ray, or if it is too small.
    """
    with WaitLine.create(config.progress) as line:
        make = _local_backend if config.backend == "local" else _ray_backend
        backend = make(address, config, line.say)
        with contextlib.ExitStack() as failed:
            failed.callback(backend.close)
            context = ExecutionContext(config, backend, [line])
            failed.pop_all()  # from here on, the context closes the backend
        return context


def _ray_backend(
    address: str | None, config: Config, say: Callable[[str], None]
) -> Backend:
    from ray_fed.cluster.metrics import RoundMetrics
    from ray_fed.cluster.session import Session

    groups: dict[str, Backend] = {}
    with contextlib.ExitStack() as opened:

        def open_pool(address: str | None, **update: Any) -> Session:
            own = config.model_copy(update={"worker_groups": {}, **update})
            return opened.enter_context(contextlib.closing(Session(address, own, say)))

        session = open_pool(address)
        for name, workers in config.worker_groups.items():
            group = open_pool(None, workers=workers, name=f"{session.program} {name}")
            groups[name] = _backend_of(group)
        # `close` closes the last pool first, because the first one may own Ray.
        close = opened.pop_all().close
    return dataclasses.replace(
        _backend_of(session),
        close=close,
        sinks=[RoundMetrics(session.program)],
        groups=groups,
    )


def _backend_of(session: Any) -> Backend:
    # `Any`, because an import of `Session` would import Ray.
    return Backend(
        session.runners(),
        session.count_workers,
        session.close,
        session.store,
        session.fetch,
        session.await_change,
        session.check,
        spreads_subrounds=True,
        place=session.place,
    )


def _local_backend(
    address: str | None, config: Config, say: Callable[[str], None]
) -> Backend:
    if address is not None:
        raise errors.ConfigError(
            f"Expected no address for the local backend, found `{address}`."
        )
    asked = [name for name in _OF_RAY if getattr(config.workers, name)]
    if asked:
        raise errors.ConfigError(
            f"Expected no `workers.{asked[0]}` for the local backend, whose workers are"
            f" threads of this process, found `{getattr(config.workers, asked[0])}`:"
            ' set backend="ray".'
        )
    say("importing TensorFlow")
    num_threads = _count_threads(config)
    if not config.debug and num_threads > _MAX_THREADS:
        raise errors.ConfigError(
            f"Expected at most {_MAX_THREADS} `workers.count` for the local backend,"
            " whose workers are threads of this process, found"
            f' {num_threads}: set backend="ray".'
        )
    from ray_fed.tensorflow.tensors import devices

    num_leaves = 1 if config.debug else num_threads
    devices.set_threads(max(1, int(config.workers.num_cpus)), num_leaves)
    parts = devices.split_cpu(num_leaves)
    about = devices.read_fingerprint(parts[0]), config.worker_limits
    client_bytes = config.workers.client_bytes
    if config.debug:
        stack = stacks.device_stack(parts[0], client_bytes)
        runners = [LocalRunner(stack, "calling thread", *about, stepwise=True)]
    else:
        threaded = stacks.threaded_stacks(num_leaves, client_bytes, parts)
        runners = [
            LocalRunner(stack, f"thread {index}", *about)
            for index, stack in enumerate(threaded)
        ]

    def close() -> None:
        for runner in runners:
            runner.close()

    return Backend(runners, len(runners), close)


def _count_threads(config: Config) -> int:
    num_cpus = os.cpu_count() or 1
    match config.workers.count:
        case None:
            return num_cpus
        case int() as count:
            return count
        case (least, most):
            return max(least, min(most, num_cpus))
