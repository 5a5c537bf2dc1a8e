"""What a pool needs of the cluster, asked on a thread of its own."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import ray.exceptions

from ray_fed.cluster.pool.placement import Node

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Cluster(Protocol):
    """What a pool needs of a cluster; may block, but not for long."""

    def read_nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        ...

    def start_worker(self, worker: str, node: str | None) -> Any:
        """Start the actor of one worker, without waiting for it.

        Args:
            worker: its name.
            node: Ray's id of its node; None: any that has room.
        """
        ...

    def request(self, count: int) -> None:
        """Ask for a cluster that holds so many workers; 0: ask for none any more."""
        ...

    def describe_need(self, count: int) -> str:
        """Return what so many workers ask for, and what is free of it, in words."""
        ...


class ClusterThread:
    """Asks a cluster on one thread, so that what is asked stays in order.

    Args:
        cluster: that is asked.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    async def read_nodes(self) -> list[Node] | None:
        """Return the nodes that are alive; None if Ray refuses."""
        return await self._run(self._cluster.read_nodes)

    async def request(self, count: int) -> None:
        """Ask for a cluster that holds so many workers; 0: ask for none any more."""
        await self._run(self._cluster.request, count)

    async def describe_need(self, count: int) -> str | None:
        """Return what so many workers ask for and is free; None if Ray refuses."""
        return await self._run(self._cluster.describe_need, count)

    def close(self) -> None:
        """End the thread once it has done what was asked."""
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., _T], *args: int) -> _T | None:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *args)
        except (ray.exceptions.RayError, RuntimeError):
            _logger.warning("%s failed.", function.__name__, exc_info=True)
            return None
