"""Which Ray a context is on, and whether this process is still connected to it.

The rule is that of `ray.init`, in this order:

    1. the Ray that this process is connected to already: a worker's, say
    2. an address that is given
    3. RAY_ADDRESS, which `ray job submit` sets for a job
    4. what this user's last `ray start` on this machine announced

A Ray that another program started for itself is none of these. "auto" goes on to it.

Handles and references belong to a `Job` of Ray. Ray starts another Ray by itself for a
call that comes once it is shut down, and may end a process that calls an actor of
another session. So what calls later, or keeps a handle for long, asks its job first.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from ray._common import utils as ray_utils  # no public name for what `ray start` writes
from ray._private import services  # no public name for where "auto" leads
from ray._private import worker as ray_worker  # no public name for who started it
from ray._private.authentication import authentication_token_setup as token_setup
from ray.util.client import ray as ray_client
from typing_extensions import override

import ray_fed.errors as errors

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 30.0
_AUTO = "auto"
_LOCAL = "local"
_CLIENT_PREFIX = "ray://"
_ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclasses.dataclass(frozen=True)
class RunningRay:
    """A Ray to join.

    Attributes:
        address: host:port or ray://host:port.
        by: who named it, in words; empty: the caller.
        is_automatic: whether it was looked for, so that Ray takes this user's token.
    """

    address: str
    by: str = ""
    is_automatic: bool = False

    @override
    def __str__(self) -> str:
        return f"the Ray at {self.address}" + (f", {self.by}" if self.by else "")


def find(address: str | None) -> RunningRay | None:
    """Return the Ray that is to be joined, in a process that is connected to none.

    Args:
        address: host:port, ray://host:port, "auto" or None.

    Returns:
        None where the rules lead to none, or what they announce does not run.

    Raises:
        ClusterError: nothing listens at an address that was named, or it names no host,
            or no port of Ray's client.
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
    """Connect this process to a Ray that is running.

    Args:
        cluster: what `find` returned.
        **options: of `ray.init`.

    Raises:
        ClusterError: this process could not join it.
    """
    if cluster.is_automatic:
        _take_token()
    if not cluster.address.startswith(_CLIENT_PREFIX):
        _check_answer(cluster.address)
    try:
        ray.init(address=cluster.address, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        raise errors.ClusterError(
            f"Expected to join the Ray at `{cluster.address}`, found: {e}"
        ) from None  # Ray's own frames, over a hundred lines of them, say no more
    _mend_client()


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


def check_connected(address: str | None) -> None:
    """Raise unless the Ray that this process is connected to will do.

    Raises:
        ContextStateError: this process was forked from the one that is connected, or
            is connected to another Ray than that of an address.
    """
    worker = cast("Any", ray_worker).global_worker
    listener = getattr(worker, "listener_thread", None)
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
            f" to the one at `{joined}`: call ray.shutdown() first, or pass no address."
        )


def started_here() -> bool:
    """Return whether this process started the Ray that it is connected to.

    No node comes to such a Ray, which has no autoscaler and ends with the process.
    """
    node = cast("Any", ray_worker)._global_node  # noqa: SLF001
    return node is not None and node.is_head()


def _mend_client() -> None:
    """Have nobody cancel what Ray's client waits for, where that is how it is joined.

    Ray 2.60 sets the result of a future that was cancelled, too. That fails, with a
    traceback for each, in the thread that brings the results of all calls.
    """
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
    cast("Any", future).object_ref = reference  # which lives until then
    return future


def missing_error(address: str | None) -> errors.ClusterError:
    """Return the error that there is no Ray at an address, or none to join."""
    where = f"at `{address}`" if address else "to join"
    return errors.ClusterError(
        f"Expected a Ray {where}, found none: start one with"
        " `ray start --head`, or pass its address."
    )


def _announced() -> str | None:
    """Return the address that the last `ray start` of this user announced."""
    path = pathlib.Path(ray_utils.get_ray_address_file(None))
    try:
        is_own = path.stat().st_uid == os.geteuid()
    except OSError:
        return None
    return (services.find_bootstrap_address(None) or None) if is_own else None


def _running() -> str | None:
    """Return the address of any Ray of this machine, by Ray's own rule for "auto"."""
    try:
        return services.canonicalize_bootstrap_address(_AUTO)
    except (ConnectionError, ValueError):
        return None


def _take_token() -> None:
    """Do what `ray.init` does before it joins a Ray that it found: take a token."""
    name = "maybe_enable_token_auth_if_token_available"  # of Ray 2.60 and later
    take: Callable[..., Any] | None = getattr(token_setup, name, None)
    if take is not None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` will be told
        take(warn_if_disabled=False)


def _check_answer(address: str) -> None:
    """Raise unless a Ray answers: `ray.init` tries for half a minute, line by line."""
    # Here: it takes a fifth of a second, which a Ray of one's own has no use for.
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


_KEPT: list[Any] = []
"""References of calls that were under way as this process left Ray, for good: Ray 2.60
ends the process where one is dropped while another thread shuts Ray down."""

_LOOK_UP_S = 1.0
"""How often a call looks whether its job is over: Ray never answers it then."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One connection of this process to Ray.

    Attributes:
        session: Ray's name of it; each session counts its jobs from one.
        number: of the job in its session, or the name of a connection by Ray's client.
        pid: of the process; threads of Ray do not follow into one that is forked.
    """

    session: str
    number: str
    pid: int

    @classmethod
    def current(cls) -> "Job":
        """Return the one that this process is of; Ray is initialised."""
        if ray_client.is_connected():  # asks the cluster whatever is asked of it
            client: Any = ray_client.get_context().client_worker
            return cls("", client._client_id, os.getpid())  # noqa: SLF001
        context = ray.get_runtime_context()
        return cls(context.get_session_name(), context.get_job_id(), os.getpid())

    @property
    def is_current(self) -> bool:
        """Whether this process is still of it."""
        return (
            self.pid == os.getpid() and ray.is_initialized() and self == self.current()
        )

    async def answer(self, reference: Any) -> Any:
        """Return what a call returns; its reference outlives Ray where that ends."""
        try:
            return await reference
        finally:
            if not self.is_current:
                _KEPT.append(reference)

    def read_errors(self, references: Sequence[Any]) -> None:
        """Read errors of calls that nobody waits for: Ray prints what nobody read.

        Args:
            references: to what they return; kept once the job is over.
        """
        if not self.is_current:
            _KEPT.extend(references)
            return
        for reference in references:
            reference.future().add_done_callback(read_error)

    def check(self) -> None:
        """Raise unless this process is still of it.

        Raises:
            ContextStateError: Ray was shut down, or the process was forked.
        """
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
            "Expected the Ray that this was made on, found that this process has left"
            " it: `ray.shutdown` was called. Call ray_fed.init again; what was stored"
            " there is gone, so go on from state that was saved, and make clients of"
            " `ClientData.from_ray` anew."
        )

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Raise why, in place of what Ray says, once the job is over.

        Raises:
            ContextStateError: the job is over, now or by the time that something fails.
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
        """End what the current task awaits inside, once the job is over.

        Raises:
            ContextStateError: the job is over, now or before the end.
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
            task = None  # `look` refers to itself: it is to hold no result of the task


def read_error(
    future: "concurrent.futures.Future[Any] | asyncio.Future[Any]",
) -> None:
    """Read the error of a future that is done."""
    if not future.cancelled():
        future.exception()
