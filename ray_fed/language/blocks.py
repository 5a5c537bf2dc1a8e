"""Computations as bytes and back: what travels instead of Python functions."""

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
"""That are kept beside their bytes, each way."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that can travel: serialised, its captured values beside it.

    Attributes:
        computation: a serialised `pb.Computation` of a functional type; a lambda's
            free references are the names in `captured`.
        captured: (name, serialised type, plain value) of each free reference.
    """

    computation: bytes
    captured: tuple[tuple[str, bytes, Plain], ...] = ()

    def building_block(self) -> fl.framework.ComputationBuildingBlock:
        """Return the function as a building block."""
        return parse_block(self.computation)


@contextlib.contextmanager
def depth_in_words() -> Generator[None]:
    """Say what protobuf refuses, where messages are built that may nest too deeply.

    Raises:
        CompileError: protobuf refused a message.
    """
    try:
        yield
    except message.DecodeError as error:
        raise depth_error() from error


def depth_error() -> errors.CompileError:
    """Return the error that a computation, or a type, nests too deeply."""
    return errors.CompileError(_TOO_DEEP)


def parse_block(serialised: bytes) -> fl.framework.ComputationBuildingBlock:
    """Return the building block of a serialised `pb.Computation`.

    Raises:
        CompileError: the bytes are damaged, or nest deeper than protobuf reads.
    """
    proto = pb.Computation()
    try:
        proto.ParseFromString(serialised)
    except message.DecodeError as error:
        raise errors.CompileError(
            "Expected the bytes of a serialised computation, found"
            f" {len(serialised)} bytes that protobuf does not read: they are damaged or"
            " cut short, or nest deeper than about 45 lets or 30 structures."
        ) from error
    try:
        return fl.framework.ComputationBuildingBlock.from_proto(proto)
    except Exception as error:  # of whichever part of the message is none
        raise errors.CompileError(
            f"Expected the bytes of a serialised computation, found {len(serialised)}"
            f" bytes of a message that is none: {type(error).__name__} ({error})."
        ) from error


def serialise(block: fl.framework.ComputationBuildingBlock) -> bytes:
    """Return a building block as a deterministic `pb.Computation`.

    Raises:
        CompileError: the block nests deeper than protobuf writes or reads.
    """
    with depth_in_words():
        return block.to_proto().SerializeToString(deterministic=True)


def serialize_computation(comp: object) -> bytes:
    """Return a computation as bytes that TensorFlow Federated 0.87 reads too.

    Raises:
        ValueMismatchError: it is no computation.
        CompileError: it nests deeper than protobuf writes or reads.
    """
    if not isinstance(comp, fl.framework.ConcreteComputation):
        raise errors.ValueMismatchError(
            f"Expected a computation to serialise, found {show(comp)}."
        )
    with depth_in_words():
        return comp.to_proto().SerializeToString(deterministic=True)


def deserialize_computation(serialized: object) -> fl.framework.ConcreteComputation:
    """Return the computation that a serialised `pb.Computation` holds.

    The message is one for federated_language and for TensorFlow Federated 0.87:
    `tff.framework.serialize_computation(comp).SerializeToString()` makes the bytes
    there. Python containers are not part of it: structures come back as OrderedDicts
    and tuples.

    Args:
        serialized: of a computation, that is, of a functional type.

    Raises:
        ValueMismatchError: there are no bytes.
        CompileError: the bytes hold no computation, or one that nests too deeply.
    """
    if not isinstance(serialized, bytes):
        raise errors.ValueMismatchError(
            f"Expected the bytes of a serialised computation, found {show(serialized)}."
        )
    block = parse_block(serialized)
    if not isinstance(block.type_signature, fl.FunctionType):
        raise errors.CompileError(
            f"Expected a computation, found a value of type `{block.type_signature}`."
        )
    return fl.framework.ConcreteComputation.from_building_block(block)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def serialise_type(type_spec: fl.Type) -> bytes:
    """Return a type as bytes; Python containers are not kept."""
    return type_spec.to_proto().SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def parse_type(serialised: bytes) -> fl.Type:
    """Return the type that `serialise_type` wrote."""
    return fl.Type.from_proto(pb.Type.FromString(serialised))


def data_block(uri: str, type_spec: fl.Type) -> fl.framework.Data:
    """Return the building block of a file: its URI as a `google.protobuf.StringValue`.

    Args:
        uri: names the file; what follows a `#` names a column of it.
        type_spec: of the value that it holds.
    """
    content = any_pb2.Any()
    content.Pack(wrappers_pb2.StringValue(value=uri), deterministic=True)
    return fl.framework.Data(content, type_spec)


def data_uri(block: fl.framework.Data) -> str:
    """Return the URI that a data block holds.

    Raises:
        UnsupportedError: it holds something else.
    """
    packed = wrappers_pb2.StringValue()
    if not block.content.Unpack(packed):
        raise errors.UnsupportedError(
            "Expected data that names a file by a google.protobuf.StringValue, found"
            f" `{block.content.type_url}`: make it with ray_fed.tensorflow.data."
        )
    return packed.value


def to_block(value: object) -> fl.framework.ComputationBuildingBlock | None:
    """Return a computation in any of its forms as a building block, else None.

    Raises:
        UnsupportedError: the value is a message of an unknown kind of computation.
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
    """Return the blocks in a building block, itself included, that a test accepts."""
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
    """Return the name of an operand without one, for the keys of its random numbers.

    Two calls in one struct draw different numbers, as two locals do. None for an
    operand that calls nothing, and so draws nothing.

    Args:
        operand: an element of a struct, or another block inside of one.
        where: its place there: the index of an element, or a word.
    """
    while isinstance(operand, fl.framework.Selection):
        operand = operand.source
    calling = fl.framework.Call | fl.framework.Block | fl.framework.Struct
    return f"[{where}]" if isinstance(operand, calling) else None
