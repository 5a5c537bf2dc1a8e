"""What a Ray that is running has, for those who only look at it."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import ray
from ray._private import state as ray_state  # no public name for what is needed
from ray._private.resource_and_label_spec import ResourceAndLabelSpec  # nor for this
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup, placement_group_table
from typing_extensions import override

from ray_fed.cluster import joining
from ray_fed.config import Config

_T = TypeVar("_T")


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
        amounts = (resources.get(name, 0.0) for name in ("CPU", "GPU", "memory"))
        return cls(*amounts)

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
    cluster = joining.find(address)
    if cluster is None:
        raise joining.missing_error(address)
    return read_joined(cluster)


def read_joined(cluster: joining.RunningRay) -> Inventory:
    """Read what a Ray has as `read_inventory` does.

    Args:
        cluster: the Ray.

    Raises:
        ClusterError: it refuses this process.
    """
    joining.join(cluster, log_to_driver=False, logging_level=logging.ERROR)
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


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        free: workers that it has room for now, beside what it runs.
        is_draining: it will go soon.
    """

    free: int
    is_draining: bool


def resources_of(config: Config) -> Mapping[str, float]:
    """Return what one worker asks for, by Ray's names."""
    wanted = config.workers
    each = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    return {name: amount for name, amount in each.items() if amount > 0}


def look_up(read: Callable[..., _T], *args: Any) -> Awaitable[_T]:
    """Return what a function of this module says of the cluster, whoever may ask it."""
    if ray_client.is_connected():  # which knows no state of the cluster
        return cast("Any", _look_up_by_task).remote(read, *args)
    return asyncio.to_thread(read, *args)


@ray.remote(num_cpus=0)
def _look_up_by_task(read: Callable[..., Any], *args: Any) -> Any:
    return read(*args)


def read_draining() -> Mapping[str, int]:
    """Return when each node goes that will go soon, by Ray's id of it."""
    return cast("Any", ray_state.state).get_draining_nodes()


def describe_need(
    each: Mapping[str, float], group: PlacementGroup | None, count: int
) -> str:
    """Return what so many workers ask for, and what is free of it, in words.

    Empty where there is room for one of them, which is about to have its place.

    Args:
        each: what a worker asks for.
        group: see `read_nodes`.
        count: of the workers.
    """
    if any(node.free for node in read_nodes(each, group)):
        return ""
    counted = "1 worker" if count == 1 else f"{count} workers"
    parts = [part for of_node in _read_parts(group).values() for part in of_node]
    needs: list[str] = []
    for name, amount in each.items():
        free = sum(left.get(name, 0.0) for left, _ in parts)
        total = sum(whole.get(name, 0.0) for _, whole in parts)
        needs.append(f"{amount * count:g} {name} ({free:g} of {total:g} free)")
    return f"room for {counted}: {', '.join(needs)}"


def read_nodes(
    each: Mapping[str, float], group: PlacementGroup | None = None
) -> list[Node]:
    """Return the nodes of the cluster that this process is of, which are alive.

    Args:
        each: what a worker asks for; their room is counted in workers.
        group: that workers are placed in: only its bundles count.
    """
    draining = read_draining()
    parts = _read_parts(group)
    return [
        Node(
            free=sum(count_fitting(part, each) for part, _ in parts[node["NodeID"]]),
            is_draining=node["NodeID"] in draining,
        )
        for node in cast("list[dict[str, Any]]", ray.nodes())
        if node["Alive"] and node["NodeID"] in parts
    ]


_Part: TypeAlias = tuple[Mapping[str, float], Mapping[str, float]]
"""What is free of a node or of a bundle, and what it has in all."""


def _read_parts(group: PlacementGroup | None) -> dict[str, list[_Part]]:
    """Return each node, or the bundles of a group, by the id of the node."""
    free: dict[str, dict[str, float]]
    free = cast("Any", ray_state.state).available_resources_per_node()
    if group is None:
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        alive = [(n["NodeID"], n["Resources"]) for n in nodes if n["Alive"]]
        return {name: [(free.get(name, {}), whole)] for name, whole in alive}
    table = placement_group_table(group)
    parts: dict[str, list[_Part]] = {}
    for index, bundle in table["bundles"].items():
        node: str = table["bundles_to_node_id"].get(index, "")
        # What Ray calls a resource of a bundle among those of its node.
        suffix = f"_group_{index}_{group.id.hex()}"
        left = {name: free.get(node, {}).get(name + suffix, 0.0) for name in bundle}
        parts.setdefault(node, []).append((left, bundle))
    return parts


def machine_resources() -> Mapping[str, float]:
    """Return what a Ray that is started on this machine will have in all."""
    resources: Any = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()
    return resources


def live_resources(group: PlacementGroup | None) -> list[Mapping[str, float]]:
    """Return what each node that is alive has in all; also through Ray's client.

    Args:
        group: its bundles stand for nodes, without what this process holds of them.
    """
    if group is not None:
        return without(group.bundle_specs, held_resources())
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [node["Resources"] for node in nodes if node["Alive"]]


def held_resources() -> Mapping[str, float]:
    """Return what Ray gave to the task or actor that this process runs."""
    resources = cast("Any", ray.get_runtime_context()).get_assigned_resources()
    return cast("dict[str, float]", resources)


def without(
    bundles: Sequence[Mapping[str, float]], occupied: Mapping[str, float]
) -> list[Mapping[str, float]]:
    """Return bundles without what is held of the first that has room for it."""
    left = [dict(bundle) for bundle in bundles]
    for bundle in left:
        if all(bundle.get(name, 0.0) >= amount for name, amount in occupied.items()):
            for name, amount in occupied.items():
                bundle[name] -= amount
            break
    return list(left)


def count_fitting(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many workers of a kind fit into some resources."""
    return min(
        math.floor(resources.get(name, 0.0) / amount + 1e-9)
        for name, amount in each.items()
        if amount > 0
    )
