"""Each peer: what it needs, which module runs it, and the settings that are tried."""

import dataclasses
from collections.abc import Mapping

from benchmarks.peers.environments import Environment

_TORCH_PYTHONS = ("3.13", "3.12", "3.11")

_TFF = Environment(
    "tff",
    ("3.11", "3.10"),
    # What 0.87 asks for, but for its jaxlib, 0.4.14, which is gone: 0.4.13 serves.
    (
        "absl-py>=1,<2",
        "attrs~=23.1",
        "cachetools~=5.3",
        "dm-tree==0.1.8",
        "dp-accounting==0.4.3",
        "google-vizier==0.1.11",
        "googleapis-common-protos==1.61.0",
        "grpcio~=1.46",
        "jax==0.4.14",
        "jaxlib==0.4.13",
        "ml-dtypes~=0.2.0",
        "numpy~=1.25",
        "portpicker~=1.6",
        "scipy~=1.9.3",
        "setuptools<81",
        "tensorflow-model-optimization==0.7.5",
        "tensorflow-privacy==0.9.0",
        "tensorflow~=2.14.0",
        "tqdm~=4.64",
        "typing-extensions~=4.5.0",
    ),
    ("tensorflow-federated==0.87.0",),
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or one way to use it.

    Attributes:
        environment: has it installed.
        module: serves its rounds.
        settings: by name, all of them tried; the fastest takes part.
    """

    environment: Environment
    module: str
    settings: Mapping[str, Mapping[str, int]]


def _tff(*, on_worker: bool) -> Peer:
    return Peer(
        _TFF,
        "benchmarks.peers.with_tff",
        {
            "two calls at once": {"calls": 2, "on_worker": on_worker},
            "one call at once": {"calls": 1, "on_worker": on_worker},
            "calls without limit": {"calls": -1, "on_worker": on_worker},
        },
    )


def _pfl(**others: int) -> dict[str, int]:
    return {"processes": 1, "threads": 1, "compile": 0, **others}


def _blazefl(**others: int) -> dict[str, int]:
    return {"processes": 1, "pool_threads": 1, "threads": 1, "loader": 0, **others}


PEERS = {
    "tff": _tff(on_worker=False),
    "tff_on_worker": _tff(on_worker=True),
    "flower": Peer(
        Environment("flower", _TORCH_PYTHONS, ("flwr[simulation]>=1.42", "torch")),
        "benchmarks.peers.with_flower",
        {
            "two processes": {"processes": 2, "threads": 1},
            "one process of two threads": {"processes": 1, "threads": 2},
        },
    ),
    "pfl": Peer(
        Environment("pfl", ("3.11", "3.10"), ("pfl[pytorch]>=0.6",)),
        "benchmarks.peers.with_pfl",
        {
            # First, when nobody loses patience: its first round compiles.
            "two processes, torch.compile": _pfl(processes=2, compile=1),
            "one process": _pfl(),
            "two processes": _pfl(processes=2),
            "one process of two threads": _pfl(threads=2),
        },
    ),
    "blazefl": Peer(
        Environment(
            "blazefl",
            ("3.14t", "3.13t", *_TORCH_PYTHONS[:2]),
            ("blazefl[reproducibility]>=2.0,<2.1", "torch", "tqdm"),
        ),
        "benchmarks.peers.with_blazefl",
        {
            "one after another": _blazefl(),
            "one after another, loaders": _blazefl(loader=1),
            "pool of two threads": _blazefl(pool_threads=2),
            "pool of two processes": _blazefl(processes=2),
            "one after another, two threads in PyTorch": _blazefl(threads=2),
        },
    ),
    "jax": Peer(
        Environment("jax", _TORCH_PYTHONS, ("jax[cpu]>=0.6",)),
        "benchmarks.peers.with_jax",
        {
            f"two devices, {at_once or 'all'} at once": {
                "devices": 2,
                "threads": 1,
                "at_once": at_once,
            }
            for at_once in (1, 5, 25, 0)
        }
        | {"one device of two threads": {"devices": 1, "threads": 2, "at_once": 1}},
    ),
}
"""By the name that --peers takes. TensorFlow Federated twice: given lists of datasets,
or numbers of which its workers make datasets."""
