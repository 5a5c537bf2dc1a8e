"""References to clients' values, which a worker reads when it needs them.

    ClientSource    reads a client's value from memory, a file or a user's function
    HeldSource      a source whose values are in this process
    ClientMember    one client of a source, in place of its value
    ClientReference a `ClientMember` for users, with the client's id and weight
    ClientRun       some clients in order, in place of a value placed at clients
    NamedClients    a list with a value for each client, and the clients' ids
    ListCache       makes a `ClientRun` of a list that is passed several times

Slicing a `ClientRun` reads nothing. The executor that embeds a `ClientMember` reads its
value from the source.
"""

import collections
import dataclasses
import hashlib
import io
import itertools
import logging
import operator
import pickle
import types
import uuid
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language import trees, type_checks
from ray_fed.language.structs import Plain
from ray_fed.values import stored
from ray_fed.values.columnar_sequence import ColumnarSequence
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import ClientSequence

_logger = logging.getLogger(__name__)


class ClientSource:
    """Reads the value of a client, which it knows by its position.

    Attributes:
        token: Identifies the source. Sources with the same token have the same values.
        is_resident: Whether values need no cache, because a read takes no time beyond
            the read of `base`.
        opens_once: Whether the first read opens resources that all further reads need.
            A reader should then keep the source.
        num_bytes: Bytes of the arrays in this process.
        base: The source whose values this source transforms, or None if it reads values
            by itself.
    """

    token: str
    is_resident: bool = False
    opens_once: bool = False
    num_bytes: int = 0
    base: "ClientSource | None" = None

    def read(self, position: int) -> Plain:
        """Return the value of the client at `position`, as `plain_values` describes it.

        Raises ValueMismatchError if the value does not have the type of the source, and
        ComputationError if it could not be read.
        """
        return self.arrange(self.read_base(position), position)

    def read_base(self, position: int) -> Plain:
        """Return the client's value in `base`. It raises the errors of `read`."""
        if self.base is None:
            raise NotImplementedError(f"{type(self).__name__} has no base.")
        return self.base.read(position)

    @property
    def function(self) -> Callable[[Any], Any] | None:
        """The user's function that is pickled with the source, or None."""
        return None

    def opened(self) -> "ClientSource":
        """Return the source to read from: this one, or its copy from Ray's store."""
        return self

    def opened_base(self) -> "ClientSource | None":
        """Return `base`, or None if this source has no base or did not open it yet."""
        return self.base

    def arrange(self, value: Plain, position: int) -> Plain:
        """Return a client's value. `value` is the client's value in `base`."""
        raise NotImplementedError(f"{type(self).__name__} has no base: {position}")

    def over(self, base: "ClientSource") -> "ClientSource":
        """Return a copy of this source that reads the same values from another base."""
        raise NotImplementedError(f"{type(self).__name__} has no base: {base}")

    def describe(self) -> dict[str, Any]:
        """Return JSON facts that decide the clients' values and are quick to read."""
        return {} if self.base is None else self.base.describe()

    def check_batches(self, position: int, client: Hashable) -> None:
        """Raise if tensors of a client's batch have different numbers of rows.

        A value that is not in this process is checked when it is read. Sources that
        make batches of rows do not check. The ValueMismatchError names the client and
        the batch.
        """
        if self.base is not None:
            self.base.check_batches(position, client)

    def occasion(self) -> Hashable:
        """Return a key of the current call if values change with calls, or None.

        The key is read from the random key of the current work.
        """
        return None


class HeldSource(ClientSource):
    """A source of clients' values that are in the memory of this process."""

    is_resident = True

    def __init__(self, held: Sequence[Plain]) -> None:
        self.token = uuid.uuid4().hex
        self.held = held
        self.num_bytes = stored.count_bytes(list(held))
        self._checked: set[int] = set()

    @override
    def read(self, position: int) -> Plain:
        return self.held[position]

    @override
    def check_batches(self, position: int, client: Hashable) -> None:
        if position not in self._checked:
            check_rows(self.held[position], client)
            self._checked.add(position)


