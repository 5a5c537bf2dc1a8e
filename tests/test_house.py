"""The package's house: few rooms at its root, no two modules of one name, none long."""

import collections
import pathlib

import ray_fed

PACKAGE = pathlib.Path(ray_fed.__file__).parent
MODULES = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def test_few_modules_are_at_the_root() -> None:
    at_root = [path.name for path in MODULES if path.parent == PACKAGE]

    assert 0 < len(at_root) <= 7, at_root


def test_no_two_modules_have_one_name() -> None:
    names = collections.Counter(path.name for path in MODULES)

    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_long() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in MODULES
    }

    assert {path: length for path, length in lengths.items() if length > 300} == {}
