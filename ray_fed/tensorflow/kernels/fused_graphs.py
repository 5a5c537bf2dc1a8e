"""The graphs of fused work, by content: those without state are shared by threads."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.plan import diagnostics, fused
from ray_fed.plan.fused import Fused
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
from ray_fed.tensorflow.kernels.graph_values import UnfitError
from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel
from ray_fed.tensorflow.kernels.selection_graphs import SelectionGraph
from ray_fed.tensorflow.kernels.server_graphs import ServerGraph
from ray_fed.values.lru_cache import LruCache

_CACHED_GRAPHS = 64
"""Graphs that one executor keeps; one of a small model holds a few MB."""


class FusedGraph(Protocol):
    """The graph of fused work."""

    @property
    def type_signature(self) -> fl.FunctionType:
        """The type of the function that it is."""
        ...

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once, as nothing of it changes."""
        ...

    @property
    def run(self) -> Callable[..., Any]:
        """Runs the graph, and returns its tensors."""
        ...

    def to_plain(self, returned: Any) -> Any:
        """Return what `run` returned as a plain value."""
        ...


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why fused work cannot be one graph.

    Attributes:
        reason: in a few words.
        note: where TensorFlow raised an error.
    """

    reason: str
    note: diagnostics.Interpreted | None = None


class _SharedGraphs:
    """Graphs without state: one for all threads of a process, and for its contexts."""

    def __init__(self) -> None:
        self._graphs: LruCache[bytes, FusedGraph] = LruCache(_CACHED_GRAPHS)
        self._lock = threading.RLock()  # a fold is built of a merge

    def get(self, key: bytes, make: Callable[[], FusedGraph]) -> FusedGraph:
        """Return the graph of a key; make it, and share it, if there is none."""
        with self._lock:  # who else wants it waits, and need not build it too
            found = self._graphs.find(key)
            if found is None:
                found = make()
                if found.may_be_shared:
                    self._graphs.put(key, found)
            return found


_SHARED = _SharedGraphs()


class FusedGraphs:
    """Graphs by content, the least recently used dropped and closed.

    Args:
        device: name of the device to run on; None leaves it to TensorFlow.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        # A refusal by its reason: an error keeps each frame that it was raised through,
        # and with those the arguments of a call.
        self._graphs: LruCache[bytes, FusedGraph | _Refusal]
        self._graphs = LruCache(_CACHED_GRAPHS, _close)

    def get(self, work: Fused) -> FusedGraph:
        """Return the graph of fused work, built when first asked for.

        Raises:
            UnsupportedError: it cannot be one graph; why, in a few words.
            Exception: building the graph found a mistake in ray_fed.
        """
        found = self._graphs.get(work.content, lambda: self._try_build(work))
        if isinstance(found, _Refusal):
            if found.note is not None:
                diagnostics.note([found.note])
            raise errors.UnsupportedError(found.reason)
        return found

    def _try_build(self, work: Fused) -> FusedGraph | _Refusal:
        key = repr(self._device).encode() + work.content
        try:
            return _SHARED.get(key, lambda: self._build(work))
        except (UnfitError, errors.UnsupportedError) as error:
            return _Refusal(str(error))
        except errors.RayFedError as error:
            return _Refusal(diagnostics.first_line(error))
        except Exception as error:  # noqa: BLE001 (TensorFlow refuses with any class)
            note = diagnostics.Interpreted.of(work.label, error)
            return _Refusal(note.reason, note)

    def _build(self, work: Fused) -> FusedGraph:
        match work:
            case fused.PartialMerge():
                return MergeKernel(work.merge, self._device)
            case fused.ServerWork():
                return ServerGraph(work.function, self._device)
            case fused.RoundFinish():
                merge = self._merge(work.merge)
                return ServerGraph(
                    work.computation, self._device, merge, work.num_others
                )
            case fused.KeySelection():
                return SelectionGraph(work.function, self._device)
            case fused.ClientFold():
                merge = None if work.merge is None else self._merge(work.merge)
                return ClientKernel(
                    work.kernel, merge, self._device, one_a_leaf=work.one_a_leaf
                )
            case _:
                raise errors.UnsupportedError(f"no graph of {type(work).__name__}")

    def _merge(self, merge: fused.PartialMerge) -> MergeKernel:
        found: Any = self.get(merge)
        return found

    def close(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()


def _close(graph: FusedGraph | _Refusal) -> None:
    if isinstance(graph, ClientKernel):
        graph.close()