def check_rows(value: Plain, client: Hashable) -> None:
    """Raise if a batch has tensors with different numbers of rows. Warn of NaN."""
    if not isinstance(value, ColumnarSequence):
        return
    floats = (column.rows for column in value.columns if column.rows.dtype.kind == "f")
    num_nan = sum(int(np.isnan(rows).sum()) for rows in floats)
    if num_nan:
        _logger.warning(
            "The client with the id %r has values that are not a number (NaN): %d."
            " Weights that are trained on them are NaN.",
            client,
            num_nan,
        )
    held = [column.splits for column in value.columns if column.splits is not None]
    if not held:
        return
    sizes = np.stack([np.diff(splits) for splits in held])
    differing = np.flatnonzero((sizes != sizes[:1]).any(axis=0))
    if len(differing):
        batch = int(differing[0])
        raise errors.ValueMismatchError(
            f"Expected one number of rows in the batch {batch} of the client with the"
            f" id {client!r}, found {sizes[:, batch].tolist()}, in the order of its"
            " type."
        )


@dataclasses.dataclass(frozen=True)
class ClientMember:
    """A reference to one client of a source, which stands for the client's value."""

    source: ClientSource
    position: int

    def read(self) -> Plain:
        """Return the client's value, or raise as `ClientSource.read` does."""
        return self.source.read(self.position)


@dataclasses.dataclass(frozen=True, repr=False)
class ClientReference(ClientMember):
    """A reference to one client's data, which users can pass in place of the data.

    Attributes:
        type_signature: Type of the client's value.
        id: The client's id.
        weight: Cost of the client's work, or None if unknown.
    """

    type_signature: fl.Type
    id: Hashable
    weight: float | None

    @override
    def __repr__(self) -> str:
        held = errors.cut(str(self.type_signature))
        return f"<client {errors.describe(self.id)}: {held}>"

    def check_type(self, type_spec: fl.Type) -> None:
        """Raise ValueMismatchError unless the client's value is of `type_spec`."""
        _check_type(self.type_signature, type_spec)

    def check_batches(self) -> None:
        """Check the client's batches as `ClientSource.check_batches` does."""
        self.source.check_batches(self.position, self.id)


@dataclasses.dataclass(frozen=True, eq=False)
class ClientRun(ClientSequence):
    """A reference to some clients of a source, which stands for a list of their values.

    Attributes:
        type_signature: Type of one client's value.
        positions: i64[clients]: position of each client in the source. A position may
            occur several times.
        weights: f64[clients]: cost of each client's work, or None if unknown.
        ids: One id for each client, in order. Empty if the clients have no ids, and in
            the slices that workers receive.
    """

    source: ClientSource
    type_signature: fl.Type
    positions: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None
    ids: tuple[Hashable, ...] = ()

    @override
    def __len__(self) -> int:
        return len(self.positions)

    @override
    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return ClientMember(self.source, int(self.positions[index]))
        cut = cast("slice[Any, Any, Any]", index)
        weights = None if self.weights is None else self.weights[cut]
        return ClientRun(self.source, self.type_signature, self.positions[cut], weights)

    def without(self, dropped: Sequence[int]) -> "ClientRun":
        """Return a run without the clients at the indices `dropped` of this run."""
        weights = None if self.weights is None else np.delete(self.weights, dropped)
        positions = np.delete(self.positions, dropped)
        return ClientRun(self.source, self.type_signature, positions, weights)

    def check_type(self, type_spec: fl.Type) -> None:
        """Raise ValueMismatchError unless the clients' values are of `type_spec`."""
        _check_type(self.type_signature, type_spec)

    @property
    def key(self) -> tuple[str, bytes]:
        """A key that is equal for runs of the same clients."""
        return self.source.token, self.positions.tobytes()


def _check_type(found: fl.Type, wanted: fl.Type) -> None:
    if not wanted.is_assignable_from(found):
        raise errors.ValueMismatchError(
            f"Expected client data of type `{wanted}`, found"
            f" `{found}`{_advise(wanted, found)}."
        )


