"""Connects this process to a Ray cluster, and checks that it stays connected.

"A Ray" is one running cluster of Ray, also a local one. A context uses the first Ray of
this list that exists, as `ray.init` does:

    1. the Ray that this process is already connected to, for example in a Ray task
    2. the Ray at the address that the caller passed
    3. the Ray at RAY_ADDRESS, which `ray job submit` sets for a job
    4. the Ray that this user's last `ray start` on this machine announced

The list does not contain a Ray that another program started for itself. The address
"auto" finds this Ray, too.

Actor handles and object references belong to one `Job`, a connection to Ray. After
`ray.shutdown`, the next call of Ray's API starts a new Ray, and Ray may end a process
that uses a handle of an earlier job. So code that keeps a handle checks its job first.

Ray has no public names for some of these functions. Only this module and `inventory`
import private names of Ray.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from ray._private import auto_init_hook, services, utils, worker
from ray._private.authentication import authentication_token_setup as token_setup
from ray.util.client import ray as ray_client
from typing_extensions import override

import ray_fed.errors as errors

_HOOK: Any = auto_init_hook
_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 30.0
_AUTO = "auto"
_LOCAL = "local"
_CLIENT_PREFIX = "ray://"
_ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclasses.dataclass(frozen=True)
class RunningRay:
    """A running Ray that this process can join.

    Attributes:
        address: Address of the form host:port or ray://host:port.
        by: Description of how the address was found, or "" if the caller passed it.
        is_automatic: Whether ray_fed searched for the Ray. The process then joins the
            Ray with this user's token.
    """

    address: str
    by: str = ""
    is_automatic: bool = False

    @override
    def __str__(self) -> str:
        return f"the Ray at {self.address}" + (f", {self.by}" if self.by else "")


def find(address: str | None) -> RunningRay | None:
    """Return the running Ray that this process should join, or None if no Ray runs.

    The process must not be connected to Ray. `address` is the user's address, "auto",
    or None. Raises ClusterError if nothing listens at an address that the user named.
    """
    named = address if address not in {None, _AUTO} else None
    by = "" if named else f"named by {_ADDRESS_VARIABLE}"
    named = named or os.environ.get(_ADDRESS_VARIABLE)
    if named == _LOCAL:
        return None
    if named is not None and named not in {"", _AUTO}:
        _check_named(named)
        if not _listens(named):
            raise missing_error(named)
        return RunningRay(named, by)
    ways = [(_announced, "announced by `ray start`")]
    if address == _AUTO:
        ways.append((_running, "found on this machine"))
    for look, by in ways:
        candidate = look()
        if candidate is not None and _listens(candidate):
            return RunningRay(candidate, by, is_automatic=True)
    return None


def join(cluster: RunningRay, **options: Any) -> None:
    """Connect this process to a running Ray, or raise ClusterError.

    `options` are further arguments of `ray.init`.
    """
    if cluster.is_automatic:
        _take_token()
    if not cluster.address.startswith(_CLIENT_PREFIX):
        _check_answer(cluster.address)
    try:
        start_ray(address=cluster.address, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        raise errors.ClusterError(
            f"Expected to join the Ray at `{cluster.address}`, found: {e}"
        ) from None  # Ray's traceback has over a hundred lines and adds nothing
    _mend_client()


def start_ray(**options: Any) -> None:
    """Call `ray.init`, also in a process without a standard error stream."""
    former = cast("Any", sys.stderr)
    if former is None or former.closed:
        # `ray.init` enables Python's faulthandler, which keeps using this file.
        sys.stderr = pathlib.Path(os.devnull).open("w")  # noqa: SIM115
    try:
        ray.init(**options)
    finally:
        sys.stderr = former


def check_connected(address: str | None) -> None:
    """Check that this connected process can use the Ray at `address`.

    Raises ContextStateError if this process was forked from the connected process, or
    if it is connected to another Ray. With None, any Ray is right.
    """
    listener = getattr(connected_worker(), "listener_thread", None)
    if listener is not None and not listener.is_alive():
        raise errors.ContextStateError(
            "Expected a process of its own for Ray, found one that was forked from a"
            " process that uses Ray: start it by `spawn`, as in"
            ' multiprocessing.get_context("spawn"), or use'
            ' Config(backend="local") here.'
        )
    _mend_client()
    if address is None or address in {_AUTO, _LOCAL}:
        return
    joined: str = ray.get_runtime_context().gcs_address
    if address.startswith(_CLIENT_PREFIX):
        is_there = ray_client.is_connected()
    else:
        is_there = services.canonicalize_bootstrap_address(address) == joined
    if not is_there:
        raise errors.ContextStateError(
            f"Expected this process to join the Ray at `{address}`, found it connected"
            f" to the Ray at `{joined}`: call ray.shutdown() first, or pass no address."
        )


def started_here() -> bool:
    """Return whether this process started the Ray that it is connected to.

    This Ray then has no autoscaler and ends with the process, so no node joins it.
    """
    node = cast("Any", worker)._global_node  # noqa: SLF001
    return node is not None and node.is_head()


def connected_worker() -> Any:
    """Return Ray's internal `Worker` object, which has this process's connection."""
    return cast("Any", worker).global_worker


class AutoConnect:
    """Ray's setting by which calls without a connection start a new Ray.

    Threads of Ray Data that still run after `ray.shutdown` would start a new Ray, so
    `datasets` disables this. The setting is global in a process. If several threads
    disable it at the same time, the last thread to finish restores the setting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_disabling = 0
        self._before = True

    @contextlib.contextmanager
    def disabled(self) -> Generator[None]:
        """Make Ray's calls raise if there is no connection, during the `with` block."""
        with self._lock:
            if not self._num_disabling:
                self._before = _HOOK.enable_auto_connect
            _HOOK.enable_auto_connect = False
            self._num_disabling += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_disabling -= 1
                if not self._num_disabling:
                    _HOOK.enable_auto_connect = self._before


