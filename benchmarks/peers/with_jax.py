"""Rounds in plain JAX, as one would write them by hand: `vmap` over clients, `scan`.

Not a library for federated learning: the strongest loop of one's own, compiled whole.
Each device, a thread of the CPU, goes through its share of clients, some at once.
"""

# pyright: basic, reportMissingImports=false

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.turns import Task

_LEARNING_RATE = 0.1


def _logits(workload: str, weights: Sequence[Any], x: Any) -> Any:
    import jax
    from jax import lax

    relu = jax.nn.relu
    if workload == "cnn":
        x = x.reshape(-1, 28, 28, 1)
        for index in (0, 2):
            layout = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, weights[index], (1, 1), "VALID", dimension_numbers=layout
            )
            x = relu(x + weights[index + 1])
        window = (1, 2, 2, 1)
        x = lax.reduce_window(x, -np.inf, lax.max, window, window, "VALID")
        x, weights = x.reshape(len(x), -1), weights[4:]
    *hidden, last = zip(weights[::2], weights[1::2], strict=True)
    for kernel, bias in hidden:
        x = relu(x @ kernel + bias)
    return x @ last[0] + last[1]


class Jax:
    """A compiled round over data on its devices.

    Args:
        task: what to run.
    """

    def __init__(self, task: Task) -> None:
        import jax

        num_devices, at_once = task.settings["devices"], task.settings["at_once"]
        x, y = task.data()
        num_clients = len(x)
        at_once = at_once or num_clients // num_devices
        grouped = (num_clients // at_once, at_once)
        if np.prod(grouped) != num_clients or grouped[0] % num_devices:
            raise SystemExit(
                f"{num_clients} clients are no whole groups of {at_once} for each of"
                f" {num_devices} devices"
            )

        def loss(weights: Any, x: Any, y: Any) -> Any:
            scores = jax.nn.log_softmax(_logits(task.workload, weights, x))
            return -jax.numpy.take_along_axis(scores, y[:, None], 1).mean()

        def step(weights: Any, batch: Any) -> Any:
            gradients = jax.grad(loss)(weights, *batch)
            pairs = zip(weights, gradients, strict=True)
            return [w - _LEARNING_RATE * g for w, g in pairs], None

        def train(weights: Any, batches: Any) -> Any:
            return jax.lax.scan(step, weights, batches)[0]

        def add(sums: Any, group: Any, weights: Any) -> Any:
            trained = jax.vmap(train, (None, 0))(weights, group)
            return [a + b.sum(0) for a, b in zip(sums, trained, strict=True)], None

        def run(weights: Any, *data: Any) -> Any:
            zeros = [jax.numpy.zeros_like(each) for each in weights]
            sums, _ = jax.lax.scan(lambda s, g: add(s, g, weights), zeros, data)
            sums = jax.lax.psum(sums, "devices")
            return [each / num_clients for each in sums]  # all have as many examples

        mesh = jax.make_mesh((num_devices,), ("devices",))
        whole, shared = (jax.sharding.PartitionSpec(*p) for p in ((), ("devices",)))
        sharded = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(whole, shared, shared),
            out_specs=whole,
            check_vma=False,
        )
        self._run = jax.jit(sharded)
        placed = jax.sharding.NamedSharding(mesh, shared)
        data = (array.reshape(*grouped, *array.shape[1:]) for array in (x, y))
        self._data = [jax.device_put(array, placed) for array in data]
        self._initial = [jax.numpy.asarray(each) for each in task.initial()]
        self._weights: list[Any] = []

    def reset(self) -> None:
        """Each round starts with the first weights anyway."""

    def run_round(self) -> None:
        """Train all clients; the mean of their weights is here afterwards."""
        means = self._run(self._initial, *self._data)
        self._weights = [np.asarray(each) for each in means]

    def weights(self) -> Sequence[Any]:
        """Return the mean."""
        return self._weights


def main() -> None:
    """Serve one task."""
    task = Task()
    flags = f"--xla_force_host_platform_device_count={task.settings['devices']}"
    if task.settings["threads"] == 1:
        flags += " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = flags
    os.environ["JAX_PLATFORMS"] = "cpu"
    task.serve(Jax(task), "jax")


if __name__ == "__main__":
    main()
