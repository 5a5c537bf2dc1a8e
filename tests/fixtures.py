"""Fixtures that several test modules share."""

import gc
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import pytest
import ray
from ray._private import internal_api, worker
from ray._private import state as ray_state

import ray_fed
import ray_fed.worker.stacks as stacks
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.observability import events
from ray_fed.observability.report import RoundReport
from ray_fed.tensorflow.tensors import devices
from tests.session_contexts import context_over

ContextFactory = Callable[..., ExecutionContext]
StackFor = Callable[..., fl.framework.Executor]
EACH_BACKEND = pytest.mark.parametrize(
    "build", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
"""For tests that `build` contexts; see `tests/contexts/conftest.py`."""


def report_of(context: ExecutionContext) -> RoundReport:
    """Return what the latest call of a context cost; there was one."""
    assert context.last_report is not None
    return context.last_report


def run_script(*arguments: str | pathlib.Path, timeout_s: float, **env: str) -> Any:
    """Run Python in a process of its own; return what its last line says, in JSON.

    Args:
        *arguments: of Python: a script and what it takes, say.
        timeout_s: of the process.
        **env: variables beside those of this process.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | env,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Seen(list[events.Event]):
    """A sink that keeps what happened."""

    def on_event(self, event: events.Event) -> None:
        self.append(event)


devices.set_threads(1)  # as workers have: before any test runs TensorFlow
devices.split_cpu(2)  # as local contexts of two workers have

NUM_CPUS = 16
"""More than the machine may have: for pools that are kept, stacks, and contexts that
tests open. Ray warns of more processes than these."""

KEPT_WORKERS = 5
"""How many workers the pools that are kept may have: one of two, and one of three."""

_logger = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of the test session's own."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"idle_worker_killing_time_threshold_ms": 600_000},
    )
    yield
    ray.shutdown()


class RayMemory:
    """What Ray holds for this process, and held as the test began."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Take what is held now for what is held as the test began."""
        gc.collect()
        self._references = self.rest(self.num_references)
        self._stored = self.rest(self.stored_bytes)

    def left(self) -> tuple[int, int]:
        """Return how many objects and bytes came, once none did, or after a while.

        What tests before left, the store of a dataset of Ray Data say, does not count.
        """
        references = self.settle(self.num_references, self._references)
        stored = self.settle(self.stored_bytes, self._stored)
        return max(0, references - self._references), max(0, stored - self._stored)

    def num_references(self) -> int:
        """Return how many objects this process has a share in, as lineage too.

        But for the result of the call by which a pool follows each of its workers.
        """
        core: Any = worker.global_worker
        actors = cast("Any", ray_state).actors().values()
        workers = (a["State"] for a in actors if a["ActorClassName"] == "LeafWorker")
        num_followed = sum(state != "DEAD" for state in workers)
        return len(core.core_worker.get_all_reference_counts()) - num_followed

    def stored_bytes(self) -> int:
        """Return what all objects of the node's store take."""
        (node,) = ray.nodes()
        stats: Any = internal_api.node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"]
        )
        return stats.store_stats.object_store_bytes_used

    def settle(self, measure_now: Callable[[], int], target: int) -> int:
        """Return a measure once it is down at its target, or after a while.

        What Ray holds is logged then, and by which process.
        """
        deadline = time.monotonic() + 60
        while measure_now() > target:
            if time.monotonic() > deadline:
                here = ray.get_runtime_context().gcs_address  # not another's Ray
                _logger.error(internal_api.memory_summary(here, stats_only=False))
                break
            time.sleep(0.1)  # Ray frees what nobody needs a little later
        return measure_now()

    def rest(self, measure_now: Callable[[], int]) -> int:
        """Return a measure once it is the lowest for two seconds."""
        lowest, since_s = measure_now(), time.monotonic()
        while time.monotonic() < since_s + 2:
            time.sleep(0.1)
            if measure_now() < lowest:
                lowest, since_s = measure_now(), time.monotonic()
        return lowest


@pytest.fixture
def ray_memory(ray_cluster: None) -> RayMemory:
    """Measures of the session's Ray, once what tests before left is collected.

    What a test measures itself is to be freed without the collector.
    """
    return RayMemory()


@pytest.fixture(scope="session")
def ray_contexts(ray_cluster: None) -> Iterator[ContextFactory]:
    """Contexts on the session's Ray; those of the same workers share one pool.

    Pools of other settings are kept, the latest ones, as far as they fit: one takes ten
    seconds to start. One context is open at a time.
    """
    kept: list[tuple[ray_fed.Config, Session]] = []
    latest: list[ExecutionContext] = []

    def session_of(base: ray_fed.Config, config: ray_fed.Config) -> Session:
        found = next((pair for pair in kept if pair[0] == base), None)
        if found is None:
            room = KEPT_WORKERS - _count(base)
            while kept and sum(_count(other) for other, _ in kept) > room:
                kept.pop(0)[1].close()
            found = (base, Session(None, config))
        else:
            kept.remove(found)
        kept.append(found)
        return found[1]

    def build(**settings: Any) -> ExecutionContext:
        if latest:
            latest.pop().close()
        config = ray_fed.Config(backend="ray", **settings)
        base = ray_fed.Config(
            workers=config.workers, retry=config.retry, data=config.data
        )
        latest.append(context_over(session_of(base, config), config))
        return latest[0]

    yield build
    for context in latest:
        context.close()
    for _, session in kept:
        session.close()


def _count(config: ray_fed.Config) -> int:
    count = config.workers.count
    assert isinstance(count, int)
    return count


@pytest.fixture(scope="session")
def ray_executors(ray_cluster: None) -> Iterator[RayExecutorFactory]:
    """Stacks without subrounds on two workers, small enough beside any other pool."""
    workers = ray_fed.Workers(count=2, num_cpus=0.5)
    with RayExecutorFactory(ray_fed.Config(workers=workers)) as factory:
        yield factory


@pytest.fixture
def local_contexts() -> Iterator[ContextFactory]:
    """Contexts on threads of this process, closed at the end of the test."""
    contexts: list[ExecutionContext] = []

    def build(**settings: Any) -> ExecutionContext:
        config = ray_fed.Config(backend="local", **settings)
        contexts.append(ray_fed.create_context(config))
        return contexts[-1]

    yield build
    for context in contexts:
        context.close()


@pytest.fixture
def local_stack_for() -> Iterator[StackFor]:
    """Builds local stacks, each over leaves on threads of its own."""
    built: list[fl.framework.Executor] = []

    def build(
        num_clients: int, num_leaves: int = 2, clients_per_leaf: int | None = None
    ) -> fl.framework.Executor:
        leaves = stacks.threaded_stacks(num_leaves)
        unplaced = stacks.threaded_stacks(1)[0]
        executor = stacks.local_stack(num_clients, leaves, unplaced, clients_per_leaf)
        built.extend([executor, *leaves])
        return executor

    yield build
    for executor in built:
        executor.close()


@pytest.fixture(autouse=True)
def _no_default_context() -> Iterator[None]:
    """Leave no context installed behind a test."""
    yield
    fl.framework.set_no_default_context()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """A real S3 server of this process, and the variables that lead to it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    s3fs.S3FileSystem.clear_instance_cache()  # it remembers another server's address
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield url
    server.stop()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 64 KiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mounted)]
    if mount is None or os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)
