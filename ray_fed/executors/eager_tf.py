"""`EagerTFExecutor`: the lowest executor of every stack, which runs TensorFlow.

This executor has tensors, sequences, structs and functions as values. Its computations
are TensorFlow graphs and the arithmetic of `tensorflow.operators`. It knows neither
placements nor lambdas. When a value is embedded, it is converted to a normal form,
which `tensorflow.normal_forms` describes. The executor also builds and runs kernels. A
kernel is one graph that does the work of many computations.
"""

import contextlib
import hashlib
from typing import Any, Self, cast

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.language import blocks, structs, trees, type_checks
from ray_fed.plan.plans import Fallback, KeySelection
from ray_fed.tensorflow import loaded_functions, normal_forms, operators
from ray_fed.tensorflow.kernels.server_kernels import KernelCache, KernelGraph
from ray_fed.tensorflow.normal_forms import Executable, Normal
from ray_fed.tensorflow.tensors import devices, specs
from ray_fed.values.lru_cache import LruCache


class EagerValue(EmbeddedValue):
    """A value in an `EagerTFExecutor`. Its reference is the normal form."""

    @override
    async def compute(self) -> Any:
        """Return NumPy values in Structs. A sequence is a list of its elements."""
        return normal_forms.compute(self._reference, self._type_signature)


def retyped(value: EagerValue, type_spec: fl.Type) -> EagerValue:
    """Return a value with another type, to which its own type is assignable.

    The value is normalized again, because the names in a type decide the order of the
    tensors in a dataset's elements. Raises TypeError if the types do not fit.
    """
    own_type = value.type_signature
    if own_type == type_spec:
        return EagerValue(value.reference, type_spec)
    type_checks.check_assignable(type_spec, own_type, "a value")
    if isinstance(own_type, fl.FunctionType) and isinstance(type_spec, fl.FunctionType):
        return EagerValue(_retyped_function(value, own_type, type_spec), type_spec)
    return EagerValue(normal_forms.normalize(value.reference, type_spec), type_spec)


def _retyped_function(
    value: EagerValue, own_type: fl.FunctionType, declared: fl.FunctionType
) -> Executable:
    def run(*args: Normal) -> Normal:
        parameter = cast("fl.Type", own_type.parameter)
        arguments = [normal_forms.normalize(arg, parameter) for arg in args]
        return normal_forms.normalize(value.reference(*arguments), declared.result)

    return Executable(run)


_CACHED_FUNCTIONS = 512
"""Number of loaded graphs that one executor caches. A graph for a computation of 5 kB
takes about 1 MB."""

_FUNCTION_BYTES, _LEAST_FUNCTIONS = 2**22, 8
"""Maximum serialized bytes of the cached graphs, and the number of latest graphs that
always stay. A loaded graph has several copies of large constants."""


