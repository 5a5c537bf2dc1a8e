"""Reads the nodes, resources and processes of a running Ray, and changes nothing."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import ray
from ray._private import resource_and_label_spec, state
from ray.core.generated import autoscaler_pb2, common_pb2, gcs_pb2
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup, placement_group_table
from typing_extensions import override

from ray_fed.cluster import joining
from ray_fed.config import Config

_T = TypeVar("_T")
_state: Any = state

_MEMORY = "memory"
_ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource names for types of accelerators."""

_ACCELERATOR_SHARE = 0.001
"""Amount of an accelerator resource that Ray reserves for an actor. A node has 1."""


@dataclasses.dataclass(frozen=True)
class Amounts:
    """CPUs, GPUs and memory of a node or a cluster. CPUs and GPUs may be fractions."""

    num_cpus: float
    num_gpus: float
    memory_bytes: float

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> "Amounts":
        """Return the amounts in a mapping from Ray's resource names to amounts."""
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
    """The resources of a cluster.

    Attributes:
        nodes: Address of each live node, with all resources of the node.
        total: Resources of all nodes together.
        free: Part of `total` that no task or actor holds now.
    """

    nodes: tuple[tuple[str, Amounts], ...]
    total: Amounts
    free: Amounts


def read_inventory(address: str | None) -> Inventory:
    """Join the Ray at an address, read its resources, and disconnect.

    With None, the Ray is found as in `joining.find`. Raises ClusterError if there is no
    Ray.
    """
    cluster = joining.find(address)
    if cluster is None:
        raise joining.missing_error(address)
    return read_joined(cluster)


def read_joined(cluster: joining.RunningRay) -> Inventory:
    """Join a Ray that `joining.find` returned, read its resources, and disconnect."""
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
    """A live node of the cluster.

    Attributes:
        free: Number of additional workers for which the node has room now.
        is_draining: Whether Ray will soon remove the node.
    """

    free: int
    is_draining: bool


@dataclasses.dataclass(frozen=True)
class Demand:
    """The resources and labels that one worker asks for.

    Attributes:
        resources: Amount of each resource, by Ray's name. All amounts are above 0.
        labels: Labels that the worker's node must have, see `ray_fed.Workers`.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @classmethod
    def of(cls, config: Config) -> "Demand":
        """Return the demand of one worker from the settings in `config.workers`."""
        wanted = config.workers
        amounts = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus}
        amounts[_MEMORY] = wanted.memory
        if wanted.accelerator_type is not None:
            amounts[_ACCELERATOR + wanted.accelerator_type] = _ACCELERATOR_SHARE
        amounts |= wanted.resources
        resources = {name: amount for name, amount in amounts.items() if amount > 0}
        return cls(resources, wanted.label_selector)

    @override
    def __str__(self) -> str:
        words = [describe_amount(*item) for item in self.resources.items()]
        return ", ".join(words) + self.on_nodes()

    def on_nodes(self) -> str:
        """Describe the allowed nodes, as in " on nodes with zone=a", or return ""."""
        labels = ", ".join(f"{name}={term}" for name, term in self.labels.items())
        return f" on nodes with {labels}" if labels else ""

    def allows(self, labels: Mapping[str, str]) -> bool:
        """Return whether a worker may run on a node with these labels."""
        return all(
            _matches(labels.get(name), term) for name, term in self.labels.items()
        )

    def count_fitting(self, resources: Mapping[str, float]) -> int:
        """Return how many workers fit into these resources of one node."""
        return min(
            math.floor(resources.get(name, 0.0) / amount + 1e-9)
            for name, amount in self.resources.items()
        )


def _matches(label: str | None, term: str) -> bool:
    """Return whether a label matches a term of Ray's: "v", "!v", "in(v)", "!in(v)"."""
    wanted = term.removeprefix("!")
    values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
    return (label in values) != term.startswith("!")


def describe_amount(name: str, amount: float) -> str:
    """Return an amount with its resource's name, such as "2 CPU" or "1 GiB memory"."""
    if name.startswith(_ACCELERATOR):
        return f"accelerator {name.removeprefix(_ACCELERATOR)}"
    unit = "GiB memory" if name == _MEMORY else name
    return f"{_in_units(name, amount):g} {unit}"


def _in_units(name: str, amount: float) -> float:
    return amount / 2**30 if name == _MEMORY else amount


def look_up(read: Callable[..., _T], *args: Any) -> Awaitable[_T]:
    """Return an awaitable for the result of a function that reads the cluster.

    The function runs on a thread of this process. With Ray's client, a process cannot
    read the cluster's state, so the function runs in a Ray task.
    """
    if ray_client.is_connected():
        return cast("Any", _look_up_by_task).remote(read, *args)
    return asyncio.to_thread(read, *args)


@ray.remote(num_cpus=0)
def _look_up_by_task(read: Callable[..., Any], *args: Any) -> Any:
    return read(*args)


def read_draining() -> Mapping[str, int]:
    """Return the nodes that Ray will soon remove: for each node id, the deadline."""
    return _state.state.get_draining_nodes()


def read_out_of_memory() -> list[Any]:
    """Return Ray's records of the processes that it ended because memory ran out."""
    ran_out = cast("Any", common_pb2).WorkerExitType.Value("NODE_OUT_OF_MEMORY")
    accessor = _state.state._connect_and_get_accessor()  # noqa: SLF001
    parse = cast("Any", gcs_pb2).WorkerTableData.FromString
    processes = map(parse, accessor.get_worker_table())
    return [process for process in processes if process.exit_type == ran_out]


def read_entrypoint() -> str:
    """Return the command that started this process's job, or "" if it is unknown."""
    job: str = ray.get_runtime_context().get_job_id()
    entrypoints = (j["Entrypoint"] for j in _state.jobs() if j["JobID"] == job)
    return next(entrypoints, "")


