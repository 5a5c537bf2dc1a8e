"""What a context on Ray refuses before there is any Ray."""

from typing import Any

import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.framework import RayExecutionContext, RayExecutorFactory


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


def test_pool_of_something_else_is_refused() -> None:
    other: Any = 3

    with pytest.raises(errors.ValueMismatchError, match="`pool_of` to be of the class"):
        RayExecutionContext(pool_of=other)


@pytest.mark.parametrize("config", [{}, {"backend": "ray"}, 0])
@pytest.mark.parametrize(
    "build",
    [ray_fed.init, ray_fed.create_context, RayExecutionContext, RayExecutorFactory],
)
def test_settings_that_are_no_config_are_refused(build: Any, config: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"Expected a ray_fed\.Config, found"):
        build(config=config)


@pytest.mark.parametrize("address", [3, True, ["auto"], ray_fed.Config(), b"auto"])
@pytest.mark.parametrize(
    "build", [ray_fed.init, RayExecutionContext, RayExecutorFactory]
)
def test_address_that_is_no_text_is_refused(build: Any, address: Any) -> None:
    with pytest.raises(errors.ConfigError, match="Expected an `address` of Ray"):
        build(address=address)
