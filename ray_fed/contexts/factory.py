"""Builds the context that the settings ask for, with its backend: Ray, or threads."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed.config import Config
from ray_fed.contexts.execution_context import Backend, ExecutionContext
from ray_fed.contexts.runners import LocalRunner
from ray_fed.observability.progress import WaitLine
from ray_fed.plan.fingerprint import Fingerprint

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
    if not config.debug and _count_threads(config) > _MAX_THREADS:
        raise errors.ConfigError(
            f"Expected at most {_MAX_THREADS} `workers.count` for the local backend,"
            " whose workers are threads of this process, found"
            f' {_count_threads(config)}: set backend="ray".'
        )
    from ray_fed.tensorflow.tensors import devices

    num_leaves = 1 if config.debug else _count_threads(config)
    devices.set_threads(max(1, int(config.workers.num_cpus)), num_leaves)
    parts = devices.split_cpu(num_leaves)
    fingerprint = devices.read_fingerprint(parts[0])
    make_runners = _debugging_runners if config.debug else _threaded_runners
    runners = make_runners(config, fingerprint, parts)

    def close() -> None:
        for runner in runners:
            runner.close()

    return Backend(runners, len(runners), close)


def _threaded_runners(
    config: Config, fingerprint: Fingerprint, devices: Sequence[Any]
) -> list[LocalRunner]:
    limits = config.worker_limits
    client_bytes = config.workers.client_bytes
    threaded = stacks.threaded_stacks(len(devices), client_bytes, devices)
    return [
        LocalRunner(stack, f"thread {index}", fingerprint, limits)
        for index, stack in enumerate(threaded)
    ]


def _count_threads(config: Config) -> int:
    num_cpus = os.cpu_count() or 1
    match config.workers.count:
        case None:
            return num_cpus
        case int() as count:
            return count
        case (least, most):
            return max(least, min(most, num_cpus))


def _debugging_runners(
    config: Config, fingerprint: Fingerprint, devices: Sequence[Any]
) -> list[LocalRunner]:
    (device,) = devices
    stack = stacks.device_stack(device, config.workers.client_bytes)
    limits = config.worker_limits
    return [LocalRunner(stack, "calling thread", fingerprint, limits, stepwise=True)]
