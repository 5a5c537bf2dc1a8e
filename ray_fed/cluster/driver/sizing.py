"""How many workers a pool is to have, of what the cluster has."""

from collections.abc import Mapping, Sequence

import ray_fed.errors as errors
from ray_fed.cluster.driver import inventory
from ray_fed.cluster.driver.ray_cluster import resources_of
from ray_fed.cluster.pool.actions import Size
from ray_fed.config import Config


def decide_size(
    config: Config,
    nodes: Sequence[Mapping[str, float]],
    *,
    may_grow: bool,
    held: Mapping[str, float] | None = None,
) -> Size:
    """Return how many workers to keep.

    Args:
        config: of the pool.
        nodes: what each has in all; or each bundle of a placement group, beside what
            this process holds.
        may_grow: whether nodes may come, so that a range can wait for its least.
        held: by this process, in the placement group; None: workers live in none.

    Raises:
        ResourceError: the nodes can never hold them.
    """
    each = resources_of(config)
    fitting = sum(inventory.count_fitting(node, each) for node in nodes)
    match config.workers.count:
        case None:
            least, most, is_fixed = 1, max(1, fitting), True
        case int() as count:
            least, most, is_fixed = 1, count, True
        case (least, most):
            is_fixed = False
    needed = most if is_fixed else least
    if fitting < needed and (is_fixed or not may_grow):
        if held is not None:
            raise errors.ResourceError(_describe_bundles(each, held, needed, fitting))
        raise errors.ResourceError(_describe_shortage(each, nodes, needed, fitting))
    words = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
    return Size(least, most, is_fixed, words, config.workers.wait_timeout_s)


def _describe_shortage(
    each: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]],
    needed: int,
    fitting: int,
) -> str:
    advice = (
        "lower `workers.count` or what each worker asks for, or add nodes. With"
        " workers=(min, max) the pool follows the cluster."
    )
    for name, amount in each.items():
        found = sum(node.get(name, 0.0) for node in nodes)
        if amount * needed > found + 1e-9:
            return (
                f"Expected {amount * needed:g} {name} for {needed} `workers`, found"
                f" {found:g} in the cluster: {advice}"
            )
    return (
        f"Expected room for {needed} `workers`, each on one node, found room for"
        f" {fitting} on {len(nodes)} nodes: {advice}"
    )


def _describe_bundles(
    each: Mapping[str, float], held: Mapping[str, float], needed: int, fitting: int
) -> str:
    return (
        f"Expected room for {needed} `workers` in the bundles of the placement group"
        f" that this process runs in, found room for {fitting} beside the process"
        f" itself: ask for {needed + 1} bundles, the first for the process, as in"
        f" tune.PlacementGroupFactory([{_show(held)}] + [{_show(each)}] * {needed})."
        ' Without bundles for workers, call ray_fed.init(config=Config(backend="local",'
        " workers=1)), whose workers are threads of the process."
    )


def _show(resources: Mapping[str, float]) -> str:
    pairs = (f'"{name}": {amount:g}' for name, amount in resources.items())
    return f"{{{', '.join(pairs)}}}"
