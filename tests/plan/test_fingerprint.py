"""What workers are compared by."""

import dataclasses
import importlib.metadata
import platform

import pytest

from ray_fed.plan.fingerprint import (
    Fingerprint,
    Versions,
    WorkerDescription,
    describe_difference,
)

VERSIONS = Versions("3.12", "0.1.0", "2.20.0", "2.3.1", "0.5.3")
FINGERPRINT = Fingerprint("2.20.0", "CPU", "x86_64 avx2", onednn=True, threads=1)


def _worker(versions: Versions, fingerprint: Fingerprint) -> WorkerDescription:
    return WorkerDescription(7, "10.0.0.1", "a1", versions, fingerprint)


def test_versions_are_those_installed() -> None:
    found = Versions.read()

    assert platform.python_version().startswith(found.python + ".")
    assert found.numpy == importlib.metadata.version("numpy")
    assert found.tensorflow is not None  # whichever distribution brought it


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(Versions)]
)
def test_other_version_is_named_with_both_values(field: str) -> None:
    worker = _worker(dataclasses.replace(VERSIONS, **{field: "9.9"}), FINGERPRINT)

    expected = f"{field} is 9.9 where the driver has {getattr(VERSIONS, field)}"
    assert describe_difference(worker, VERSIONS, FINGERPRINT) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensorflow", "2.21.0"),
        ("device", "NVIDIA A10G"),
        ("instruction_set", "aarch64 sve"),
        ("onednn", False),
        ("threads", 4),
    ],
)
def test_other_fingerprint_is_named_with_both_values(field: str, value: object) -> None:
    found = dataclasses.replace(FINGERPRINT, **{field: value})

    told = describe_difference(_worker(VERSIONS, found), VERSIONS, FINGERPRINT)

    usual = getattr(FINGERPRINT, field)
    assert told == f"{field} is {value} where other workers have {usual}"


def test_version_that_is_not_known_is_not_compared() -> None:
    source_tree = dataclasses.replace(VERSIONS, ray_fed=None)

    told = describe_difference(_worker(source_tree, FINGERPRINT), VERSIONS, None)

    assert told is None