class EagerTFExecutor(fl.framework.Executor):
    """Runs TensorFlow computations on one logical device, one call at a time.

    Up to 512 loaded functions are cached. Results are not cached. The executor has no
    threads. `close` drops the cache.

    Args:
        device: One of `tf.config.list_logical_devices()`, which runs all operations and
            has all tensors. None leaves the choice to TensorFlow.

    Attributes:
        kernels: Cache that builds the graphs for `run_kernel`.

    Raises:
        RuntimeError: TensorFlow does not execute eagerly.
        TypeError: `device` is not a `tf.config.LogicalDevice`.
        ValueError: The device does not exist.
    """

    def __init__(self, device: Any = None) -> None:
        _check_eager()
        if device is not None:
            _check_device(device)
        self._device = device.name if device is not None else None
        self._lowers = True
        self._functions: LruCache[bytes, Executable] = LruCache(
            _CACHED_FUNCTIONS, max_weight=_FUNCTION_BYTES, least=_LEAST_FUNCTIONS
        )
        self.kernels = KernelCache(devices.shared_name(self._device))

    @classmethod
    def of_written_graphs(cls, device: Any = None) -> Self:
        """Return an executor that runs every graph as it was written, for debugging.

        Other executors replace tf.data in graphs by loops over tensors, if possible.
        """
        executor = cls(device)
        executor._lowers = False
        return executor

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which this thread's TensorFlow ops run here."""
        return tf.device(self._device)

    @override
    def close(self) -> None:
        self._functions.clear()
        self.kernels.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> EagerValue:
        """Embed a value, a TensorFlow computation, or an arithmetic intrinsic.

        Args:
            value: A computation, a `KeySelection`, a `TypedObject`, or a value of the
                type in any form: normal, plain, or as users write it.
            type_spec: Type of the value. It may be None if the value has a type.

        Raises:
            RuntimeError: TensorFlow does not execute eagerly.
            TypeError: The value is not of the type.
            ValueError: The value has no type, or is a computation of another kind.
        """
        _check_eager()
        if isinstance(value, KeySelection):
            return self._embed_selection(value)
        type_spec = None if type_spec is None else specs.to_type(type_spec)
        if isinstance(value, blocks.Function):
            if value.captured:
                names = [name for name, _, _ in value.captured]
                raise errors.UnsupportedError(
                    "Expected a TensorFlow computation, found a lambda that captures"
                    f" {names}: pass these values as an argument."
                )
            value = value.building_block()
        block = blocks.to_block(value)
        if block is not None:
            return self._embed_block(block, type_spec)
        if isinstance(value, EagerValue):
            return self._placed(retyped(value, type_spec or value.type_signature))
        if type_spec is None and isinstance(value, fl.TypedObject):
            type_spec = value.type_signature
        if type_spec is None:
            raise errors.UnsupportedError(
                f"Expected a type for {structs.show(value)}, found none: pass"
                " `type_spec`."
            )
        if isinstance(type_spec, fl.StructType) and type_checks.holds_functions(
            type_spec
        ):
            return await self._embed_struct(value, type_spec)
        return self._embed_plain(value, type_spec)

    def _embed_selection(self, selection: KeySelection) -> EagerValue:
        graph = self.kernels.selection(selection.function)
        if isinstance(graph, Fallback):
            raise errors.UnsupportedError(graph.reason)
        type_spec = selection.type_signature

        parameter = cast("fl.Type", type_spec.parameter)
        constants_type, _ = type_checks.struct_type(parameter)

        def run(arg: Normal) -> Normal:
            constants, keys = arg
            flat = normal_forms.flatten(constants, constants_type)
            return normal_forms.normalize(graph.run(flat, keys), type_spec.result)

        return EagerValue(Executable(run), type_spec)

    def _embed_plain(self, value: Any, type_spec: fl.Type) -> EagerValue:
        with tf.device(self._device):
            embedded = EagerValue(normal_forms.normalize(value, type_spec), type_spec)
        return self._placed(embedded)

    def _placed(self, value: EagerValue) -> EagerValue:
        if self._device is None:
            return value
        type_spec = value.type_signature
        moved = normal_forms.move(value.reference, type_spec, self._device)
        return EagerValue(moved, type_spec)

    async def _embed_struct(self, value: Any, type_spec: fl.StructType) -> EagerValue:
        parts = structs.struct_elements(value, type_spec)
        members = [await self.create_value(part, t) for t, _, part in parts]
        names = [name for name, _ in type_spec.items()]
        references = [member.reference for member in members]
        struct = structs.Struct(zip(names, references, strict=True))
        return EagerValue(struct, type_spec)

    def _embed_block(
        self, block: fl.framework.ComputationBuildingBlock, type_spec: fl.Type | None
    ) -> EagerValue:
        own_type = block.type_signature
        declared = type_spec or own_type
        type_checks.check_assignable(declared, own_type, "a computation")
        match block:
            case fl.framework.CompiledComputation():
                return retyped(EagerValue(self._load(block), own_type), declared)
            case fl.framework.Intrinsic() if block.uri in operators.OPERATORS:
                return retyped(EagerValue(self._operate(block), own_type), declared)
            case fl.framework.Literal():
                return self._embed_plain(block.value, declared)
            case fl.framework.Data():
                return retyped(self._embed_plain(block, own_type), declared)
            case _:
                raise errors.UnsupportedError(
                    "Expected a TensorFlow computation, found"
                    f" `{blocks.show_block(block)}`: put a ReferenceResolvingExecutor"
                    " above this executor, or write it as a TensorFlow computation."
                )

    def _load(self, block: fl.framework.CompiledComputation) -> Executable:
        proto = block.to_proto()
        if not blocks.is_tensorflow(block):
            raise errors.UnsupportedError(
                "Expected a TensorFlow computation, found one of kind"
                f" `{proto.WhichOneof('computation')}`."
            )
        content = proto.SerializeToString(deterministic=True)  # includes the type
        key = hashlib.sha256(content).digest()
        return self._functions.get(
            key,
            lambda: loaded_functions.load_function(
                proto.tensorflow,
                block.type_signature,
                self._device,
                lowers=self._lowers,
            ),
            len(content),
        )

    def _operate(self, block: fl.framework.Intrinsic) -> Executable:
        type_spec = cast("fl.FunctionType", block.type_signature)
        operator = operators.OPERATORS[block.uri]
        parameter = type_spec.parameter

        def run(arg: Normal = None) -> Normal:
            parts: list[Any] = []
            if isinstance(parameter, fl.StructType):
                elements = zip(parameter.items(), arg, strict=True)
                parts = [normal_forms.flatten(member, t) for (_, t), member in elements]
            with tf.device(self._device):
                results = operator(parts, type_spec)
            return trees.unflatten(iter(results), type_spec.result)

        return Executable(run)

    @override
    async def create_call(
        self,
        comp: fl.framework.ExecutorValue,
        arg: fl.framework.ExecutorValue | None = None,
    ) -> EagerValue:
        """Call an embedded function.

        Raises RuntimeError if TensorFlow does not execute eagerly, and TypeError if
        `comp` is not a function, or does not accept `arg`.
        """
        _check_eager()
        function = type_checks.narrow(comp, EagerValue, "EagerTFExecutor")
        argument = None
        if arg is not None:
            argument = type_checks.narrow(arg, EagerValue, "EagerTFExecutor")
        type_spec = type_checks.check_call(function, argument)
        if argument is None or type_spec.parameter is None:
            return EagerValue(function.reference(), type_spec.result)
        argument = self._placed(retyped(argument, type_spec.parameter))
        return EagerValue(function.reference(argument.reference), type_spec.result)

    def run_kernel(self, kernel: KernelGraph, *arguments: Any) -> Any:
        """Run a kernel from `kernels`, and return its result. TensorFlow may raise."""
        _check_eager()
        return kernel.run(*arguments)

    @override
    async def create_struct(self, elements: Any) -> EagerValue:
        members = [
            (name, type_checks.narrow(member, EagerValue, "EagerTFExecutor"))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]
        return EagerValue(
            structs.Struct((name, member.reference) for name, member in members),
            fl.StructType((name, member.type_signature) for name, member in members),
        )

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> EagerValue:
        struct = type_checks.narrow(source, EagerValue, "EagerTFExecutor")
        position = type_checks.select_index(struct.type_signature, index, name)
        struct_type = cast("fl.StructType", struct.type_signature)
        return EagerValue(struct.reference[position], struct_type[position])


def _check_eager() -> None:
    if not tf.executing_eagerly():
        raise errors.ContextStateError(
            "Expected TensorFlow to execute eagerly, found graph mode: call from"
            " outside of tf.function and tf.Graph."
        )


def _check_device(device: Any) -> None:
    if not isinstance(device, tf.config.LogicalDevice):
        raise errors.ValueMismatchError(
            "Expected a `tf.config.LogicalDevice`, found"
            f" {structs.show(device)}: take one from tf.config.list_logical_devices()."
        )
    names = [logical.name for logical in tf.config.list_logical_devices()]
    if device.name not in names:
        raise errors.UnsupportedError(
            f"Expected one of the devices {names}, found `{device.name}`."
        )
