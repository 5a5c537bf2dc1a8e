"""Converts computations to bytes and back, for the way between processes.

A building block is a node of a computation's syntax tree, such as a call or a lambda.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import federated_language as fl
from federated_language.proto import computation_pb2
from google.protobuf import any_pb2, message, wrappers_pb2

import ray_fed.errors as errors
from ray_fed.language.structs import Plain, show

pb: Any = computation_pb2

_TOO_DEEP = (
    "Expected a computation that protobuf reads, nested fewer than about 45 lets or 30"
    " structures deep, found one that it refuses: name intermediate results in one"
    " federated_computation instead of nesting calls or structures."
)


_CACHED_TYPES = 1024
"""Size of the caches of `serialize_type` and of `parse_type`, in types."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A serialized function with the values that it captures.

    Attributes:
        computation: A serialized `pb.Computation` of a functional type.
        captured: The name, serialized type and plain value of each name that the
            function refers to but does not define.
    """

    computation: bytes
    captured: tuple[tuple[str, bytes, Plain], ...] = ()

    def building_block(self) -> fl.framework.ComputationBuildingBlock:
        """Return the parsed `computation`."""
        return parse_block(self.computation)


@contextlib.contextmanager
def depth_in_words() -> Generator[None]:
    """In the `with` block, turn protobuf's error for deep nesting into CompileError."""
    try:
        yield
    except message.DecodeError as error:
        raise depth_error() from error


def depth_error() -> errors.CompileError:
    """Return the error for a computation, or a type, that nests too deeply."""
    return errors.CompileError(_TOO_DEEP)


def parse_block(serialized: bytes) -> fl.framework.ComputationBuildingBlock:
    """Return the building block of a serialized `pb.Computation`.

    Raises CompileError if the bytes are damaged, or nest deeper than protobuf reads.
    """
    proto = pb.Computation()
    try:
        proto.ParseFromString(serialized)
    except message.DecodeError as error:
        raise errors.CompileError(
            "Expected the bytes of a serialized computation, found"
            f" {len(serialized)} bytes that protobuf does not read: they are damaged or"
            " cut short, or nest deeper than about 45 lets or 30 structures."
        ) from error
    try:
        return fl.framework.ComputationBuildingBlock.from_proto(proto)
    except Exception as error:  # any part of the message may be damaged
        raise errors.CompileError(
            f"Expected the bytes of a serialized computation, found {len(serialized)}"
            f" bytes of another message: {type(error).__name__} ({error})."
        ) from error


def serialize(block: fl.framework.ComputationBuildingBlock) -> bytes:
    """Return the bytes of a block, or raise CompileError if it nests too deeply."""
    with depth_in_words():
        return block.to_proto().SerializeToString(deterministic=True)


def serialize_computation(comp: object) -> bytes:
    """Return a computation as bytes. TensorFlow Federated 0.87 can read them, too.

    Raises:
        ValueMismatchError: `comp` is not a computation.
        CompileError: `comp` nests deeper than protobuf writes or reads.
    """
    if not isinstance(comp, fl.framework.ConcreteComputation):
        raise errors.ValueMismatchError(
            f"Expected a computation to serialize, found {show(comp)}."
        )
    with depth_in_words():
        return comp.to_proto().SerializeToString(deterministic=True)


def deserialize_computation(serialized: object) -> fl.framework.ConcreteComputation:
    """Return the computation of a serialized `pb.Computation`.

    TensorFlow Federated 0.87 uses the same message, and writes it by
    `tff.framework.serialize_computation(comp).SerializeToString()`. The message does
    not name Python containers: structures are read as OrderedDicts and tuples.

    Args:
        serialized: Bytes of a computation with a functional type.

    Raises:
        ValueMismatchError: `serialized` is not a `bytes` object.
        CompileError: The bytes are not a computation, or nest too deeply.
    """
    if not isinstance(serialized, bytes):
        raise errors.ValueMismatchError(
            f"Expected the bytes of a serialized computation, found {show(serialized)}."
        )
    block = parse_block(serialized)
    if not isinstance(block.type_signature, fl.FunctionType):
        raise errors.CompileError(
            f"Expected a computation, found a value of type `{block.type_signature}`."
        )
    return fl.framework.ConcreteComputation.from_building_block(block)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def serialize_type(type_spec: fl.Type) -> bytes:
    """Return a type as bytes, without its Python containers."""
    return type_spec.to_proto().SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def parse_type(serialized: bytes) -> fl.Type:
    """Return the type that `serialize_type` wrote."""
    return fl.Type.from_proto(pb.Type.FromString(serialized))