def describe_need(each: Demand, group: PlacementGroup | None, count: int) -> str:
    """Describe the room that `count` workers need, and how much of it is free.

    With a placement group, only the resources of its bundles count.
    """
    counted = "1 worker" if count == 1 else f"{count} workers"
    of_nodes = _read_parts(each, group).values()
    parts = [part for of_node in of_nodes for part in of_node]
    needs: list[str] = []
    for name, amount in each.resources.items():
        free = sum(left.get(name, 0.0) for left, _ in parts)
        total = sum(whole.get(name, 0.0) for _, whole in parts)
        room = f"{_in_units(name, free):g} of {_in_units(name, total):g} free"
        if name.startswith(_ACCELERATOR):
            room = f"on {total:g} node{'s' * (total != 1)}"
        needs.append(f"{describe_amount(name, amount * count)} ({room})")
    return f"room for {counted}{each.on_nodes()}: {', '.join(needs)}"


def count_pending(each: Demand, group: PlacementGroup | None) -> int:
    """Return how many workers wait in Ray's queue because no node has room for them.

    Ray lists requests only by their resources. So workers of other pools count, too, if
    they ask for the same resources.
    """
    suffix = "" if group is None else f"_group_{group.id.hex()}"
    reply = cast("Any", autoscaler_pb2).GetClusterResourceStateReply()
    reply.ParseFromString(
        joining.connected_worker().gcs_client.get_cluster_resource_state()
    )
    return sum(
        request.count
        for request in reply.cluster_resource_state.pending_resource_requests
        if all(
            request.request.resources_bundle.get(name + suffix) == amount
            for name, amount in each.resources.items()
        )
    )


def is_placed(group: PlacementGroup) -> bool:
    """Return whether Ray has reserved the resources of a placement group."""
    table = cast("dict[str, Any]", placement_group_table(group))
    return table["state"] == "CREATED"


def read_nodes(each: Demand, group: PlacementGroup | None = None) -> list[Node]:
    """Return the live nodes on which a worker may run, with their room for workers.

    `each` is the demand of one worker. With a placement group, only the nodes and
    resources of its bundles count.
    """
    draining = read_draining()
    parts = _read_parts(each, group)
    return [
        Node(
            free=sum(each.count_fitting(part) for part, _ in parts[node["NodeID"]]),
            is_draining=node["NodeID"] in draining,
        )
        for node in cast("list[dict[str, Any]]", ray.nodes())
        if node["Alive"] and node["NodeID"] in parts
    ]


_Part: TypeAlias = tuple[Mapping[str, float], Mapping[str, float]]
"""The free resources of a node or bundle, and all of its resources."""


def _read_parts(each: Demand, group: PlacementGroup | None) -> dict[str, list[_Part]]:
    # A node is one part, or, with a placement group, one part for each bundle.
    free: dict[str, dict[str, float]]
    free = _state.state.available_resources_per_node()
    allowed = {n["NodeID"]: n["Resources"] for n in _allowed_nodes(each)}
    if group is None:
        return {name: [(free.get(name, {}), whole)] for name, whole in allowed.items()}
    table = placement_group_table(group)
    parts: dict[str, list[_Part]] = {}
    for index, bundle in table["bundles"].items():
        node: str = table["bundles_to_node_id"].get(index, "")
        if node not in allowed:
            continue
        # Ray lists a bundle's resources on its node under names with this suffix.
        suffix = f"_group_{index}_{group.id.hex()}"
        left = {name: free.get(node, {}).get(name + suffix, 0.0) for name in bundle}
        parts.setdefault(node, []).append((left, bundle))
    return parts


def _allowed_nodes(each: Demand) -> list[dict[str, Any]]:
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [node for node in nodes if node["Alive"] and each.allows(node["Labels"])]


def machine_resources(each: Demand) -> list[Mapping[str, float]]:
    """Return the resources that a Ray started on this machine would have.

    The list has one entry, or none if the labels of `each` exclude this machine.
    """
    spec: Any = resource_and_label_spec.ResourceAndLabelSpec()
    spec = spec.resolve(is_head=True)
    return [spec.to_resource_dict()] if each.allows(spec.labels) else []


def live_resources(
    each: Demand, group: PlacementGroup | None
) -> list[Mapping[str, float]]:
    """Return all resources of each live node on which a worker may run.

    With a placement group, each entry is a bundle instead of a node, without the
    resources that this process holds. This also works through Ray's client.
    """
    if group is None:
        return [node["Resources"] for node in _allowed_nodes(each)]
    bundles = without(group.bundle_specs, held_resources())
    if not each.labels:
        return bundles
    allowed = {node["NodeID"] for node in _allowed_nodes(each)}
    places = placement_group_table(group)["bundles_to_node_id"]
    return [b for index, b in enumerate(bundles) if places.get(index) in allowed]


def held_resources() -> Mapping[str, float]:
    """Return the resources that Ray reserved for the task or actor of this process."""
    resources = cast("Any", ray.get_runtime_context()).get_assigned_resources()
    return cast("dict[str, float]", resources)


def without(
    bundles: Sequence[Mapping[str, float]], occupied: Mapping[str, float]
) -> list[Mapping[str, float]]:
    """Return bundles without the `occupied` resources of this process.

    Ray does not say which bundle holds a process. So the first bundle that has
    `occupied` loses these resources. If no bundle has them, nothing changes.
    """
    left = [dict(bundle) for bundle in bundles]
    for bundle in left:
        if all(bundle.get(name, 0.0) >= amount for name, amount in occupied.items()):
            for name, amount in occupied.items():
                bundle[name] -= amount
            break
    return list(left)
