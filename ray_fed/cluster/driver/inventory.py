"""What a Ray that is running has, for those who only look at it."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray._private import state as ray_state  # no public name for what is needed
from ray._private.resource_and_label_spec import ResourceAndLabelSpec  # nor for this
from typing_extensions import override

from ray_fed.cluster.driver import joining
from ray_fed.cluster.pool.placement import Node


@dataclasses.dataclass(frozen=True)
class Amounts:
    """Resources, in all or free.

    Attributes:
        num_cpus: fractions too.
        num_gpus: fractions too.
        memory_bytes: that Ray hands out.
    """

    num_cpus: float
    num_gpus: float
    memory_bytes: float

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> "Amounts":
        """Return the amounts that Ray's own mapping of resources names."""
        found = (resources.get(name, 0.0) for name in ("CPU", "GPU", "memory"))
        return cls(*found)

    @override
    def __str__(self) -> str:
        return (
            f"{self.num_cpus:g} CPUs, {self.num_gpus:g} GPUs,"
            f" {self.memory_bytes / 2**30:.1f} GiB of memory"
        )


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The nodes of a cluster that are alive.

    Attributes:
        nodes: what each node has, by its address.
        total: of all nodes.
        free: of `total`, what nothing holds now.
    """

    nodes: tuple[tuple[str, Amounts], ...]
    total: Amounts
    free: Amounts


def read_inventory(address: str | None) -> Inventory:
    """Join a Ray that is running, read what it has, and leave it as it was.

    Args:
        address: as for `ray_fed.init`.

    Raises:
        ClusterError: there is no Ray at the address, or it refuses this process.
    """
    found = joining.find(address)
    if found is None:
        raise joining.missing_error(address)
    return read_joined(found)


def read_joined(found: joining.Found) -> Inventory:
    """Read what a Ray has as `read_inventory` does.

    Args:
        found: the Ray.

    Raises:
        ClusterError: it refuses this process.
    """
    joining.join(found, log_to_driver=False, logging_level=logging.ERROR)
    try:
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        return Inventory(
            tuple(
                (node["NodeManagerAddress"], Amounts.of(node["Resources"]))
                for node in nodes
                if node["Alive"]
            ),
            Amounts.of(cast("dict[str, float]", ray.cluster_resources())),
            Amounts.of(cast("dict[str, float]", ray.available_resources())),
        )
    finally:
        ray.shutdown()


def read_nodes(each: Mapping[str, float]) -> list[Node]:
    """Return the nodes of the cluster that this process is of, which are alive.

    Args:
        each: what a worker asks for; their room is counted in workers.
    """
    state = cast("Any", ray_state.state)
    free: dict[str, dict[str, float]] = state.available_resources_per_node()
    draining: Mapping[str, int] = state.get_draining_nodes()
    return [
        Node(
            name=node["NodeID"],
            address=node["NodeManagerAddress"],
            free=count_fitting(free.get(node["NodeID"], {}), each),
            total=count_fitting(node["Resources"], each),
            is_draining=node["NodeID"] in draining,
        )
        for node in cast("list[dict[str, Any]]", ray.nodes())
        if node["Alive"]
    ]


def machine_resources() -> Mapping[str, float]:
    """Return what a Ray that is started on this machine will have in all."""
    found: Any = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()
    return found


def live_resources() -> list[Mapping[str, float]]:
    """Return what each node that is alive has in all; also through Ray's client."""
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [node["Resources"] for node in nodes if node["Alive"]]


def count_fitting(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many workers of a kind fit into some resources."""
    return min(
        math.floor(resources.get(name, 0.0) / amount + 1e-9)
        for name, amount in each.items()
        if amount > 0
    )
