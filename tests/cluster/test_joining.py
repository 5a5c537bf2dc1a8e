"""Whether a Ray is there, and what is said of one that refuses this process."""

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
import ray
from typing_extensions import override

import ray_fed
from ray_fed import errors
from ray_fed.cluster import inventory, joining

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


class _Refusing(grpc.GenericRpcHandler):
    """Ends each call with one code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    @override
    def service(self, handler_call_details: Any) -> Any:
        del handler_call_details

        def refuse(_: bytes, context: Any) -> None:
            context.abort(self._code, "no")

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of what answers each call of gRPC with a code."""
    with futures.ThreadPoolExecutor(1) as threads:
        served = grpc.server(threads, handlers=[_Refusing(request.param)])
        port = served.add_insecure_port("127.0.0.1:0")
        served.start()
        yield f"127.0.0.1:{port}"
        served.stop(None).wait()


def raises(error: Exception) -> Callable[..., None]:
    def init(**_: Any) -> None:
        raise error

    return init


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("use", [inventory.read_inventory, join_as_init])
@pytest.mark.parametrize("named", [True, False], ids=["address", "variable"])
@pytest.mark.parametrize("server", [grpc.StatusCode.UNAUTHENTICATED], indirect=True)
def test_ray_that_refuses_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, server: str, use: Use, named: bool
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", NOBODY if named else server)

    with pytest.raises(
        errors.ClusterError, match=r"refuses it.*RAY_AUTH_TOKEN"
    ) as info:
        use(server if named else None)

    assert f"`{server}`" in str(info.value)
    assert info.value.__suppress_context__  # no traceback of Ray's beside it


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("server", [grpc.StatusCode.UNIMPLEMENTED], indirect=True)
def test_what_is_no_ray_is_told_at_once(server: str) -> None:
    with pytest.raises(errors.ClusterError, match=r"answer as one \(UNIMPLEMENTED\)"):
        join_as_init(server)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_reason_of_another_kind_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, listener: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(joining, "_check_answer", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(ray, "init", raises(error("Version mismatch: 2.1")))

    with pytest.raises(errors.ClusterError, match=r"found: Version mismatch: 2\.1"):
        inventory.read_inventory(listener)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("address", [NOBODY, f"ray://{NOBODY}"])
@pytest.mark.parametrize("use", [inventory.read_inventory, join_as_init])
def test_nothing_that_listens_is_no_ray(use: Use, address: str) -> None:
    with pytest.raises(errors.ClusterError, match="found none: start one"):
        use(address)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize(
    "address",
    ["ray://", "ray:// ", "ray://:10001", "ray://localhost", "ray://h:port", " ", ":1"],
)
def test_address_without_a_host_or_port_is_refused(address: str) -> None:
    for use in (inventory.read_inventory, join_as_init):
        with pytest.raises(errors.ClusterError, match="Expected the host and the port"):
            use(address)


@pytest.mark.parametrize("address", [None, "auto"])
def test_variable_leads_where_it_says(
    monkeypatch: pytest.MonkeyPatch, listener: str, address: str | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listener)
    found = joining.find(address)
    monkeypatch.setenv("RAY_ADDRESS", NOBODY)

    assert found is not None
    assert str(found) == f"the Ray at {listener}, named by RAY_ADDRESS"
    with pytest.raises(errors.ClusterError, match=f"a Ray at `{NOBODY}`, found none"):
        joining.find(address)


def announce(folder: pathlib.Path, address: str) -> pathlib.Path:
    """Leave the file that `ray start` leaves."""
    path = folder / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    path.write_text(address)
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder in which this process looks for what `ray start` announced."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def test_ray_that_this_user_announced_is_found(
    alone: pathlib.Path, listener: str
) -> None:
    announce(alone, listener)

    found = joining.find(None)

    assert found == joining.RunningRay(listener, "announced by `ray start`", True)


def test_ray_that_was_announced_and_ended_is_none(alone: pathlib.Path) -> None:
    announce(alone, NOBODY)

    assert joining.find(None) is None


def test_ray_that_another_user_announced_is_not_taken(
    alone: pathlib.Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(alone, listener)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)

    assert joining.find(None) is None


@pytest.mark.usefixtures("alone")
def test_ray_of_another_program_is_taken_by_auto_alone(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_running", lambda: listener)

    found = joining.find("auto")

    assert joining.find(None) is None
    assert found == joining.RunningRay(listener, "found on this machine", True)


@pytest.mark.ray
@pytest.mark.parametrize("other", [NOBODY, f"ray://{NOBODY}"])
def test_process_that_is_connected_joins_no_other(
    ray_cluster: None, other: str
) -> None:
    here = ray.get_runtime_context().gcs_address

    joining.check_connected(here)
    with pytest.raises(errors.ContextStateError, match=f"Ray at .{here}"):
        joining.check_connected(other)


LEAVES = """
import asyncio, threading, time
import ray
from ray._private import worker
from ray_fed.cluster.joining import Job

class EndedSlowly:
    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def shutdown_driver(self):
        self.connection.shutdown_driver()
        ended.set()
        asked.result(60)  # the loop goes on while Ray ends
        time.sleep(1)

@ray.remote
def quick():
    return 1

async def ask():
    called = Job.current().answer(quick.remote())
    begun.set()
    return await called

begun, ended = threading.Event(), threading.Event()
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
asked = asyncio.run_coroutine_threadsafe(ask(), loop)
begun.wait()
loop.call_soon_threadsafe(ended.wait)
ray.get(quick.remote())  # on the only CPU: the first call is done
worker.global_worker.core_worker = EndedSlowly(worker.global_worker.core_worker)
ray.shutdown()
print("lives", asked.result())
"""


@pytest.mark.slow
def test_a_call_that_ends_as_ray_does_leaves_the_process_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEAVES],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.endswith("lives 1\n")
