"""`RayFederatedContext`: calls that return at once, with references to their results.

    invoke(next, (state, clients)) --> state', metrics     references, returned at once
                                          |        |
      the next call takes it from  <------+        +-----> a release manager reads it
      the object store                                     into this process

A call waits for the calls whose results it takes. The program waits only where it
reads a value. A reference can stand for a value that is not computed yet. Values stay
on the workers that made them. Arguments are checked when `invoke` is called, and their
references are resolved before the call runs.
"""

# pyright: reportPrivateUsage=false

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import operator
import threading
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import Any, Self, TypeVar, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
import ray_fed.values.plain_values as plain_values
from ray_fed.compiler.binding import bind_functions
from ray_fed.compiler.form import function_type_of
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.installation import create_context
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language import structs, type_checks
from ray_fed.values import components, read_limits
from ray_fed.values.client_references import ListCache

_T = TypeVar("_T")


class RayValueReference(
    fl.program.MaterializableValueReference, np.lib.mixins.NDArrayOperatorsMixin
):
    """A reference to a tensor or sequence of a result, which is in the object store.

    The value is freed when no reference to it is left, and no call takes it as an
    argument. On the local backend, the value is in this process.

    A reference to a tensor can be used like an array of NumPy: in arithmetic,
    comparisons, indexing, formatting, and as an argument of TensorFlow and Keras. Each
    such use waits for the value and reads it. `shape` and `dtype` wait only if the type
    does not have them. `str` returns the text of the value once it is computed.

    Args:
        type_signature: The type of the value.
        context: The context whose call computes the value. It reads the value, too.
    """

    def __init__(
        self,
        type_signature: fl.program.MaterializableTypeSignature,
        context: ExecutionContext,
    ) -> None:
        self._type_signature = type_signature
        self._context = context
        self._component: concurrent.futures.Future[Any] = concurrent.futures.Future()

    @property
    @override
    def type_signature(self) -> fl.program.MaterializableTypeSignature:
        return self._type_signature

    @override
    @tracebacks.shorten
    async def get_value(self) -> Any:
        """Wait for the value and read it into this process.

        Returns:
            For a tensor, a read-only scalar or array of NumPy, or bytes for a string.
            For a sequence, a list of its elements.

        Raises:
            ComputationError: The computation, or an earlier computation whose result it
                takes, raised an error.
            RetryBudgetError: Workers died more often than the budget of retries allows.
            ContextStateError: The context was closed.
        """
        component = _result_of(await _wait_in_loop(self._component))
        value = (await _wait_in_loop(self._context.fetch(component))).result()
        return _lock(plain_values.from_plain(value, self._type_signature))

    def __array__(
        self,
        dtype: np.dtype[Any] | None = None,
        copy: bool | None = None,  # noqa: FBT001 (numpy's protocol)
    ) -> NDArray[Any]:
        """Wait for the value and read it for NumPy, as `get_value` does."""
        return np.array(self._read(), dtype, copy=copy)

    def _read(self) -> Any:
        value = self._context.fetch(_result_of(self._component)).result()
        return _lock(plain_values.from_plain(value, self._type_signature))

    def numpy(self) -> Any:
        """Wait for the value and read it, as `get_value` does."""
        return self._read()

    @override
    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        """Apply a NumPy function to the values. In-place operations return an array."""
        targets: tuple[Any, ...] = options.get("out", ())
        if any(isinstance(target, RayValueReference) for target in targets):
            del options["out"]
        values = [
            value.numpy() if isinstance(value, RayValueReference) else value
            for value in inputs
        ]
        return getattr(ufunc, method)(*values, **options)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of NumPy's array with this name, such as `sum`."""
        if name.startswith("_"):
            raise AttributeError(f"Expected a name without `_`, found `{name}`.")
        is_tensor = isinstance(self._type_signature, fl.TensorType)
        if not is_tensor or not hasattr(np.ndarray, name):
            raise AttributeError(
                f"Expected a name of a reference to `{self._type_signature}`, found"
                f" `{name}`."
            )
        return getattr(np.asarray(self), name)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tensor."""
        if not isinstance(self._type_signature, fl.TensorType):
            return self.__getattr__("dtype")
        return np.dtype(self._type_signature.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        declared = getattr(self._type_signature, "shape", None)
        if declared is not None and None not in declared:
            return cast("tuple[int, ...]", tuple(declared))
        return self.__getattr__("shape")

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __index__(self) -> int:
        return operator.index(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __complex__(self) -> complex:
        return complex(self._read())

    @override
    def __reduce__(self) -> Any:
        return copy.copy, (self._read(),)  # a copy, or a pickled one, is the value

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._read(), digits)

    @override
    def __hash__(self) -> int:
        return object.__hash__(self)

    @override
    def __str__(self) -> str:
        # An error may show a reference whose call was never started: do not wait.
        return str(self._read()) if self._component.done() else repr(self)

    @override
    def __format__(self, spec: str, /) -> str:
        return format(self._read(), spec) if spec else str(self)

    async def take(self) -> Any:
        """Wait for the value. Return it, or a `Stored` if it is in the object store.

        Raises:
            FailedArgument: The call that computes the value failed.
        """
        component = await _wait_in_loop(self._component)
        error = component.exception()
        if error is not None:
            raise FailedArgument(error)
        return component.result()

    def _deliver(self, component: Any) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_result(component)

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_exception(error)

    def _free(self, error: BaseException) -> None:
        """Free the value. Reading it, or waiting for it, then raises `error`."""
        self._fail(error)
        if self._component.exception() is None:
            self._component = concurrent.futures.Future()
            self._component.set_exception(error)

    @override
    def __repr__(self) -> str:
        state = "pending"
        if self._component.done():
            state = "kept" if self._component.exception() is None else "failed"
        return f"<reference to {self._type_signature}, {state}>"


def _lock(value: Any) -> Any:
    """Return an array as a read-only view, because other code uses the same array."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


