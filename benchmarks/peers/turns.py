"""A peer's side of taking turns: one command a line, one answer a line.

    {"do": "round"}                  {"seconds": 0.5}
    {"do": "weights", "path": P}     {}, and P holds the weights after the last round

What the peer itself prints goes to the standard error.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Protocol

import numpy as np


class Peer(Protocol):
    """A round of a peer, each from the same weights."""

    def reset(self) -> None:
        """Go back to the weights that every round starts with; not timed."""
        ...

    def run_round(self) -> None:
        """Train all clients and average their weights; timed."""
        ...

    def weights(self) -> Sequence[Any]:
        """Return the weights after the last round, in TensorFlow's layout."""
        ...


class Task:
    """What the command line says: the work, and the peer's own settings.

    Attributes:
        workload: its name.
        folder: has the data.
        settings: of the peer, as in the table of `variants`.
    """

    def __init__(self) -> None:
        told = json.loads(sys.argv[1])
        self.workload: str = told["workload"]
        self.folder = pathlib.Path(told["folder"])
        self.settings: dict[str, int] = told["settings"]
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def data(self, mmap_mode: Any = None) -> tuple[Any, Any]:
        """Return f32[clients, steps, batch, 784] and i32[clients, steps, batch]."""
        return (
            np.load(self.folder / "x.npy", mmap_mode),
            np.load(self.folder / "y.npy", mmap_mode),
        )

    def initial(self) -> list[Any]:
        """Return the weights that every round starts with, in TensorFlow's layout."""
        with np.load(self.folder / "initial.npz") as held:
            return [held[name] for name in held.files]

    def serve(self, peer: Peer, package: str) -> None:
        """Do what the standard input says until it ends."""
        self._answer(version=metadata.version(package))
        for line in sys.stdin:
            told = json.loads(line)
            if told["do"] == "weights":
                np.savez(told["path"], *peer.weights())
                self._answer()
                continue
            peer.reset()
            started = time.perf_counter()
            peer.run_round()
            self._answer(seconds=time.perf_counter() - started)

    def _answer(self, **told: Any) -> None:
        print(json.dumps(told), file=self._answers, flush=True)