def data_block(uri: str, type_spec: fl.Type) -> fl.framework.Data:
    """Return the block that stands for the data in a file, of the type `type_spec`.

    Text after a `#` in `uri` is the name of a column.
    """
    content = any_pb2.Any()
    content.Pack(wrappers_pb2.StringValue(value=uri), deterministic=True)
    return fl.framework.Data(content, type_spec)


def data_uri(block: fl.framework.Data) -> str:
    """Return the URI in a block of `data_block`, or raise UnsupportedError."""
    packed = wrappers_pb2.StringValue()
    if not block.content.Unpack(packed):
        raise errors.UnsupportedError(
            "Expected data that names a file by a google.protobuf.StringValue, found"
            f" `{block.content.type_url}`: make it with ray_fed.tensorflow.data."
        )
    return packed.value


def to_block(value: object) -> fl.framework.ComputationBuildingBlock | None:
    """Return a computation as a building block, or None for any other value.

    `value` can be a building block, a `ConcreteComputation` or a `pb.Computation`.
    Raises UnsupportedError for a message with an unknown kind of computation.
    """
    match value:
        case fl.framework.ComputationBuildingBlock():
            return value
        case fl.framework.ConcreteComputation():
            return fl.framework.ComputationBuildingBlock.from_proto(value.to_proto())
        case pb.Computation():
            return _from_message(value)
        case _:
            return None


def _from_message(proto: Any) -> fl.framework.ComputationBuildingBlock:
    try:
        return fl.framework.ComputationBuildingBlock.from_proto(proto)
    except NotImplementedError as error:
        raise errors.UnsupportedError(
            "Expected a computation of a kind that federated_language knows, found one"
            f" of kind `{proto.WhichOneof('computation')}`."
        ) from error


def is_tensorflow(block: fl.framework.CompiledComputation) -> bool:
    """Return whether a compiled computation is a TensorFlow graph."""
    return block.to_proto().WhichOneof("computation") == "tensorflow"


def show_block(block: fl.framework.ComputationBuildingBlock) -> str:
    """Return the text of a building block for an error message. Long texts are cut."""
    return errors.cut(block.compact_representation())


def find_blocks(
    block: fl.framework.ComputationBuildingBlock,
    is_wanted: Callable[[fl.framework.ComputationBuildingBlock], bool],
) -> list[fl.framework.ComputationBuildingBlock]:
    """Return `block` and the blocks inside it for which `is_wanted` is true."""
    accepted: list[fl.framework.ComputationBuildingBlock] = []

    def note(
        part: fl.framework.ComputationBuildingBlock,
    ) -> tuple[fl.framework.ComputationBuildingBlock, bool]:
        if is_wanted(part):
            accepted.append(part)
        return part, False

    fl.framework.transform_postorder(block, note)
    return accepted


def bound_names(block: fl.framework.ComputationBuildingBlock) -> set[str]:
    """Return the names of all parameters and locals in a building block."""
    names: set[str] = set()
    for part in find_blocks(block, lambda _: True):
        match part:
            case fl.framework.Lambda(parameter_name=str(name)):
                names.add(name)
            case fl.framework.Block():
                names.update(name for name, _ in part.locals)
            case _:
                pass
    return names


def operand_name(
    operand: fl.framework.ComputationBuildingBlock, where: str | int
) -> str | None:
    """Return the name that an operand has in the key of its random numbers.

    An operand is an element of a struct, or the argument of a call. `where` is its
    index, or a word such as "argument". Operands with different names draw different
    random numbers. An operand without calls cannot draw, and its name is None.
    """
    while isinstance(operand, fl.framework.Selection):
        operand = operand.source
    calling = fl.framework.Call | fl.framework.Block | fl.framework.Struct
    return f"[{where}]" if isinstance(operand, calling) else None
