"""Runs Python functions in graphs on the thread that called the graph, for debuggers.

TensorFlow calls a `tf.py_function` or `tf.numpy_function` from a thread of its pool. A
debugger can step through such a function only on the thread that waits for the graph:

    calling thread                        thread of the call
        | starts it                           |
        | waits, runs functions    <--------- the graph runs, on TensorFlow's threads
        | returns the graph's result <------- |

The bits of the result are the same.
"""

import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tensorflow.python.ops import script_ops  # no public name
from typing_extensions import override

import ray_fed.errors as errors

_T = TypeVar("_T")

_JOIN_TIMEOUT_S = 10.0
_CHECK_PERIOD_S = 0.1

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "ray_fed_callbacks", default=False
)
_one_graph = threading.RLock()
"""Lock of TensorFlow's table of Python functions, which all graphs share."""


@contextlib.contextmanager
def on_calling_thread() -> Generator[None]:
    """Let graphs called in the `with` block run their Python functions here."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def call(function: Callable[..., _T], *args: Any) -> _T:
    """Return `function(*args)`, which runs a graph, as `on_calling_thread` says."""
    if not _wanted.get():
        return function(*args)
    desk = _Desk()
    with _one_graph, _redirected(desk):
        return desk.serve(lambda: function(*args))


def keep(traced: Any, owner: Any) -> None:
    """Keep the Python functions of the graph `traced` alive as long as `owner` lives.

    TensorFlow frees them with the graph that they were traced in, but the serialized
    graph lives longer.
    """
    kept = getattr(owner, "_py_funcs_used_in_graph", [])
    kept.extend(getattr(traced, "_py_funcs_used_in_graph", []))
    owner._py_funcs_used_in_graph = kept  # noqa: SLF001 (where TensorFlow keeps its)


def _answer(future: "Future[Any]", call: Callable[[], Any]) -> None:
    # TensorFlow calls Python functions in an empty context. An interrupt is raised on
    # this thread, and the thread that waits for the future gets another error.
    try:
        future.set_result(contextvars.Context().run(call))
    except Exception as error:  # noqa: BLE001 (the graph ends with it)
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(_Interrupted("Expected an answer, found an interrupt."))
        raise error from None


class _Interrupted(errors.UserError):
    """The caller of the graph was interrupted and no longer waits."""


class _Desk:
    """Runs work on a new thread, and the work's Python functions on the current one."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[
            tuple[Future[Any], Callable[[], Any]] | None
        ] = queue.SimpleQueue()
        self._is_open = True

    def serve(self, work: Callable[[], _T]) -> _T:
        # The work runs on a new thread, and the functions that it orders run here.
        ended: Future[_T] = Future()

        def run() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:  # noqa: BLE001 (`result` raises it again)
                ended.set_exception(error)
            finally:
                self._orders.put(None)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(run,), daemon=True)
        thread.start()
        try:
            while (order := self._orders.get()) is not None:
                _answer(*order)
        finally:
            self._is_open = False
            thread.join(_JOIN_TIMEOUT_S)  # interrupted, it ends with the next order
        return ended.result()

    def order(self, function: Callable[..., Any], *args: Any) -> Any:
        future: Future[Any] = Future()
        self._orders.put((future, functools.partial(function, *args)))
        while not wait([future], _CHECK_PERIOD_S).done:
            if not self._is_open:
                raise _Interrupted("Expected an answer, found nobody who waits.")
        return future.result()


class _Redirected(script_ops.EagerFunc):
    """A `tf.py_function` that runs on a desk's thread, with conversions of tensors."""

    def __init__(self, target: Callable[..., Any], desk: _Desk) -> None:
        self._target = target
        self._desk = desk

    @override
    def __call__(self, device: Any, token: Any, args: Any) -> Any:
        return self._desk.order(self._target, device, token, args)


@contextlib.contextmanager
def _redirected(desk: _Desk) -> Generator[None]:
    registry: Any = script_ops._py_funcs  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    find = registry.get

    def get(token: Any, default: Any = None) -> Any:
        target = find(token, default)
        if target is None:
            return None
        if isinstance(target, script_ops.EagerFunc):
            return _Redirected(target, desk)
        return functools.partial(desk.order, target)

    registry.get = get
    try:
        yield
    finally:
        registry.get = find
