"""Rounds of blazefl: its own federated averaging, one after another or in a pool.

Client data are batches in memory, or PyTorch's loader of elements as in its examples;
what a pool pickles of them is a name, as its processes are forked.
"""

# pyright: basic, reportMissingImports=false

import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from blazefl.contrib import fedavg
from blazefl.core import IPCMode
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import torch_models
from benchmarks.peers.turns import Task

_CLIENTS: list[Any] = []


class Batches(list[Any]):
    """Batches of a client, where blazefl's examples have a loader."""

    dataset = None


def _load(batches: list[Any]) -> Any:
    """Return a loader that puts the batches together out of their elements."""
    elements = TensorDataset(
        *(torch.cat(column) for column in zip(*batches, strict=True))
    )
    return DataLoader(elements, batch_size=len(batches[0][1]))


class Clients:
    """All clients' batches, as blazefl asks for them."""

    def get_dataloader(self, cid: int, **_: Any) -> Iterable[Any]:
        """Return the batches of a client."""
        return _CLIENTS[cid]

    def set_dataset(self, **_: Any) -> None:
        """Keep what is there."""


class Selector:
    """Makes models, by the name of the workload."""

    def select_model(self, model_name: str) -> Any:
        """Return a model whose weights are yet to be set."""
        return torch_models.build(model_name)


class BlazeFL:
    """A server and a trainer of clients.

    Args:
        task: what to run.
        folder: for what processes give each other.
    """

    def __init__(self, task: Task, folder: pathlib.Path) -> None:
        x, y = task.data()
        for client_x, client_y in zip(x, y, strict=True):
            batches = zip(client_x, client_y, strict=True)
            tensors = [
                (torch.from_numpy(a), torch.from_numpy(b).long()) for a, b in batches
            ]
            _CLIENTS.append(
                _load(tensors) if task.settings["loader"] else Batches(tensors)
            )
        self._initial = torch_models.from_tensorflow(task.initial())
        shared: dict[str, Any] = {
            "model_selector": Selector(),
            "model_name": task.workload,
            "dataset": Clients(),
            "num_clients": len(x),
            "device": "cpu",
            "batch_size": x.shape[2],
            "seed": 0,
        }
        self._server = fedavg.FedAvgBaseServerHandler(
            **shared, global_round=2**31, sample_ratio=1.0
        )
        self._trainer = self._build_trainer(task.settings, folder, shared)

    def _build_trainer(
        self, settings: dict[str, int], folder: pathlib.Path, shared: dict[str, Any]
    ) -> Any:
        shared = {**shared, "epochs": 1, "lr": 0.1}
        if settings["processes"] > 1:
            return fedavg.FedAvgProcessPoolClientTrainer(
                **shared,
                num_parallels=settings["processes"],
                share_dir=folder / "share",
                state_dir=folder / "state",
                ipc_mode=IPCMode.SHARED_MEMORY,
            )
        if settings["pool_threads"] > 1:
            return fedavg.FedAvgThreadPoolClientTrainer(
                **shared, num_parallels=settings["pool_threads"]
            )
        return fedavg.FedAvgBaseClientTrainer(**shared)

    def reset(self) -> None:
        """Go back to the first weights."""
        torch_models.set_weights(self._server.model, self._initial)

    def run_round(self) -> None:
        """Give all clients the weights, and the server theirs."""
        clients = self._server.sample_clients()
        self._trainer.local_process(self._server.downlink_package(), clients)
        for package in self._trainer.uplink_package():
            self._server.load(package)

    def weights(self) -> Sequence[Any]:
        """Return the server's."""
        return torch_models.to_tensorflow(list(self._server.model.parameters()))


def main() -> None:
    """Serve one task."""
    task = Task()
    torch.set_num_threads(task.settings["threads"])
    with tempfile.TemporaryDirectory() as folder:
        task.serve(BlazeFL(task, pathlib.Path(folder)), "blazefl")


if __name__ == "__main__":
    main()
