"""Stories of a pool on clusters whose nodes come and go; each writes what happened.

Run by test_elastic in a process of its own: a process has one Ray, and this one is to
be its own cluster's.
"""

import concurrent.futures
import json
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import numpy as np
import ray
from ray import _raylet as ray_raylet
from ray._private import state as ray_state
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from typing_extensions import override

import ray_fed
from ray_fed import tensorflow as rtf

import tensorflow as tf  # isort: skip

NUM_CLIENTS = 8
LIMIT_S = 12.0
"""Seconds that a call waits for room in the stories that wait for the error."""

PATIENCE_S = 300.0
"""Seconds that a busy machine may take for an event that is not measured."""

DRAIN_S = 300
VECTOR = fl.TensorType(np.float32, [20])


@rtf.computation(VECTOR)
def noisy(data: Any) -> Any:
    # Work of several milliseconds: a round of less is not cut for all workers.
    product = tf.repeat(data[:, None], 400, axis=1)
    product = tf.matmul(product, product, transpose_a=True)
    for _ in range(20):
        product = tf.math.tanh(tf.matmul(product, product))
    return tf.math.tanh(data) + tf.random.normal([20]) + tf.reduce_mean(product)


@fl.federated_computation(fl.FederatedType(VECTOR, fl.CLIENTS))
def mean_of_noisy(data: Any) -> Any:
    return fl.federated_mean(fl.federated_map(noisy, data))


def data() -> list[Any]:
    generator = np.random.default_rng(3)
    return list(generator.normal(size=(NUM_CLIENTS, 20)).astype(np.float32))


def requested() -> int:
    """How many workers wait at Ray for room, which is what an autoscaler adds."""
    return sum(worker["State"] not in {"ALIVE", "DEAD"} for worker in workers())


def workers() -> list[dict[str, Any]]:
    actors: Any = cast("Any", ray_state).actors().values()
    return [actor for actor in actors if actor["ActorClassName"] == "LeafWorker"]


def live_workers() -> dict[int, str]:
    """The node of each worker, by its process."""
    return {
        worker["Pid"]: worker["Address"]["NodeID"]
        for worker in workers()
        if worker["State"] == "ALIVE"
    }


def drain(address: Any, node: Any) -> None:
    reason = cast("Any", autoscaler_pb2).DrainNodeReason.Value(
        "DRAIN_NODE_REASON_PREEMPTION"
    )
    client = cast("Any", ray_raylet).GcsClient(address=address)
    ends_ms = int(time.time() + DRAIN_S) * 1000
    accepted, why = client.drain_node(node.node_id, reason, "taken away", ends_ms)
    assert accepted, why


