"""Whether a Ray is there, and what is said of one that refuses this process."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import ray_fed
from ray_fed import errors
from ray_fed.cluster.driver import inventory, joining

NOBODY = "127.0.0.1:1"
"""An address at which nothing listens."""

Use = Callable[[str | None], object]


def join_as_init(address: str | None) -> object:
    return ray_fed.create_context(ray_fed.Config(), address=address)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of a port that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def raises(error: Exception) -> Callable[..., None]:
    def init(**_: Any) -> None:
        raise error

    return init


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("use", [inventory.read_inventory, join_as_init])
@pytest.mark.parametrize("named", [True, False], ids=["address", "auto"])
def test_ray_that_refuses_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, listener: str, use: Use, named: bool
) -> None:
    monkeypatch.setattr(ray, "init", raises(ConnectionError("Failed to connect.")))
    monkeypatch.setenv("RAY_ADDRESS", listener)

    with pytest.raises(
        errors.ClusterError, match=r"refuses it.*RAY_AUTH_TOKEN"
    ) as info:
        use(listener if named else None)

    assert f"`{listener}`" in str(info.value)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_reason_of_another_kind_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, listener: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(ray, "init", raises(error("Version mismatch: 2.1")))

    with pytest.raises(errors.ClusterError, match=r"found: Version mismatch: 2\.1"):
        inventory.read_inventory(listener)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("address", [NOBODY, f"ray://{NOBODY}"])
@pytest.mark.parametrize("use", [inventory.read_inventory, join_as_init])
def test_nothing_that_listens_is_no_ray(use: Use, address: str) -> None:
    with pytest.raises(errors.ClusterError, match="found none: start one"):
        use(address)


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize(
    "address",
    ["ray://", "ray:// ", "ray://:10001", "ray://localhost", "ray://h:port", " ", ":1"],
)
@pytest.mark.parametrize("use", [inventory.read_inventory, join_as_init])
def test_address_without_a_host_or_port_is_refused(use: Use, address: str) -> None:
    with pytest.raises(errors.ClusterError, match="Expected the host and the port"):
        use(address)


@pytest.mark.usefixtures("unconnected")
def test_auto_leads_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setenv("RAY_ADDRESS", listener)
    is_there = joining.join("auto")
    monkeypatch.setenv("RAY_ADDRESS", NOBODY)

    assert is_there
    assert not joining.join("auto")
