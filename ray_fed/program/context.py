"""`RayFederatedContext`: calls that return at once, with references to their results.

    invoke(next, (state, clients)) --> state', metrics     references, at once
                                          |        |
      next call takes it as it is, <------+        +-----> read by a release manager,
      from the object store                                and by nothing else

A call waits for the calls whose results it takes; the program waits only where it
reads a value.

References to values that may not be there yet, and stay where they were made.

Arguments of federated programs: checked at once, resolved when a call may run.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Sized
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
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import structs, type_checks
from ray_fed.values import components, read_limits
from ray_fed.values.client_references import ListCache

_T = TypeVar("_T")


class RayValueReference(fl.program.MaterializableValueReference):
    """A tensor or sequence of a result, kept in the object store.

    The value is freed when nothing holds its reference any more, nor a call that takes
    it as an argument. On the local backend it is kept in this process.

    Args:
        type_signature: of the value.
        context: whose call makes it; reads it.
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
            A numpy scalar or array, not to be written to; bytes for strings; a list of
            a sequence's elements.

        Raises:
            ComputationError: the computation raised, or one whose result it took.
            RetryBudgetError: workers died more often than may be.
            ContextStateError: the context was closed.
        """
        component = (await _wait_in_loop(self._component)).result()
        value = (await _wait_in_loop(self._context.fetch(component))).result()
        return _lock(plain_values.from_plain(value, self._type_signature))

    def __array__(
        self,
        dtype: np.dtype[Any] | None = None,
        copy: bool | None = None,  # noqa: FBT001 (numpy's protocol)
    ) -> NDArray[Any]:
        """Read the value for numpy, as `get_value` does, and wait for it."""
        held = self._component.result()
        value = self._context.fetch(held).result()
        plain = plain_values.from_plain(value, self._type_signature)
        return np.array(plain, dtype, copy=copy)

    async def take(self) -> Any:
        """Wait for the value and return it as it is kept: plain or stored.

        Raises:
            FailedArgument: the call failed that should have made it.
        """
        component = await _wait_in_loop(self._component)
        error = component.exception()
        if error is not None:
            raise FailedArgument(error)
        return component.result()

    def deliver(self, component: Any) -> None:
        """Take the value, as it is kept, from the call that made it."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_result(component)

    def fail(self, error: BaseException) -> None:
        """Take the failure of the call, unless there is a value."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_exception(error)

    def free(self, error: BaseException) -> None:
        """Let go of the value; whoever asks for it, or waits for it, gets an error."""
        self.fail(error)
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
    """Return an array as one that cannot be written to: others hold it too."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


async def _wait_in_loop(
    future: concurrent.futures.Future[_T],
) -> concurrent.futures.Future[_T]:
    """Wait in any loop for what many may wait for, and return it done.

    An interrupt ends this wait, not what the future stands for.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    await ended.wait()
    return future


class FailedArgument(Exception):  # noqa: N818 (the failure is the argument of it)
    """Ends a call that takes the value of one that failed, with the error of that.

    That error is not raised again: its frames would grow while another thread, which
    has read the value, shows them.
    """


Reference = fl.program.MaterializableValueReference


def check(value: object, type_spec: fl.Type, label: str, lists: ListCache) -> Any:
    """Check an argument against its type; references by theirs, without reading them.

    Returns:
        The plain argument, with references in place of tensors and sequences.

    Raises:
        ValueMismatchError: the argument is not of its type.
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
            return plain_values.to_plain(_to_list(value), type_spec, label, lists)
        case _:
            return plain_values.to_plain(value, type_spec, label)


def _to_list(value: object) -> object:
    """Return what a data source selected as a list of what each client has.

    What has no length may have no end, and what is no sequence may have no order:
    mappings, sets, and arrays or datasets, which are values of one client.
    """
    is_of_one = hasattr(value, "__array__") or plain_values.is_dataset(value)
    if is_of_one or isinstance(value, Sequence | Mapping | AbstractSet):
        return value
    if isinstance(value, Sized) and isinstance(value, Iterable):
        return list(cast("Iterable[object]", value))
    return value


async def resolve(checked: Any, type_spec: fl.Type) -> Any:
    """Return a checked argument once every reference in it has its value.

    What this kind of context keeps stays where it is; any other reference is read.

    Raises:
        FailedArgument: a call failed that should have made one of the values.
        Exception: what a reference of another kind raised.
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
    """Runs federated programs; results stay in the object store until they are read.

    Results have the containers of their type, with a `RayValueReference` for each
    tensor and each sequence:

        type                              Python
        TensorType, SequenceType          reference
        placed at the server              as its member
        struct with a Python container    that container
        struct, all elements named        OrderedDict
        struct, no element named          tuple

    Where an argument is placed at the server, or unplaced, it may hold references, also
    to results that are not there yet, next to plain values. Where it is placed at
    clients, it is a list with what each client has, or what the iterator of a data
    source selected: any object that has a length and yields what each client has, in
    order. Where its type has functions, it has computations. Calls may come from any
    thread, with or without a running event loop.

    Args:
        context: runs the computations; not owned. None: what `create_context()` makes,
            owned.

    Raises:
        ConfigError: the environment holds a setting that is not one.
        ClusterError: there is no cluster, or it is too small.
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
        """What runs the computations: has the report, the settings, and events."""
        return self._context

    @property
    def num_invocations(self) -> int:
        """Calls so far, which a program saves with its state."""
        return self._context.num_calls

    @tracebacks.shorten
    def resume_at(self, num_invocations: int) -> None:
        """Go on with the random numbers of a program that was interrupted.

        Args:
            num_invocations: of that program, when it saved its state; >= 0.

        Raises:
            CardinalityError: it is below zero.
            ValueMismatchError: it is no whole number.
        """
        self._context.resume_at(num_invocations)

    @override
    @tracebacks.shorten
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Start a computation on its argument and return references to its result.

        What goes wrong while it runs is raised by `get_value`, and passed on to the
        results of calls that take this one's.

        Raises:
            ValueError: the result type holds something else than structures, tensors,
                sequences and values placed at the server, or a struct with only some
                elements named.
            TypeError: `comp` is no computation, or the argument is not of its type.
            ContextStateError: the context was closed.
        """
        _check_result(function_type_of(comp).result)
        return self._invoke(comp, arg, None)

    def invoke_at(self, number: int, comp: Any, arg: Any = None) -> Any:
        """Start a computation as the call of a number, and count no call.

        Random numbers follow that number, whatever other threads call meanwhile: a loop
        that numbers its rounds itself draws the same ones however it is interrupted.
        What its result has at clients is one reference, to the list of their values.

        Args:
            number: >= 0; not that of a call that runs. From 10**9 on it is made aside:
                its report is never the context's last one.
            comp: as for `invoke`, which also says what is raised.
            arg: likewise.
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
                reference.deliver(component)

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
                reference.fail(error)

    @override
    def __repr__(self) -> str:
        return f"<references over {self._context!r}>"

    def close(self) -> None:
        """Cancel calls that run and free all values; a second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            calls, references = list(self._calls), list(self._references)
        for call in calls:
            call.cancel()
        for reference in references:
            reference.free(_closed())
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