auto_connect = AutoConnect()


def _mend_client() -> None:
    # Ray's client (2.60) also sets the result of a cancelled future. This raises in the
    # thread that delivers all results. So its futures are made uncancellable.
    if ray_client.is_connected():
        from ray.util.client.common import ClientObjectRef

        cast("Any", ClientObjectRef).future = _future_of


def _future_of(reference: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def settle(result: Any) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    reference._on_completed(settle)  # noqa: SLF001
    cast("Any", future).object_ref = reference  # keeps the reference alive
    return future


def missing_error(address: str | None) -> errors.ClusterError:
    """Return the error for a missing Ray at `address`, or anywhere with None."""
    where = f"at `{address}`" if address else "to join"
    return errors.ClusterError(
        f"Expected a Ray {where}, found none: start one with"
        " `ray start --head`, or pass its address."
    )


def _announced() -> str | None:
    path = pathlib.Path(cast("Any", utils).get_ray_address_file(None))
    try:
        is_own = path.stat().st_uid == os.geteuid()
    except OSError:
        return None
    return (services.find_bootstrap_address(None) or None) if is_own else None


def _running() -> str | None:
    try:
        return services.canonicalize_bootstrap_address(_AUTO)
    except (ConnectionError, ValueError):
        return None


def _take_token() -> None:
    # `ray.init` does this only if it searched for the Ray itself.
    name = "maybe_enable_token_auth_if_token_available"  # of Ray 2.60 and later
    take: Callable[..., Any] | None = getattr(token_setup, name, None)
    if take is not None:
        # The caller passes the same level to `ray.init`, which runs only later.
        logging.getLogger("ray").setLevel(logging.ERROR)
        take(warn_if_disabled=False)


def _check_answer(address: str) -> None:
    # Without this check, `ray.init` would log retries for 30 s if no Ray answers. The
    # import takes a fifth of a second, which a Ray that starts here does not need.
    import grpc
    from ray._private import grpc_utils
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    messages, stubs = cast("Any", (gcs_service_pb2, gcs_service_pb2_grpc))
    opened: Any = grpc_utils.init_grpc_channel(address)
    with opened as channel:
        stub = stubs.NodeInfoGcsServiceStub(channel)
        try:
            stub.GetClusterId(messages.GetClusterIdRequest(), timeout=_ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            code: Any = cast("Any", error).code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                raise errors.ClusterError(
                    f"Expected the Ray at `{address}` to let this process in, found"
                    " that something listens there and refuses it. `ray start --head`"
                    " turns tokens on: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH"
                    " to a file with the cluster's token, which is in"
                    " ~/.ray/auth_token on its head. For a Ray of your own call"
                    ' ray_fed.init("local").'
                ) from None
            raise errors.ClusterError(
                f"Expected a Ray at `{address}`, found something that does not answer"
                f" as one ({code.name}): pass the address of a Ray, or start one with"
                " `ray start --head`."
            ) from None


def _check_named(address: str) -> None:
    # Ray would try to reach an address without a host or port for half a minute.
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
    # Ray would try for over a minute to connect.
    host, _, port = address.removeprefix(_CLIENT_PREFIX).rpartition(":")
    if not port.isdecimal():
        return True  # Ray may still understand the address
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


_KEPT: list[Any] = []
"""References of calls that were running when this process left Ray. They are never
freed: Ray 2.60 ends the process if a reference is freed while another thread shuts Ray
down."""

_LOOK_UP_S = 1.0
"""Seconds between checks of a call's job. Once a job is over, Ray never answers."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One connection of this process to Ray, from `ray.init` to `ray.shutdown`.

    Attributes:
        session: Ray's name of the session, or "" for a connection by Ray's client.
        number: Ray's id of the job in its session. For Ray's client, the id of the
            connection.
        pid: Id of this process. A forked process does not have the threads of Ray.
    """

    session: str
    number: str
    pid: int

    @classmethod
    def current(cls) -> "Job":
        """Return the job of this process, which must be connected to Ray."""
        if ray_client.is_connected():  # `get_runtime_context` would ask the cluster
            client: Any = ray_client.get_context().client_worker
            return cls("", client._client_id, os.getpid())  # noqa: SLF001
        context = ray.get_runtime_context()
        return cls(context.get_session_name(), context.get_job_id(), os.getpid())

    @property
    def is_current(self) -> bool:
        """Whether this process still has this connection."""
        return (
            self.pid == os.getpid() and ray.is_initialized() and self == self.current()
        )

    async def answer(self, reference: Any) -> Any:
        """Await an object reference, and return its value.

        If the job ends meanwhile, the reference is never freed, see `read_errors`.
        """
        try:
            return await reference
        finally:
            if not self.is_current:
                _KEPT.append(reference)

    def read_errors(self, references: Sequence[Any]) -> None:
        """Keep Ray from printing the errors of calls whose results nobody awaits.

        Ray prints an error that is never read. If the job is over, the references are
        never freed instead, because Ray may end a process that frees them.
        """
        if not self.is_current:
            _KEPT.extend(references)
            return
        for reference in references:
            reference.future().add_done_callback(read_error)

    def check(self) -> None:
        """Raise ContextStateError if Ray was shut down or the process was forked."""
        if not self.is_current:
            raise self._over()

    def _over(self) -> errors.ContextStateError:
        if self.pid != os.getpid():
            return errors.ContextStateError(
                "Expected the process that is connected to Ray, found one that was"
                " forked from it, which Ray does not support: start it by `spawn`, as"
                ' in multiprocessing.get_context("spawn").'
            )
        return errors.ContextStateError(
            "Expected this process to be connected to the same Ray as before, found"
            " that `ray.shutdown` was called. Values in that Ray are lost: call"
            " ray_fed.init again, continue from a saved state, and call"
            " `ClientData.from_ray` again."
        )

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Raise ContextStateError if the job ends before or in the `with` block.

        In the block, this replaces the error that Ray raises.
        """
        self.check()
        try:
            yield
        except (Exception, asyncio.CancelledError):
            if not self.is_current:
                raise self._over() from None
            raise

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Raise ContextStateError in the `with` block as soon as the job is over.

        The check runs each `_LOOK_UP_S`, and cancels the task that entered the block.
        Without it, an await of Ray's answer would never end.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        is_over = False

        def look() -> None:
            nonlocal is_over, timer
            if self.is_current:
                timer = loop.call_later(_LOOK_UP_S, look)
            elif task is not None:
                is_over = task.cancel()

        timer = loop.call_later(_LOOK_UP_S, look)
        try:
            with self.explained():
                yield
        finally:
            if is_over and task is not None:
                task.uncancel()
            timer.cancel()
            task = None  # `look` refers to itself, and would keep the task's result


def read_error(
    future: "concurrent.futures.Future[Any] | asyncio.Future[Any]",
) -> None:
    """Read the error of a done future, so that Ray or asyncio does not print it."""
    if not future.cancelled():
        future.exception()