def as_run(value: object, type_spec: fl.Type) -> ClientRun | None:
    """Return a value for clients as a `ClientRun`, or None if that is not possible.

    A list of references to clients can become a `ClientRun`. `type_spec` is the type of
    one client's value. Raises ValueMismatchError if clients have another type.
    """
    run = value if isinstance(value, ClientRun) else _gather(value)
    if run is None:
        return None
    run.check_type(type_spec)
    return ClientRun(
        run.source, run.type_signature, run.positions, run.weights, run.ids
    )


CODES = '`pandas.Series(labels).astype("category").cat.codes`, in the expected dtype'
"""The expression that turns a user's string labels into numbers, for errors."""


def advise_label_type(dtype: np.dtype[Any], shape: Sequence[int | None] | None) -> str:
    """Return advice for an error: how to declare a model with such labels."""
    label_type = f"fl.TensorType(np.{dtype.name}, {[None, *(shape or ())[1:]]})"
    return f"have a model of such labels by `label_type={label_type}` of `from_keras`"


def _advise(wanted: fl.Type, found: fl.Type) -> str:
    """Return advice for a user whose data has another type than `wanted`, or ""."""
    sequences = isinstance(wanted, fl.SequenceType), isinstance(found, fl.SequenceType)
    if not all(sequences):
        return ""
    declared, given = _named_leaves(wanted), _named_leaves(found)
    pairs = {
        name: (declared[name], leaf)
        for name, leaf in given.items()
        if name in declared and declared[name] != leaf
    }
    ranks = {len(w.shape or ()) - len(f.shape or ()) for w, f in pairs.values()}
    if ranks == {1} and len(pairs) == len(declared):
        return ": make batches of rows by `data.batch(32)`, or by `batch_size`"
    steps: list[str] = []
    if "y" in declared.keys() - given.keys():
        steps.append("name the column of labels as `y`")
    if ranks - {0}:
        steps.append("a list of one column has a dimension more than the column")
    texts = [name for name, (_, leaf) in pairs.items() if leaf.dtype.type is np.str_]
    inputs = [name for name in texts if name.split(".")[0] != "y"]
    if inputs:
        steps.append(
            f"`{inputs[0]}` has strings, for an input of the model that goes through"
            " `keras.layers.StringLookup`"
        )
    if len(inputs) < len(texts):
        steps.append(f"the labels are strings: make a column of their codes, {CODES}")
    casts = {
        name: declares.dtype.name
        for name, (declares, leaf) in pairs.items()
        if declares.dtype != leaf.dtype and name not in texts
    }
    if casts:
        columns = ", ".join(f"`{name}` to {dtype}" for name, dtype in casts.items())
        dtype = next(iter(casts.values()))
        steps.append(
            f"cast the columns of {columns} by `dtypes`, such as"
            f' `dtypes={{"column": np.{dtype}}}`, or before by `.astype("{dtype}")`'
        )
    if "y" in pairs and "y" not in texts:
        found_labels = pairs["y"][1]
        steps.append(f"or {advise_label_type(found_labels.dtype, found_labels.shape)}")
    return f": {'; '.join(steps)}" if steps else ""


def _named_leaves(type_spec: fl.Type) -> dict[str, fl.TensorType]:
    element = type_spec.element if isinstance(type_spec, fl.SequenceType) else type_spec
    return {
        ".".join(map(str, path)): leaf
        for path, leaf in trees.named_leaves(element)
        if isinstance(leaf, fl.TensorType)
    }


def _gather(value: object) -> ClientRun | None:
    if not isinstance(value, list | tuple) or not value:
        return None
    found = list(cast("Iterable[object]", value))
    members = [member for member in found if isinstance(member, ClientReference)]
    if len(members) < len(found):
        return None
    first = members[0]
    if any(member.source is not first.source for member in members):
        return None
    weights = [member.weight for member in members if member.weight is not None]
    return ClientRun(
        first.source,
        first.type_signature,
        np.array([member.position for member in members], np.int64),
        np.array(weights, np.float64) if len(weights) == len(members) else None,
        tuple(member.id for member in members),
    )


