"""The package's house: few rooms at its root."""

import pathlib

import ray_fed

PACKAGE = pathlib.Path(ray_fed.__file__).parent


def test_few_modules_are_at_the_root() -> None:
    at_root = [path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__"]

    assert 0 < len(at_root) <= 7, at_root
