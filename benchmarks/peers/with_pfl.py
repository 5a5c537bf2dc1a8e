"""Rounds of pfl: processes of its own kind, `FederatedAveraging`, PyTorch on CPUs.

pfl's documentation distributes users over processes that run the same script, which
find each other by PFL_WORKER_ADDRESSES; the first one starts the others here.
"""

# pyright: basic, reportMissingImports=false, reportUninitializedInstanceVariable=false

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.turns import Task


def _start_others(num_processes: int) -> list[Any]:
    """Start the processes after the first, if this is the first."""
    if num_processes == 1 or "PFL_WORKER_RANK" in os.environ:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"  # only the first one's is ever used
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * num_processes)
    os.environ["PFL_WORKER_RANK"] = "0"
    command = [sys.executable, "-m", "benchmarks.peers.with_pfl", sys.argv[1]]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, "PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1, num_processes)
    ]


class Pfl:
    """One process of them.

    Args:
        task: what to run.
        others: processes that go through every round with this one.
    """

    def __init__(self, task: Task, others: Sequence[Any]) -> None:
        import torch
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        from benchmarks.peers import torch_models

        self._models = torch_models
        self._others = others
        self._rounds = 0
        x, y = task.data()
        num_clients, _, batch_size, _ = x.shape
        users = [
            Dataset(
                (
                    torch.from_numpy(x[index].reshape(-1, 784)),
                    torch.from_numpy(y[index].reshape(-1)).long(),
                ),
                user_id=str(index),
            )
            for index in range(num_clients)
        ]
        self._num_clients = num_clients
        self._module = module = torch_models.build(task.workload)
        # pfl's own `use_torch_compile` leaves calls inside of a user's `loss` alone.
        called = torch.compile(module) if task.settings["compile"] else module
        module.loss = lambda x, y: torch.nn.functional.cross_entropy(called(x), y)
        module.metrics = lambda *_: {}
        self._initial = torch_models.from_tensorflow(task.initial())
        self._model = PyTorchModel(
            module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)
        )
        sampler = get_user_sampler("minimize_reuse", list(range(num_clients)))
        data = FederatedDataset(users.__getitem__, sampler)
        self._backend = SimulatedBackend(
            data, data, postprocessors=[WeightByDatapoints()]
        )
        self._algorithm = FederatedAveraging()
        self._training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.1, local_batch_size=batch_size
        )

    def reset(self) -> None:
        """Go back to the first weights, in all processes."""
        for other in self._others:
            print('{"do": "round"}', file=other.stdin, flush=True)
        self._models.set_weights(self._module, self._initial)

    def run_round(self) -> None:
        """Go one iteration on."""
        from pfl.algorithm.base import NNAlgorithmParams

        self._rounds += 1
        params = NNAlgorithmParams(
            central_num_iterations=self._rounds,
            evaluation_frequency=sys.maxsize,
            train_cohort_size=self._num_clients,
            val_cohort_size=None,
        )
        self._algorithm.run(
            params,
            self._backend,
            self._model,
            self._training,
            send_metrics_to_platform=False,
        )

    def weights(self) -> Sequence[Any]:
        """Return the model's."""
        return self._models.to_tensorflow(list(self._module.parameters()))


def main() -> None:
    """Serve one task."""
    task = Task()
    others = _start_others(task.settings["processes"])

    import torch

    torch.set_num_threads(task.settings["threads"])
    try:
        task.serve(Pfl(task, others), "pfl")
    finally:
        for other in others:
            other.stdin.close()
            other.wait(60)


if __name__ == "__main__":
    main()