def plain_id(client: Any) -> Any:
    """Return a client's id with NumPy scalars replaced by Python objects.

    The order of a client's shuffled rows depends on the text of its id. NumPy's scalars
    equal Python's numbers and strings, but have other texts.
    """
    if isinstance(client, tuple) and not hasattr(client, "_fields"):
        return tuple(map(plain_id, cast("tuple[Any, ...]", client)))
    if isinstance(client, np.number | np.str_ | np.bytes_ | np.bool_):
        return client.item()
    return client


class NamedClients(list[Any]):
    """A list with a value for each client, and the ids of these clients.

    Args:
        values: One value for each client.
        ids: The id of each client, in the order of `values`.

    Attributes:
        ids: The id of each client. A slice of the list is a list without ids.
    """

    def __init__(self, values: Iterable[Any], ids: Iterable[Hashable]) -> None:
        super().__init__(values)
        self.ids = tuple(map(plain_id, ids))


ClientIds: TypeAlias = tuple[Hashable, ...]
"""The ids of all `ClientReference`s in one client's value, which may be a tuple."""


def check_pairs(arg: Plain, type_spec: fl.Type | None) -> None:
    """Raise ValueMismatchError unless all parts of an argument have equal ids.

    Values of clients are paired by index, so the ids at each index must be equal. A
    part without ids, such as a list of arrays, is not compared.
    """
    if type_spec is None:
        return
    placed = [
        part
        for part_type, part in stored.placed_parts(arg, type_spec)
        if type_checks.differs_by_client(part_type)
    ]
    if len(placed) == 1 and isinstance(placed[0], ClientRun):
        return
    check_same_clients(map(ids_by_client, placed))


def check_same_clients(parts: Iterable[Sequence[ClientIds]]) -> None:
    """Raise ValueMismatchError unless values of clients have the same ids in order.

    `parts` has the result of `ids_by_client` for each value.
    """
    named = [ids for ids in parts if ids]
    for index, found in enumerate(itertools.zip_longest(*named, fillvalue=())):
        first, *others = [*itertools.chain.from_iterable(found)] or [None]
        for other in others:
            if other != first:
                raise _no_pair(named, index, first, other)


def ids_by_client(part: Any) -> list[ClientIds]:
    """Return the ids in each client's value, or an empty list if there are none."""
    if isinstance(part, ClientRun | NamedClients):
        return [(each,) for each in part.ids]
    if not isinstance(part, list | tuple):
        return []
    members = list(cast("Sequence[Any]", part))
    # A client's value may be a tuple of references. Only the first tuple is searched,
    # because a search of all tuples of arrays would take long.
    are_pairs = bool(_ids_inside(members[0] if members else None))
    found = [
        _ids_inside(each) if are_pairs or isinstance(each, ClientReference) else ()
        for each in members
    ]
    return found if any(found) else []


def _ids_inside(value: Any) -> ClientIds:
    if isinstance(value, ClientReference):
        return (value.id,)
    if not isinstance(value, tuple):
        return ()
    return tuple(
        each for part in cast("ClientIds", value) for each in _ids_inside(part)
    )


def _no_pair(
    named: Sequence[Sequence[ClientIds]], index: int, first: object, other: object
) -> errors.ValueMismatchError:
    """Return the error that the values of different clients are at one index."""
    sets = [set(itertools.chain.from_iterable(ids)) for ids in named]
    then = "some clients are in one of them only: select those that all have,"
    if all(each == sets[0] for each in sets):
        then = "these are the same clients in another order: put them in one order,"
    return errors.ValueMismatchError(
        "Expected the same client at each index of all arguments that are placed at"
        f" clients, found the ids {errors.describe(first)} and"
        f" {errors.describe(other)} at index {index}: {then} such as by"
        " `data.select(ids)`."
    )


_LEAST_BYTES = 64 * 1024
"""Minimum bytes of a cached list. A smaller list is sent as fast as a reference."""

_SEEN_LISTS = 64
"""Number of lists that were passed once and whose hashes are remembered."""

_SAMPLED_ARRAYS, _SAMPLED_BYTES = 64, 128


