"""Packages that only some parts of learning need: imported there, or told."""

import importlib
from typing import Any

import ray_fed.errors as errors


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Return a module of an extra of ray_fed.

    Args:
        module: its name.
        extra: that brings it.
        purpose: what needs it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise errors.UserError(
            f"Expected the package `{package}`, which {purpose} needs, found it"
            f' missing: pip install "ray-fed[{extra}]".'
        ) from error
