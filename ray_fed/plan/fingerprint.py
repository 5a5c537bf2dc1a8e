"""Compares the properties of workers that decide the bits of results.

Versions are read from the metadata of installed packages, so a driver knows its own
versions without importing the packages.
"""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterator

from typing_extensions import override

_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
"""Names of distributions that provide the package `tensorflow`."""


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions that must agree between a driver and its workers.

    `python` is the major and minor version of Python. None is an unknown version.
    """

    python: str
    ray_fed: str | None
    tensorflow: str | None
    numpy: str | None
    federated_language: str | None

    @classmethod
    def read(cls) -> "Versions":
        """Return the versions of this process, from the metadata of its packages."""
        return cls(
            python=".".join(platform.python_version_tuple()[:2]),
            ray_fed=_version_of("ray-fed"),
            tensorflow=_version_of(*_TENSORFLOW),
            numpy=_version_of("numpy"),
            federated_language=_version_of("federated-language"),
        )


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that decides the bits of results, except settings and arguments.

    Attributes:
        tensorflow: Version of TensorFlow.
        device: "CPU", or the kind of GPU.
        instruction_set: Processor features by which TensorFlow selects its code.
        onednn: Whether TensorFlow uses oneDNN.
        threads: Number of TensorFlow threads of one executor.
    """

    tensorflow: str
    device: str
    instruction_set: str
    onednn: bool
    threads: int

    @override
    def __str__(self) -> str:
        onednn = "with" if self.onednn else "without"
        return (
            f"TensorFlow {self.tensorflow} {onednn} oneDNN on {self.device}"
            f" ({self.instruction_set}), threads {self.threads}"
        )


@dataclasses.dataclass(frozen=True)
class WorkerDescription:
    """The description of itself that a worker returns when it is ready.

    Attributes:
        pid: Process ID of the worker.
        address: Address of its machine.
        node: Ray's ID of its node.
        versions: Versions of its installed packages.
        fingerprint: Fingerprint of its results.
        missing: A sentence about a GPU that the worker has but cannot use, or "".
    """

    pid: int
    address: str
    node: str
    versions: Versions
    fingerprint: Fingerprint
    missing: str = ""


def describe_difference(
    worker: WorkerDescription, driver: Versions, fingerprint: Fingerprint | None
) -> str | None:
    """Describe how a worker differs from the driver and from the other workers.

    The text names each differing property with both values. It is None if there are no
    differences. `fingerprint` belongs to the other workers, or is None without others.
    """
    differences = [
        f"{name} is {theirs} where the driver has {ours}"
        for name, theirs, ours in _differences(worker.versions, driver)
    ]
    if fingerprint is not None:
        differences += [
            f"{name} is {theirs} where other workers have {ours}"
            for name, theirs, ours in _differences(worker.fingerprint, fingerprint)
        ]
    return "; ".join(differences) or None


def _differences(
    left: Versions | Fingerprint, right: Versions | Fingerprint
) -> Iterator[tuple[str, object, object]]:
    for field in dataclasses.fields(left):
        actual, expected = getattr(left, field.name), getattr(right, field.name)
        if None not in {actual, expected} and actual != expected:
            yield field.name, actual, expected


def _version_of(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
