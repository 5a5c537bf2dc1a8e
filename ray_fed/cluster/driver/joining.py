"""Joins a Ray that is running, or says why it cannot: there is none, or it refuses."""

import os
import socket
from typing import Any, cast

import ray
import ray.exceptions
from ray._private import services  # no public name for where "auto" leads
from ray._private import worker as ray_worker  # no public name for who started it

import ray_fed.errors as errors

_CONNECT_TIMEOUT_S = 5.0
_AUTO = "auto"
_CLIENT_PREFIX = "ray://"
_ADDRESS_VARIABLE = "RAY_ADDRESS"


def join(address: str, **options: Any) -> bool:
    """Connect this process to a Ray that is running.

    Args:
        address: "auto", host:port or ray://host:port.
        **options: of `ray.init`.

    Returns:
        False at once where there is no Ray at the address.

    Raises:
        ClusterError: something listens there, and this process could not join it; or
            the address names no host, or no port of Ray's client.
    """
    found = _find(address)
    if found is not None:
        _check_named(found)
    if found is None or not _listens(found):
        return False
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise _refused(found) from error
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise errors.ClusterError(
            f"Expected to join the Ray at `{found}`, found: {error}"
        ) from error
    return True


def check_address(address: object) -> None:
    """Raise unless an address is text, or None.

    Raises:
        ConfigError: it is something else.
    """
    if address is not None and not isinstance(address, str):
        raise errors.ConfigError(
            'Expected an `address` of Ray as text, such as "local", "auto" or'
            f' "host:6379", found `{errors.describe(address)}`: pass settings as'
            " `config`."
        )


def started_here() -> bool:
    """Return whether this process started the Ray that it is connected to.

    No node comes to such a Ray, which has no autoscaler and ends with the process.
    """
    node = cast("Any", ray_worker)._global_node  # noqa: SLF001
    return node is not None and node.is_head()


def missing_error(address: str) -> errors.ClusterError:
    """Return the error that there is no Ray at an address."""
    return errors.ClusterError(
        f"Expected a Ray at `{address}`, found none: start one with"
        " `ray start --head`, or pass its address."
    )


def _refused(found: str) -> errors.ClusterError:
    return errors.ClusterError(
        f"Expected the Ray at `{found}` to let this process in, found that something"
        " listens there and refuses it. `ray start --head` turns tokens on: set"
        " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's"
        " token, which is in ~/.ray/auth_token on its head. For a Ray of your own call"
        ' ray_fed.init("local").'
    )


def _find(address: str) -> str | None:
    """Return where an address leads by Ray's own rules; None where it leads nowhere."""
    if address == _AUTO:
        address = os.environ.get(_ADDRESS_VARIABLE) or address
    if address != _AUTO:
        return address
    try:
        return services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError):
        return None


def _check_named(address: str) -> None:
    """Raise unless an address names what Ray would try for half a minute to reach."""
    rest = address.removeprefix(_CLIENT_PREFIX)
    host, _, port = rest.strip().rpartition(":")
    is_named = rest.strip() and not rest.startswith(":")
    if address.startswith(_CLIENT_PREFIX):
        is_named = host and port.isdecimal()
    if not is_named:
        raise errors.ClusterError(
            f"Expected the host and the port of a Ray, found `{address}`: name them, as"
            " in `host:6379`, or `ray://host:10001` for Ray's client."
        )


def _listens(address: str) -> bool:
    """Return whether a connection can be made; Ray itself tries for over a minute."""
    host, _, port = address.removeprefix(_CLIENT_PREFIX).rpartition(":")
    if not port.isdecimal():
        return True  # a form that Ray knows how to read
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
