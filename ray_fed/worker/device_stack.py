"""The executors of one device: a thread of this process has one, and so has an actor.

    DeviceStack (resolves names) -> SequenceExecutor -> EagerTFExecutor

TensorFlow is imported where a stack is made: a coordinator imports this module, but
never loads TensorFlow.
"""

import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import federated_language as fl
from typing_extensions import override

from ray_fed.executors.closure import ResolvedValue
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language import blocks
from ray_fed.values import components, stored
from ray_fed.values.client_references import ClientMember
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker.client_store import ClientStore

if TYPE_CHECKING:
    from ray_fed.executors.eager_tf import EagerTFExecutor

_T = TypeVar("_T")
_CACHED_BLOCKS = 128
"""Computations that one stack keeps parsed: parsing takes as long as small rounds."""

_PACES = 64
"""Graphs whose pace one stack remembers: as many as its executor keeps."""


class Pace:
    """Decides how many clients one call of a graph covers, from what others took.

    The bits do not depend on it.

    The first call, which also sets the graph up, is of one client.
    """

    def __init__(self) -> None:
        self._seconds_a_client: float | None = None

    def count(self, remaining: int, call_s: float) -> int:
        """Return how many of the remaining clients to run in the next call."""
        if self._seconds_a_client is None:
            return min(1, remaining)
        wanted = call_s / max(self._seconds_a_client, 1e-9)
        return max(1, min(remaining, int(min(wanted, remaining))))

    def note(self, count: int, seconds: float) -> None:
        """Take note of what a call took."""
        self._seconds_a_client = seconds / count


class DeviceStack(ReferenceResolvingExecutor):
    """Runs all unplaced work on a device, and holds what its clients have.

    Args:
        eager: runs every graph; owned.
        client_bytes: of clients' data that is kept between rounds.

    Attributes:
        eager: runs every graph.
        clients: their data.
    """

    def __init__(self, eager: "EagerTFExecutor", client_bytes: int) -> None:
        super().__init__(SequenceExecutor(eager))
        self.eager = eager
        self.clients = ClientStore(client_bytes)
        self._paces: LruCache[bytes, Pace] = LruCache(_PACES)
        self._blocks: LruCache[bytes, fl.framework.ComputationBuildingBlock]
        self._blocks = LruCache(_CACHED_BLOCKS)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> ResolvedValue:
        if isinstance(value, ClientMember):
            value = self.clients.read(value)
        if isinstance(value, stored.StoredComponents):
            value = components.join(value.components, fl.to_type(type_spec))
        return await super().create_value(value, type_spec)

    def parse(self, serialised: bytes) -> fl.framework.ComputationBuildingBlock:
        """Return the block of a serialised computation, parsed when first asked for."""
        return self._blocks.get(serialised, lambda: blocks.parse_block(serialised))

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return what puts operations of the thread that enters it on the device."""
        return self.eager.on_device()

    def pace_of(self, content: bytes) -> Pace:
        """Return how fast the kernel of a content has been here."""
        return self._paces.get(content, Pace)

    @override
    def close(self) -> None:
        self.clients.close()
        self._paces.clear()
        self._blocks.clear()
        super().close()


class ThreadedStack(ThreadDelegatingExecutor):
    """A device's stack on a thread of its own, and what is to run there beside it.

    Args:
        stack: owned.
        name: of the thread.
    """

    def __init__(self, stack: DeviceStack, name: str) -> None:
        super().__init__(stack, name, stack.on_device())
        self.stack = stack

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread of the stack, which it may call freely."""
        return await self._thread.run(work)
