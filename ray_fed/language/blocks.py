"""Computations as bytes and back: the form that travels between processes."""

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
"""Number of types that are cached with their bytes, in each direction."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A serialized function with the values that it captures.

    `computation` is a serialized `pb.Computation` of a functional type. The free
    references of a lambda are the names in `captured`, which has the name, serialized
    type and plain value of each.
    """

    computation: bytes
    captured: tuple[tuple[str, bytes, Plain], ...] = ()

    def building_block(self) -> fl.framework.ComputationBuildingBlock:
        """Return the function as a building block."""
        return parse_block(self.computation)


@contextlib.contextmanager
def depth_in_words() -> Generator[None]:
    """Replace protobuf's error for messages that nest too deeply by a CompileError."""
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
    """Return a building block as a deterministic `pb.Computation`."""
    with depth_in_words():
        return block.to_proto().SerializeToString(deterministic=True)


def serialize_computation(comp: object) -> bytes:
    """Return a computation as bytes, which TensorFlow Federated 0.87 reads, too.

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

    federated_language and TensorFlow Federated 0.87 use the same message. In TensorFlow
    Federated, `tff.framework.serialize_computation(comp).SerializeToString()` writes
    it. Python containers are not part of the message: structures are read as
    OrderedDicts and tuples.

    Args:
        serialized: Bytes of a computation, whose type is a function.

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
    """Return the building block of a file: its URI as a `google.protobuf.StringValue`.

    The text after a `#` in the URI is the name of a column.
    """
    content = any_pb2.Any()
    content.Pack(wrappers_pb2.StringValue(value=uri), deterministic=True)
    return fl.framework.Data(content, type_spec)


def data_uri(block: fl.framework.Data) -> str:
    """Return the URI of a data block, or raise UnsupportedError for other content."""
    packed = wrappers_pb2.StringValue()
    if not block.content.Unpack(packed):
        raise errors.UnsupportedError(
            "Expected data that names a file by a google.protobuf.StringValue, found"
            f" `{block.content.type_url}`: make it with ray_fed.tensorflow.data."
        )
    return packed.value


def to_block(value: object) -> fl.framework.ComputationBuildingBlock | None:
    """Return a computation of any class as a building block, or None for other values.

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
    """Return a building block for an error message, cut when long."""
    return errors.cut(block.compact_representation())


def find_blocks(
    block: fl.framework.ComputationBuildingBlock,
    is_wanted: Callable[[fl.framework.ComputationBuildingBlock], bool],
) -> list[fl.framework.ComputationBuildingBlock]:
    """Return all blocks in a building block, including itself, that are wanted."""
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
    """Return a name for an operand, for the key of its random numbers.

    Two calls in one struct draw different numbers, as two locals do. `where` is the
    index of an element, or a word. The result is None for an operand without calls,
    which cannot draw.
    """
    while isinstance(operand, fl.framework.Selection):
        operand = operand.source
    calling = fl.framework.Call | fl.framework.Block | fl.framework.Struct
    return f"[{where}]" if isinstance(operand, calling) else None
