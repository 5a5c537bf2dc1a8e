"""What Flower's actors do for a client; they import it by name.

Data are files that each maps into memory, so that no client waits for its own.
"""

# pyright: basic, reportMissingImports=false

import functools
import pathlib
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.peers import torch_models


@functools.cache
def _open(folder: str, workload: str, num_threads: int) -> tuple[Any, Any, Any, Any]:
    """Return data, model and optimizer of this process, made once."""
    torch.set_num_threads(num_threads)
    x, y = (np.load(pathlib.Path(folder) / f"{name}.npy", "r") for name in "xy")
    model = torch_models.build(workload)
    return x, y, model, torch.optim.SGD(model.parameters(), 0.1)


def build_client(folder: str, workload: str, num_threads: int) -> Any:
    """Return what each client does with a message."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y, model, optimizer = _open(folder, workload, num_threads)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        index = int(context.node_config["partition-id"])
        for batch_x, batch_y in zip(x[index], y[index], strict=True):
            optimizer.zero_grad()
            logits = model(torch.tensor(batch_x))
            labels = torch.tensor(batch_y).long()
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": y[index].size}),
            }
        )
        return Message(content=content, reply_to=message)

    return app
