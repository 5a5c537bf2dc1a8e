"""Graphs that a worker has built, by what they compute."""

import threading
from collections.abc import Callable
from typing import Any, cast

from ray_fed.plan import plans
from ray_fed.values.lru_cache import LruCache

_CACHED_KERNELS = 64
"""Graphs that one worker keeps; one of a small model holds a few MB."""


class Pace:
    """Decides how many clients a call covers; the bits do not depend on it.

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


class _SharedKernels:
    """Graphs without state: one for all threads of a process, and for its contexts."""

    def __init__(self) -> None:
        self._kernels: LruCache[bytes, Any] = LruCache(_CACHED_KERNELS)
        self._lock = threading.Lock()

    def get(self, key: bytes, make: Callable[[], Any]) -> Any:
        """Return the graph of a key; make it, and share it, if there is none."""
        with self._lock:  # who else wants it waits, and need not build it too
            found = self._kernels.find(key)
            if found is None:
                found = make()
                if found.may_be_shared:
                    self._kernels.put(key, found)
            return found


_SHARED = _SharedKernels()


class KernelCache:
    """Kernels by content, the least recently used dropped and closed.

    Args:
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        device: the same.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._kernels: LruCache[bytes, Any] = LruCache(_CACHED_KERNELS, _close)

    def load(
        self, kernel: plans.Kernel, merge: Any, *, one_a_leaf: bool = False
    ) -> "tuple[Any, Pace] | plans.NoKernel":
        """Return a kernel's graph and its pace, built when first asked for.

        Args:
            kernel: what the compiler planned.
            merge: what `load_merge` returned for its partials.
            one_a_leaf: whether each of the leaves that are to run has one client.
        """
        graph = None if isinstance(merge, plans.NoKernel) else merge
        content = kernel.content + (b"" if graph is None else graph.content)
        content += b"one" if one_a_leaf else b""

        def build() -> Any:
            from ray_fed.tensorflow.kernels.client_kernel import ClientKernel

            def make() -> ClientKernel:
                return ClientKernel(kernel, graph, self.device, one_a_leaf=one_a_leaf)

            return self._share(content, make), Pace()

        return self._load(content, build)

    def load_merge(self, merge: bytes) -> "Any | plans.NoKernel":
        """Return the graph of a serialised merge, as `load` does that of a kernel."""

        def build() -> Any:
            from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel

            return MergeKernel(merge, self.device)

        key = b"merge" + merge
        return self._load(key, lambda: self._share(key, build))

    def load_server(self, function: bytes) -> "Any | plans.NoKernel":
        """Return the graph of a serialised function of values at the server."""

        def build() -> Any:
            from ray_fed.tensorflow.kernels.server_graphs import ServerGraph

            return ServerGraph(function, self.device)

        key = b"server" + function
        return self._load(key, lambda: self._share(key, build))

    def load_finish(self, finish: plans.Finish, num_others: int) -> Any:
        """Return the graph of a finish, as `load` does that of a kernel.

        Args:
            finish: with a merge.
            num_others: how many parts its computation takes before what is merged.
        """
        merge = self.load_merge(cast("bytes", finish.merge))
        if isinstance(merge, plans.NoKernel):
            return merge

        def build() -> Any:
            from ray_fed.tensorflow.kernels.server_graphs import ServerGraph

            computation = finish.computation
            return ServerGraph(computation, self.device, merge, num_others)

        key = b"%b %d " % (merge.content, num_others) + (finish.computation or b"")
        return self._load(key, lambda: self._share(key, build))

    def _share(self, key: bytes, make: Callable[[], Any]) -> Any:
        return _SHARED.get(repr(self.device).encode() + key, make)

    def _load(self, key: bytes, build: Callable[[], Any]) -> Any:
        return self._kernels.get(key, lambda: self._build(build))

    def _build(self, build: Callable[[], Any]) -> Any:
        from ray_fed.tensorflow.kernels.client_tensors import UnfitError

        try:
            return build()
        except UnfitError as error:
            return plans.NoKernel(str(error))
        except Exception as error:  # noqa: BLE001 (what TensorFlow refuses to trace)
            first_line = str(error).partition("\n")[0]
            return plans.NoKernel(f"{type(error).__name__}: {first_line}")

    def close(self) -> None:
        """Drop all kernels."""
        self._kernels.clear()


def _close(loaded: Any) -> None:
    if isinstance(loaded, tuple):
        loaded[0].close()