async def _wait_in_loop(
    future: concurrent.futures.Future[_T],
) -> concurrent.futures.Future[_T]:
    """Wait for a future in any event loop, and return it when it is done.

    Several callers can wait for one future. An interrupt ends this wait and leaves the
    future as it is.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    await ended.wait()
    return future


def _result_of(future: concurrent.futures.Future[_T]) -> _T:
    """Wait for a future, and return its result or raise a copy of its error.

    Raising the error itself would add frames to it while another thread may show it.
    """
    error = future.exception()
    if error is None:
        return future.result()
    try:
        raised = copy.copy(error)
    except Exception:  # noqa: BLE001 (a class of the user whose constructor differs)
        raised = error
    if notes := getattr(error, "__notes__", None):
        raised.__notes__ = list(notes)
    raised.__cause__, raised.__context__ = error.__cause__, error.__context__
    raised.__suppress_context__ = error.__suppress_context__
    raise raised.with_traceback(error.__traceback__)


class FailedArgument(Exception):  # noqa: N818 (the failure is the argument of it)
    """Ends a call that takes the result of a failed call.

    `args` has the error of the failed call. That error is not raised again, because its
    traceback would grow while another thread shows it.
    """


Reference = fl.program.MaterializableValueReference


def check(value: object, type_spec: fl.Type, label: str, lists: ListCache) -> Any:
    """Convert a call's argument to a plain value, but keep references unread.

    Arrays that the program could change are copied. Raises ValueMismatchError, which
    calls the argument `label`, if the argument has another type.
    """
    match type_spec:
        case fl.StructType():
            elements = structs.struct_elements(value, type_spec, label)
            return tuple(
                check(element, element_type, element_label, lists)
                for element_type, element_label, element in elements
            )
        case fl.FederatedType() if type_spec.placement == fl.SERVER:
            return check(value, type_spec.member, label, lists)
        case fl.TensorType() | fl.SequenceType() if isinstance(value, Reference):
            type_checks.check_assignable(type_spec, value.type_signature, label)
            return value
        case fl.FederatedType() if type_checks.differs_by_client(type_spec):
            plain = plain_values.to_plain(_to_list(value), type_spec, label, lists)
        case _:
            plain = plain_values.to_plain(value, type_spec, label)
    return plain_values.own(plain)  # the call may read it after it has returned


def _to_list(value: object) -> object:
    """Convert a data source's selection of clients to a list. Keep other values.

    A selection is an iterable with a length. An array or a dataset is the value of one
    client. Mappings and sets have no order of clients.
    """
    is_of_one = hasattr(value, "__array__") or plain_values.is_dataset(value)
    if is_of_one or isinstance(value, Sequence | Mapping | AbstractSet):
        return value
    if isinstance(value, Sized) and isinstance(value, Iterable):
        return list(cast("Iterable[object]", value))
    return value


async def resolve(checked: Any, type_spec: fl.Type) -> Any:
    """Wait for all references in a result of `check`, and replace them by their values.

    The value of a `RayValueReference` stays where it is stored. Other references are
    read. Raises FailedArgument if the call that computes a value failed.
    """
    held = components.split(checked, type_spec)
    types = components.component_types(type_spec)
    pending = {
        index: _resolve(component, component_type)
        for index, (component, component_type) in enumerate(
            zip(held, types, strict=True)
        )
        if isinstance(component, Reference)
    }
    resolved = await gather_by_index(pending.values())
    for index, component in zip(pending, resolved, strict=True):
        held[index] = component
    return components.join(held, type_spec)


def _resolve(reference: Reference, type_spec: fl.Type) -> Coroutine[Any, Any, Any]:
    if isinstance(reference, RayValueReference):
        return reference.take()
    return _read(reference, type_spec)


async def _read(reference: Reference, type_spec: fl.Type) -> Any:
    return plain_values.to_plain(
        await reference.get_value(), type_spec, "a referenced value"
    )


class RayFederatedContext(fl.program.FederatedContext):
    """Runs federated programs. Results stay in the object store until they are read.

    Results have the containers of their type, with a `RayValueReference` for each
    tensor and each sequence:

        type                              Python
        TensorType, SequenceType          reference
        placed at the server              as its member
        struct with a Python container    that container
        struct, all elements named        OrderedDict
        struct, no element named          tuple

    An argument that is placed at the server, or unplaced, can have references next to
    plain values. These can be references to results that are not computed yet. An
    argument that is placed at clients is a list of the clients' values, or the
    selection of a data source's iterator: any object that has a length and yields the
    clients' values in order. If the type of an argument has functions, pass
    computations for them. Calls can come from any thread, with or without a running
    event loop.

    Args:
        context: The context that runs the computations. The caller closes it. If None,
            `create_context()` creates one, which `close` closes.

    Raises:
        ConfigError: A setting in the environment is unknown or illegal.
        ClusterError: There is no cluster, or it is too small.
    """

    @tracebacks.shorten
    def __init__(self, context: ExecutionContext | None = None) -> None:
        self._owns_context = context is None
        self._context = create_context() if context is None else context
        self._lock = threading.Lock()
        self._is_open = True
        self._calls: set[concurrent.futures.Future[None]] = set()
        self._references: weakref.WeakSet[RayValueReference] = weakref.WeakSet()

    @property
    def execution_context(self) -> ExecutionContext:
        """The context that runs computations. It has reports, settings and events."""
        return self._context

    @property
    def num_invocations(self) -> int:
        """The number of calls so far. Save it with the state of a program."""
        return self._context.num_calls

    @tracebacks.shorten
    def resume_at(self, num_invocations: int) -> None:
        """Continue with the random numbers of a program that was interrupted.

        Args:
            num_invocations: The `num_invocations` that the program saved with its
                state, >= 0.

        Raises:
            CardinalityError: The number is below zero.
            ValueMismatchError: It is not a whole number.
        """
        self._context.resume_at(num_invocations)

    @override
    @tracebacks.shorten
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Start a computation on its argument and return references to its result.

        If the computation fails, `get_value` of its references raises the error. Calls
        that take these references fail with the same error.

        Raises:
            ValueError: The result type has other parts than structures, tensors,
                sequences and values placed at the server, or a struct in which only
                some elements have names.
            TypeError: `comp` is not a computation, or the argument has another type.
            ContextStateError: The context was closed.
        """
        _check_result(function_type_of(comp).result)
        return self._invoke(comp, arg, None)

    def invoke_at(self, number: int, comp: Any, arg: Any = None) -> Any:
        """Start a computation as the call with a number, without counting the call.

        Random numbers depend on `number`, and not on calls of other threads. So a loop
        that numbers its own rounds draws the same random numbers after an interruption.
        In the result, one reference stands for all clients' values of a value placed at
        clients.

        Args:
            number: The number of the call, >= 0. No other running call may have it. The
                report of a call with a number of at least 10**9 is never the context's
                last report.
            comp: The computation. This raises the errors of `invoke`.
            arg: The argument of the computation.
        """
        return self._invoke(comp, arg, type_checks.check_count(number, "number", 0))

    def _invoke(self, comp: Any, arg: Any, number: int | None) -> Any:
        type_spec = function_type_of(comp)
        type_checks.check_no_argument(type_spec, arg)
        comp, arg = bind_functions(comp, arg)
        with read_limits.limited(self._context.read_limits):
            parameter, lists = comp.type_signature.parameter, self._context.lists
            checked = (
                None
                if parameter is None
                else check(arg, parameter, "the argument", lists)
            )
        references = [
            RayValueReference(cast("Any", component_type), self._context)
            for component_type in components.component_types(type_spec.result)
        ]
        result = components.to_containers(references, type_spec.result)
        self._start(comp, checked, references, number)
        return result

    def _start(
        self,
        comp: Any,
        checked: Any,
        references: Sequence[RayValueReference],
        number: int | None,
    ) -> None:
        parameter = comp.type_signature.parameter

        async def prepare() -> Any:
            if parameter is None:
                return None
            return await resolve(checked, parameter)

        def deliver(held: Sequence[Any]) -> None:
            for reference, component in zip(references, held, strict=True):
                reference._deliver(component)  # noqa: SLF001

        with self._lock:
            if not self._is_open:
                raise _closed()
            call = self._context.start(comp, prepare, deliver, number)
            self._calls.add(call)
            self._references.update(references)
        call.add_done_callback(functools.partial(self._end, references))

    def _end(
        self,
        references: Sequence[RayValueReference],
        call: concurrent.futures.Future[None],
    ) -> None:
        with self._lock:
            self._calls.discard(call)
        error = _closed() if call.cancelled() else call.exception()
        if isinstance(error, FailedArgument):
            (error,) = error.args
        if error is not None:
            for reference in references:
                reference._fail(error)  # noqa: SLF001

    def read(self, values: Any) -> concurrent.futures.Future[Any]:
        """Return a future of a structure with all references replaced by their values.

        Args:
            values: A structure of references and other values.

        Raises:
            ContextStateError: The context was closed.
        """
        return self._context.submit(fl.program.materialize_value(values))

    @override
    def __repr__(self) -> str:
        return f"<references over {self._context!r}>"

    def close(self) -> None:
        """Cancel running calls and free all values. A second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            calls, references = list(self._calls), list(self._references)
        for call in calls:
            call.cancel()
        for reference in references:
            reference._free(_closed())  # noqa: SLF001
        if self._owns_context:
            self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_result(type_spec: fl.Type) -> None:
    only_server = fl.program.contains_only_server_placed_data(type_spec)
    if only_server and not type_checks.holds_clients(type_spec):
        return
    raise errors.UnsupportedError(
        "Expected a result of structures, tensors, sequences and values placed at the"
        f" server, found `{type_spec}`: aggregate what is placed at clients."
    )


def _closed() -> errors.ContextStateError:
    return errors.ContextStateError(
        "Expected an open RayFederatedContext, found it closed: read values before you"
        " close it."
    )