class _ListPickler(pickle.Pickler):
    """Pickles lists of numbers, strings and arrays.

    Raises PicklingError for other objects, and for an array that is not contiguous.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        is_named = isinstance(obj, tuple) and hasattr(obj, "_fields")
        is_spread = isinstance(obj, np.ndarray) and not obj.flags.forc
        if is_spread or not (is_named or isinstance(obj, _PICKLED)):
            raise pickle.PicklingError
        return NotImplemented


_PICKLED = (
    np.ndarray,
    np.generic,
    np.dtype,
    collections.OrderedDict,
    types.FunctionType,  # pickles refer to these three to construct the others
    types.BuiltinFunctionType,
    type,
)


@dataclasses.dataclass(frozen=True)
class _Content:
    """The content of a list.

    `structure` is the pickled list without the bytes of its arrays. `arrays` are the
    bytes of the list's own arrays, or copies of them.
    """

    structure: bytes
    arrays: Sequence[Any]
    num_bytes: int

    @classmethod
    def of(cls, members: Sequence[Any]) -> "_Content | None":
        """Return the content of a list, or None if it has objects of other types."""
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        protocol = pickle.HIGHEST_PROTOCOL
        try:
            _ListPickler(file, protocol, buffer_callback=buffers.append).dump(members)
        except (pickle.PicklingError, RecursionError):
            return None
        arrays = [buffer.raw() for buffer in buffers]
        num_bytes = file.tell() + sum(array.nbytes for array in arrays)
        return cls(file.getvalue(), arrays, num_bytes)

    def sample(self) -> bytes:
        """Return a hash of the structure and of some bytes of some arrays."""
        found = hashlib.sha256(self.structure)
        for array in self.arrays[:: 1 + len(self.arrays) // _SAMPLED_ARRAYS]:
            found.update(array[:_SAMPLED_BYTES])
            found.update(array[-_SAMPLED_BYTES:])
        return found.digest()

    def equals(self, other: "_Content") -> bool:
        """Return whether both contents are equal, byte for byte."""
        return self.structure == other.structure and all(
            map(operator.eq, self.arrays, other.arrays)
        )

    def copy(self) -> "_Content":
        return dataclasses.replace(self, arrays=list(map(bytearray, self.arrays)))

    def read(self) -> Sequence[Any]:
        """Return the list. Its arrays share these bytes."""
        return pickle.loads(self.structure, buffers=self.arrays)


class ListCache:
    """Recognizes lists of client values that are passed again, by their content.

        first time     a hash of a sample of the list is remembered
        second time    the list is copied, and a `ClientRun` of the copy replaces it
        later          the list is compared with the copy, byte for byte

    Workers can then cache the clients' data. A modified list counts as a new list. Any
    thread may use this. Each copied list counts twice for `max_bytes`, because its
    sequences are copied again as columns. The least recently used list is dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._seen: LruCache[Hashable, Hashable] = LruCache(_SEEN_LISTS)
        self._kept: LruCache[Hashable, tuple[_Content, ClientRun]]
        self._kept = LruCache(max_weight=max_bytes, least=0)

    def find(
        self,
        members: Sequence[Any],
        member: fl.Type,
        read: Callable[[Sequence[Any]], list[Plain]],
    ) -> Sequence[Plain]:
        """Return the plain values of a list of clients, or a `ClientRun` for them.

        `member` is the type of one client's value. `read` converts a list of clients to
        plain values, and is not called for a recognized list.
        """
        content = _Content.of(members) if self._max_bytes else None
        if content is None or content.num_bytes < _LEAST_BYTES:
            return read(members)
        if 2 * content.num_bytes > self._max_bytes:
            return read(members)
        key = content.sample(), member
        kept = self._kept.find(key)
        if kept is not None and kept[0].equals(content):
            return kept[1]
        if self._seen.find(key) is None:
            self._seen.put(key, key)
            return read(members)
        copy = content.copy()
        run = _place(read(copy.read()), member)
        self._kept.put(key, (copy, run), 2 * copy.num_bytes)
        return run

    def clear(self) -> None:
        """Drop all lists."""
        self._kept.clear()
        self._seen.clear()


def _place(held: Sequence[Plain], member: fl.Type) -> ClientRun:
    rows = stored.count_rows_of_each(held)
    weights = None if rows is None else np.array(rows, np.float64)
    return ClientRun(HeldSource(held), member, np.arange(len(held)), weights)
