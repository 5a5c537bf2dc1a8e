"""What a context on Ray refuses before there is any Ray."""

from typing import Any

import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.framework import RayExecutionContext


def test_local_backend_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match='found backend="local"'):
        RayExecutionContext(ray_fed.Config(backend="local"))


@pytest.mark.parametrize(
    "given", [(ray_fed.Config(),), (None, "auto")], ids=["config", "address"]
)
def test_settings_beside_a_pool_are_refused(given: tuple[Any, ...]) -> None:
    other: Any = object()

    with pytest.raises(errors.ConfigError, match="beside `pool_of`"):
        RayExecutionContext(*given, pool_of=other)
