"""Builds the context that the settings ask for, with its backend: Ray, or threads."""

import contextlib
import os
from collections.abc import Callable

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed.config import Config
from ray_fed.contexts.execution_context import Backend, ExecutionContext
from ray_fed.contexts.runners import LocalRunner
from ray_fed.observability.progress import WaitLine

_MAX_THREADS = 1024
"""Workers of the local backend."""


def build_context(address: str | None, config: Config) -> ExecutionContext:
    """Return a context on the configured backend.

    Args:
        address: of Ray, see `cluster.session.Session`; not for the local backend.
        config: settings.

    Raises:
        ConfigError: an address was given to the local backend.
        ClusterError: the cluster is not there, or smaller than what is asked for.
    """
    with WaitLine.create(config.progress) as line:
        make = _local_backend if config.backend == "local" else _ray_backend
        backend = make(address, config, line.say)
        with contextlib.ExitStack() as failed:
            failed.callback(backend.close)
            context = ExecutionContext(config, backend, [line])
            failed.pop_all()  # the context closes it
        return context


def _ray_backend(
    address: str | None, config: Config, say: Callable[[str], None]
) -> Backend:
    from ray_fed.cluster.metrics import RoundMetrics
    from ray_fed.cluster.session import Session

    session = Session(address, config, say)
    return Backend(
        session.runners(),
        session.count_workers,
        session.close,
        session.store,
        session.fetch,
        session.await_ready,
        session.check,
        spreads_subrounds=True,
        place=session.place,
        sinks=[RoundMetrics()],
    )


def _local_backend(
    address: str | None, config: Config, say: Callable[[str], None]
) -> Backend:
    if address is not None:
        raise errors.ConfigError(
            f"Expected no address for the local backend, found `{address}`."
        )
    if config.workers.num_gpus or config.workers.resources:
        raise errors.ConfigError(
            "Expected neither `workers.num_gpus` nor `workers.resources` for the local"
            " backend, whose workers are threads of this process, found"
            f" {config.workers.num_gpus:g} and {dict(config.workers.resources)}: set"
            ' backend="ray".'
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
