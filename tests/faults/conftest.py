"""Clusters of several nodes to break, and client work that counts its runs."""

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import ExecutionContext
from tests.session_contexts import context_over
from tests.waiting_work import GO, mark_and_wait

import tensorflow as tf  # isort: skip

NUM_CLIENTS = 16
SEED = 11
WAIT_S = 120.0
INT = fl.FederatedType(np.int32, fl.CLIENTS)


def _settings(**settings: Any) -> ray_fed.Config:
    return ray_fed.Config(seed=SEED, clients_per_leaf=2, **settings)


@dataclasses.dataclass
class ClientWork:
    """Client work that draws, and leaves a file each time that it runs.

    Clients that are told to wait do so, after their file, until they are let go.

    Attributes:
        folder: of the files.
        round: of federated_language: the sum of what the clients drew.
    """

    folder: pathlib.Path
    round: Any

    def expected(self, num_rounds: int = 1) -> list[bytes]:
        """Return the bits of the first rounds where nothing fails."""
        self.let_go()
        with ray_fed.create_context(_settings(backend="local")) as context:
            bits = [self.run(context) for _ in range(num_rounds)]
        self.reset()
        return bits

    def run(self, context: ExecutionContext) -> bytes:
        """Run a round; return its bits."""
        result = context.invoke(self.round, list(range(NUM_CLIENTS)))
        return np.asarray(result).tobytes()

    def run_undisturbed(self, context: ExecutionContext) -> None:
        """Run a round with nothing in its way, and forget its runs."""
        self.let_go()
        self.run(context)
        self.reset()

    def runs(self) -> list[int]:
        """Return how often each client ran."""
        found = [int(path.name.split("-")[0]) for path in self.folder.glob("*-*")]
        return [found.count(client) for client in range(NUM_CLIENTS)]

    def wait_for(self, *clients: int) -> None:
        """Return once all of these clients run."""
        self.wait_until(lambda: all(self.runs()[client] for client in clients))

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_reached():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def let_go_once_all_run(self) -> None:
        """Let clients go on once some of each half of the cohort run."""
        half = NUM_CLIENTS // 2
        self.wait_until(lambda: any(self.runs()[:half]) and any(self.runs()[half:]))
        self.let_go()

    def let_go(self) -> None:
        """Let clients that wait, and later ones, go on."""
        (self.folder / GO).touch()

    def reset(self) -> None:
        """Forget all runs; clients wait again."""
        for path in self.folder.iterdir():
            path.unlink()


def _client_work(
    folder: pathlib.Path, waiting: tuple[int, ...], body: Callable[[Any], Any] | None
) -> ClientWork:
    @rtf.computation(np.int32)
    def work(x: Any) -> Any:
        is_waiting = tf.reduce_any(tf.equal(x, waiting or (-1,)))
        name = tf.strings.as_string(x)
        ran = mark_and_wait(x, folder, name, is_waiting=is_waiting)
        if body is not None:
            ran = body(ran)
        return tf.random.normal([20]) * tf.cast(ran + 1, tf.float32)

    @fl.federated_computation(INT)
    def noisy_sum(clients: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, clients))

    return ClientWork(folder, noisy_sum)


@pytest.fixture
def client_work(tmp_path: pathlib.Path) -> Callable[..., ClientWork]:
    """Builds client work: `waiting` clients, and what else they do with themselves."""

    def build(
        waiting: tuple[int, ...] = (), body: Callable[[Any], Any] | None = None
    ) -> ClientWork:
        folder = tmp_path / "runs"
        folder.mkdir()
        return _client_work(folder, waiting, body)

    return build


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs no client, and two nodes for a worker each, while a module runs.

    No other Ray may be up in this process: run such modules one by one.
    """
    assert not ray.is_initialized()
    system = {"idle_worker_killing_time_threshold_ms": 600_000}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": system}
    built = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            built.add_node(num_cpus=1)
        ray.init(address=built.address, log_to_driver=False)
        yield built
    finally:
        ray.shutdown()
        built.shutdown()


@pytest.fixture
def contexts(cluster: Cluster) -> Iterator[Callable[..., ExecutionContext]]:
    """Contexts on the cluster, closed at the end of the test."""
    with contextlib.ExitStack() as opened:

        def build(**settings: Any) -> ExecutionContext:
            context = ray_fed.create_context(_settings(**settings), address="auto")
            return opened.enter_context(context)

        yield build


@pytest.fixture
def contexts_with_sessions(
    cluster: Cluster,
) -> Iterator[Callable[..., tuple[ExecutionContext, Session]]]:
    """Contexts on the cluster, and the sessions that have their pools; closed, too."""
    with contextlib.ExitStack() as opened:

        def build(**settings: Any) -> tuple[ExecutionContext, Session]:
            config = _settings(**settings)
            session = opened.enter_context(contextlib.closing(Session("auto", config)))
            return opened.enter_context(context_over(session, config)), session

        yield build


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Starts something on a thread, to happen while a round runs."""
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def begin(act: Callable[[], None]) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 (the test raises it)
                failures.append(error)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures


@pytest.fixture
def kill() -> Callable[[int], None]:
    """Ends a process, and returns when it runs no more."""

    def act(pid: int) -> None:
        os.kill(pid, 9)
        deadline = time.monotonic() + WAIT_S
        while _runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return act


@pytest.fixture
def runs() -> Callable[[int], bool]:
    """Says whether a process runs."""
    return _runs


def _runs(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