class Story:
    """A cluster without room at its head, and a context on it."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False},
        )
        self.context: Any = None
        self.told: dict[str, Any] = {}

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1)

    def connect(self, least: int, most: int, wait_timeout_s: float) -> None:
        """Open a context whose calls wait at most `wait_timeout_s` for room."""
        workers = ray_fed.Workers(
            count=(least, most),
            start_timeout_s=PATIENCE_S,
            wait_timeout_s=wait_timeout_s,
        )
        config = ray_fed.Config(workers=workers, clients_per_leaf=1, seed=11)
        address = self.cluster.address
        self.context = ray_fed.create_context(config, address=address)

    def run(self) -> tuple[str, set[str], int]:
        """Run a round; return its bits, nodes that took part, and its subrounds."""
        self.context.resume_at(0)  # the same random numbers each time
        nodes = live_workers()
        result = self.context.invoke(mean_of_noisy, data())
        nodes |= live_workers()
        ran = [s for s in self.context.last_report.subrounds if s.num_clients]
        used = {nodes[s.worker_pid] for s in ran}
        return result.tobytes().hex(), used, len(ran)

    def run_until(self, holds: Callable[[set[str], int], bool], name: str) -> None:
        """Run rounds until one is as it is to be; tell which bits they had."""
        ends = time.monotonic() + PATIENCE_S
        bits: set[str] = set()
        reached = False
        while not reached and time.monotonic() < ends:
            found, used, num_subrounds = self.run()
            bits.add(found)
            reached = holds(used, num_subrounds)
        self.told[name] = {"reached": reached, "bits": sorted(bits)}

    def run_into(self, expected: type[Exception]) -> None:
        """Run a round that is to fail; tell its error, and after how many seconds."""
        begun = time.monotonic()
        try:
            self.run()
            self.told["error"] = ""
        except expected as error:
            self.told["error"] = str(error)
        self.told["error after"] = time.monotonic() - begun

    def await_requested(self, count: int, name: str) -> None:
        """Wait until so many workers wait for room; tell how many did in the end."""
        ends = time.monotonic() + PATIENCE_S
        while requested() != count and time.monotonic() < ends:
            time.sleep(0.2)
        self.told[f"requested with {name}"] = requested()

    def end(self) -> None:
        self.context.close()
        self.told["requested at the end"] = requested()
        self.told["workers at the end"] = len(live_workers())
        told = pathlib.Path(os.environ["SCRATCH"]) / "told.json"
        told.write_text(json.dumps(self.told), encoding="utf-8")
        ray.shutdown()
        self.cluster.shutdown()


def come_and_go() -> None:
    """Nodes come, are lost, drain, are all gone, and come again."""
    story = Story()
    first = story.add_node()
    story.connect(1, 3, LIMIT_S)
    story.run_until(lambda used, n: (used, n) == ({first.node_id}, 1), "one node")
    story.await_requested(2, "one node")
    second = story.add_node()
    story.run_until(lambda used, n: second.node_id in used and n == 2, "second node")
    third = story.add_node()
    story.run_until(lambda used, n: third.node_id in used and n == 3, "third node")
    story.await_requested(0, "three nodes")
    story.cluster.remove_node(third, allow_graceful=False)
    story.run_until(lambda used, n: third.node_id not in used and n == 2, "third lost")
    story.await_requested(1, "two nodes")
    drain(story.cluster.address, second)
    story.run_until(lambda used, n: (used, n) == ({first.node_id}, 1), "second drains")
    drain(story.cluster.address, first)
    story.run_into(ray_fed.errors.ClusterError)
    fourth = story.add_node()
    story.await_requested(2, "fourth node")  # one has a process: no round waits for it
    story.run_until(lambda used, _: used == {fourth.node_id}, "fourth node")
    story.end()


def minimum() -> None:
    """Nodes come one by one below the minimum; one is lost, and another one comes."""
    story = Story()
    said = Said()
    logging.getLogger("ray_fed").addHandler(said)
    story.connect(2, 3, PATIENCE_S)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(story.run)
        said.is_there.wait(PATIENCE_S)
        story.add_node()
        story.await_requested(2, "one node")
        second = story.add_node()
        story.told["subrounds"] = first.result(PATIENCE_S)[2]
        story.told["said"] = said.lines[0]
        story.cluster.remove_node(second, allow_graceful=False)
        story.await_requested(2, "second lost")
        later = thread.submit(story.run)
        third = story.add_node()
        story.told["subrounds later"] = later.result(PATIENCE_S)[2]
    story.context.close()
    story.cluster.remove_node(third, allow_graceful=False)
    story.connect(2, 3, LIMIT_S)
    # Calls end at their limit, also while the only worker still starts.
    ends = time.monotonic() + PATIENCE_S
    while "found 1 " not in story.told.get("error", "") and time.monotonic() < ends:
        story.run_into(ray_fed.errors.ResourceError)
    story.end()


class Said(logging.Handler):
    """Keeps the lines of the log that say what a call waits for."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.is_there = threading.Event()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.is_there.set()


STORIES = {story.__name__: story for story in (come_and_go, minimum)}

if __name__ == "__main__":
    STORIES[sys.argv[1]]()
