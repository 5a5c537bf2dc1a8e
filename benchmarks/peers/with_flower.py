"""Rounds of Flower's simulation: message API, Ray actors, `FedAvg`, PyTorch on CPUs."""

# pyright: basic, reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers import torch_models
from benchmarks.peers.flower_client import build_client
from benchmarks.peers.turns import Task


class Flower:
    """A server in a simulation that runs.

    Args:
        task: what to run.
        grid: reaches the clients.
    """

    def __init__(self, task: Task, grid: Grid) -> None:
        self._grid = grid
        self._model = torch_models.build(task.workload)
        initial = torch_models.from_tensorflow(task.initial())
        torch_models.set_weights(self._model, initial)
        self._initial = ArrayRecord(self._model.state_dict())
        self._arrays = self._initial

    def reset(self) -> None:
        """Do nothing: each round is given the first weights."""

    def run_round(self) -> None:
        """Run one round of all clients."""
        strategy = FedAvg(fraction_evaluate=0.0)
        result = strategy.start(self._grid, self._initial, num_rounds=1)
        self._arrays = result.arrays

    def weights(self) -> Sequence[Any]:
        """Return those of the last round."""
        self._model.load_state_dict(self._arrays.to_torch_state_dict())
        return torch_models.to_tensorflow(list(self._model.parameters()))


def main() -> None:
    """Serve one task from within a simulation."""
    task = Task()
    processes, threads = task.settings["processes"], task.settings["threads"]
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        task.serve(Flower(task, grid), "flwr")

    run_simulation(
        server,
        build_client(str(task.folder), task.workload, threads),
        num_supernodes=len(task.data("r")[0]),
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": processes},
        },
    )


if __name__ == "__main__":
    main()
