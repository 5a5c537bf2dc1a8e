"""`RayFederatedContext`: calls that return at once, with references to their results.

    invoke(next, (state, clients)) --> state', metrics     references, at once
                                          |        |
      next call takes it as it is, <------+        +-----> read by a release manager,
      from the object store                                and by nothing else

A call waits for the calls whose results it takes; the program waits only where it
reads a value.
"""

import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.program.call_arguments as call_arguments
import ray_fed.tracebacks as tracebacks
from ray_fed.compiler.binding import bind_functions
from ray_fed.compiler.form import function_type_of
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.installation import create_context
from ray_fed.language import type_checks
from ray_fed.program.value_references import RayValueReference
from ray_fed.values import components, read_limits


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

    def resume_at(self, num_invocations: int) -> None:
        """Go on with the random numbers of a program that was interrupted.

        Args:
            num_invocations: of that program, when it saved its state; >= 0.
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
            checked = _check_argument(arg, comp.type_signature.parameter)
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
            return await call_arguments.resolve(checked, parameter)

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


def _check_argument(arg: Any, parameter: fl.Type | None) -> Any:
    if parameter is None:
        return None
    return call_arguments.check(arg, parameter, "the argument")


def _closed() -> errors.ContextStateError:
    return errors.ContextStateError(
        "Expected an open RayFederatedContext, found it closed: read values before you"
        " close it."
    )
