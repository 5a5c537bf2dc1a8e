"""What a worker is, as far as results depend on it: plain data, and how two differ.

Versions are read from what is installed, so that a driver knows its own without
loading any of it.
"""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterator

from typing_extensions import override

_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
"""Distributions that bring the package, as far as there are many of."""


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions that must agree between a driver and its workers; None: not known.

    Attributes:
        python: major and minor.
        ray_fed: of the distribution.
        tensorflow: of the distribution.
        numpy: of the distribution.
        federated_language: of the distribution.
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
    """All that decides the bits of results, beside settings, seed and arguments.

    Attributes:
        tensorflow: its version.
        device: "CPU", or the kind of GPU.
        instruction_set: of the processor, as far as kernels choose by it.
        onednn: whether TensorFlow uses oneDNN.
        threads: of TensorFlow, of one executor.
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
    """What a worker says of itself once it is ready.

    Attributes:
        pid: its process.
        address: of its machine.
        node: Ray's id of its node.
        versions: of what it has installed.
        fingerprint: of its results.
        missing: the devices that it was given and cannot use, in words; empty: none.
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

    Args:
        worker: the worker.
        driver: the driver's versions.
        fingerprint: of the other workers; None where there are none.

    Returns:
        Each field with both its values; None where there is no difference.
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
