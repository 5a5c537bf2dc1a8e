"""Clients by reference: names of their values, which are read where the work is.

    ClientSource    has every client's value: arrays, or a function of the client
    HeldSource      one whose values are in this process
    ClientMember    one client of a source; stands for its value
    ClientReference the same for users, with the client's weight
    ClientRun       some of them, in order; stands for a value placed at clients
    ListCache       makes runs of lists that come again

None of these is read on its way: a run is cut by slicing, and the executor that embeds
a member reads it from its source.
"""

import abc
import collections
import dataclasses
import hashlib
import io
import logging
import operator
import pickle
import threading
import types
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import IO, Any, Literal, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language.structs import Plain
from ray_fed.values import stored
from ray_fed.values.columnar_sequence import ColumnarSequence
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import ClientSequence

_logger = logging.getLogger(__name__)


class ClientSource(abc.ABC):
    """The values of all clients of one kind, by position.

    Attributes:
        token: names the source; sources with the same token give the same values.
        is_resident: whether reading costs nothing, or nothing beside reading the
            base, so that caching is of no use.
        opens_once: whether the first read opens what all further reads need, so that a
            reader should keep the source.
        num_bytes: of the arrays in this process.
        base: has the values that this one arranges in another way; None: it has its
            own.
    """

    token: str
    is_resident: bool = False
    opens_once: bool = False
    num_bytes: int = 0
    base: "ClientSource | None" = None

    @abc.abstractmethod
    def read(self, position: int) -> Plain:
        """Return what a client has, as a plain value.

        Raises:
            ValueMismatchError: it is not of the source's type.
            ComputationError: reading it raised.
        """

    def read_base(self, position: int) -> Plain:
        """Return what a client has in `base`; see `read`."""
        if self.base is None:
            raise NotImplementedError(f"{type(self).__name__} has no base.")
        return self.base.read(position)

    @property
    def function(self) -> Callable[[Any], Any] | None:
        """The user's function that is pickled with the source; None without one."""
        return None

    def opened(self) -> "ClientSource":
        """Return the source that this one stands for, or itself."""
        return self

    def opened_base(self) -> "ClientSource | None":
        """Return the base, None also where the source was not opened so far."""
        return self.base

    def arrange(self, value: Plain, position: int) -> Plain:
        """Return what a client has, from what it has in `base`."""
        raise NotImplementedError(f"{type(self).__name__} has no base: {position}")

    def over(self, base: "ClientSource") -> "ClientSource":
        """Return this source over another base with the same values."""
        raise NotImplementedError(f"{type(self).__name__} has no base: {base}")

    def check_batches(self, position: int, client: Hashable) -> None:
        """Raise unless each batch of a client has one number of rows; see `batches`.

        Now, where its value is at hand; else when it is read. Sources that make batches
        of rows have no need to.

        Raises:
            ValueMismatchError: a batch has several; client and batch are named.
        """
        if self.base is not None:
            self.base.check_batches(position, client)

    def occasion(self) -> Hashable:
        """Return what decides the values that differ from call to call; None: nothing.

        Read where the values are, under the key of the work that runs.
        """
        return None


class HeldSource(ClientSource):
    """Values in this process.

    Args:
        held: plain, by position.
    """

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
    """Raise unless each element's tensors of unknown first size have one size.

    Warns of values that are not a number.
    """
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
    """Stands for what one client has, until it is read.

    Attributes:
        source: to read from.
        position: of the client in the source.
    """

    source: ClientSource
    position: int

    def read(self) -> Plain:
        """Return the plain value; see `ClientSource.read`."""
        return self.source.read(self.position)


@dataclasses.dataclass(frozen=True, repr=False)
class ClientReference(ClientMember):
    """One client of a source, as users meet it.

    Attributes:
        type_signature: of what the client has.
        id: that the user gave it.
        weight: what its work costs; None: not known.
    """

    type_signature: fl.Type
    id: Hashable
    weight: float | None

    @override
    def __repr__(self) -> str:
        held = errors.cut(str(self.type_signature))
        return f"<client {errors.describe(self.id)}: {held}>"

    def check_batches(self) -> None:
        """Raise unless each batch has one number of rows, in all that it holds.

        Now, where the value is at hand; else when a worker reads it.

        Raises:
            ValueMismatchError: a batch has several; client and batch are named.
        """
        self.source.check_batches(self.position, self.id)


@dataclasses.dataclass(frozen=True, eq=False)
class ClientRun(ClientSequence):
    """Stands for what some clients have: a value placed at clients, unread.

    Attributes:
        source: of all of them.
        type_signature: of one client's value.
        positions: i64[clients], in the source; a client may stand there twice.
        weights: f64[clients], what each client's work costs; None: not known.
    """

    source: ClientSource
    type_signature: fl.Type
    positions: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None

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
        """Return these clients but for those at some places."""
        weights = None if self.weights is None else np.delete(self.weights, dropped)
        positions = np.delete(self.positions, dropped)
        return ClientRun(self.source, self.type_signature, positions, weights)

    def check_type(self, type_spec: fl.Type) -> None:
        """Raise ValueMismatchError unless clients have values of a type."""
        if not type_spec.is_assignable_from(self.type_signature):
            raise errors.ValueMismatchError(
                f"Expected what a client has of type `{type_spec}`, found"
                f" `{self.type_signature}`{_advise(type_spec, self.type_signature)}."
            )

    @property
    def key(self) -> tuple[str, bytes]:
        """What runs with equal values have in common."""
        return self.source.token, self.positions.tobytes()


def as_run(value: object, type_spec: fl.Type) -> ClientRun | None:
    """Return a value for clients as a run, if it is one or a list out of one source.

    Args:
        value: what a caller gave.
        type_spec: of one client's value.

    Raises:
        ValueMismatchError: the clients have values of another type.
    """
    run = value if isinstance(value, ClientRun) else _gather(value)
    if run is None:
        return None
    run.check_type(type_spec)
    return ClientRun(run.source, run.type_signature, run.positions, run.weights)


CODES = '`pandas.Series(labels).astype("category").cat.codes`, in the expected dtype'
"""What numbers labels of strings become."""


def advise_label_type(dtype: np.dtype[Any], shape: Sequence[int | None] | None) -> str:
    """Return how a model has labels of another type, as an error goes on."""
    label_type = f"fl.TensorType(np.{dtype.name}, {[None, *(shape or ())[1:]]})"
    return f"have a model of such labels by `label_type={label_type}` of `from_keras`"


def _advise(wanted: fl.Type, found: fl.Type) -> str:
    """Return what makes one type of another, as an error goes on; nothing: unknown."""
    sequences = isinstance(wanted, fl.SequenceType), isinstance(found, fl.SequenceType)
    if not all(sequences):
        return ""
    declared, given = dict(_named_leaves(wanted, "")), dict(_named_leaves(found, ""))
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


def _named_leaves(type_spec: fl.Type, name: str) -> Iterator[tuple[str, fl.TensorType]]:
    if isinstance(type_spec, fl.SequenceType):
        yield from _named_leaves(type_spec.element, name)
    elif isinstance(type_spec, fl.TensorType):
        yield name, type_spec
    elif isinstance(type_spec, fl.StructType):
        for index, (inner, member) in enumerate(type_spec.items()):
            path = f"{name}.{inner or index}" if name else str(inner or index)
            yield from _named_leaves(member, path)


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
    )


_LEAST_BYTES = 64 * 1024
"""Smaller lists travel inside of a call, as quick as what would stand for them."""

_SEEN_LISTS = 64
"""Lists that came once, of which a few bytes are remembered."""

_SAMPLED_ARRAYS, _SAMPLED = 64, 16


class _ListPickler(pickle.Pickler):
    """Writes lists of numbers, text and arrays; the arrays' bytes stay where they are.

    Raises:
        PicklingError: there is something else, or an array whose bytes are in pieces.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[NDArray[Any]] = []

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            order = "C" if obj.flags.c_contiguous else "F"
            whole = obj if order == "C" else obj.T
            if not whole.flags.c_contiguous:
                raise pickle.PicklingError
            if obj.dtype.kind not in "biufc":  # others' memory is not shown as it is
                whole = whole.reshape(-1).view(np.uint8)
            self.arrays.append(whole)
            return _lay_array, (obj.shape, obj.dtype, order)
        is_named = isinstance(obj, tuple) and hasattr(obj, "_fields")
        if is_named or isinstance(obj, _PICKLED):
            return NotImplemented
        raise pickle.PicklingError


_PICKLED = (
    np.ndarray,
    np.generic,
    np.dtype,
    collections.OrderedDict,
    types.FunctionType,  # these three say how the others are made
    types.BuiltinFunctionType,
    type,
)


def _lay_array(*about: Any) -> NDArray[Any]:
    """Stand for `_ListUnpickler.lay` in a structure."""
    raise NotImplementedError(f"An array without its bytes: {about}.")


class _ListUnpickler(pickle.Unpickler):
    def __init__(self, content: "_Content") -> None:
        super().__init__(io.BytesIO(content.structure))
        self._arrays = iter(content.arrays)

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (__name__, _lay_array.__name__):
            return self.lay
        return super().find_class(module_name, global_name)

    def lay(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], order: Literal["C", "F"]
    ) -> NDArray[Any]:
        return np.ndarray(shape, dtype, next(self._arrays), order=order)


@dataclasses.dataclass(frozen=True)
class _Content:
    """What a list holds.

    Attributes:
        structure: all but the bytes of its arrays.
        arrays: these, where they are, or copied.
        num_bytes: of all.
    """

    structure: bytes
    arrays: Sequence[Any]
    num_bytes: int

    @classmethod
    def of(cls, members: Sequence[Any]) -> "_Content | None":
        """Return what a list holds; None: something else than its bytes counts."""
        file = io.BytesIO()
        pickler = _ListPickler(file)
        try:
            pickler.dump(members)
        except (pickle.PicklingError, RecursionError):
            return None
        num_bytes = file.tell() + sum(array.nbytes for array in pickler.arrays)
        return cls(file.getvalue(), pickler.arrays, num_bytes)

    def sample(self) -> bytes:
        """Return what tells lists apart which differ in shape, or at most places."""
        found = hashlib.sha256(self.structure)
        for array in self.arrays[:: 1 + len(self.arrays) // _SAMPLED_ARRAYS]:
            flat = array.reshape(-1)
            found.update(flat[:_SAMPLED].tobytes() + flat[-_SAMPLED:].tobytes())
        return found.digest()

    def equals(self, other: "_Content") -> bool:
        """Return whether a list holds the same bytes as this copy."""
        return self.structure == other.structure and all(
            map(operator.eq, self.arrays, other.arrays)
        )

    def copy(self) -> "_Content":
        copies = [bytearray(memoryview(array)) for array in self.arrays]
        return dataclasses.replace(self, arrays=copies)

    def read(self) -> Sequence[Any]:
        """Return the list, over the same bytes."""
        return _ListUnpickler(self).load()


class ListCache:
    """Lists with a value for each client, kept by what they hold.

        once         some bytes of it are remembered
        once more    it is copied, and clients by reference stand for it from now on
        again        it is compared with the copy, byte for byte

    So workers keep what they made of it. A list that was written to is another one.
    Any thread may use this.

    Args:
        max_bytes: of all lists that are kept, each counted twice, as sequences that are
            laid end to end are copies, too; the least recently used one goes first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._seen: LruCache[Hashable, Hashable] = LruCache(_SEEN_LISTS)
        self._kept: collections.OrderedDict[Hashable, tuple[_Content, ClientRun]]
        self._kept = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(
        self,
        members: Sequence[Any],
        member: fl.Type,
        read: Callable[[Sequence[Any]], list[Plain]],
    ) -> Sequence[Plain]:
        """Return the plain values of a list of clients, or a run that stands for them.

        Args:
            members: what each client has, unchecked.
            member: the type of that.
            read: returns the plain values of such a list; called where none is kept.
        """
        content = _Content.of(members) if self._max_bytes else None
        if content is None or content.num_bytes < _LEAST_BYTES:
            return read(members)
        if 2 * content.num_bytes > self._max_bytes:
            return read(members)
        key = content.sample(), member
        with self._lock:
            kept, run = self._kept.get(key, (None, []))
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is not None and kept.equals(content):
            return run
        if self._seen.find(key) is None:
            self._seen.put(key, key)
            return read(members)
        copy = content.copy()
        run = _place(read(copy.read()), member)
        with self._lock:
            self._kept[key] = copy, run
            while self._count_bytes() > self._max_bytes:
                self._kept.popitem(last=False)
        return run

    def _count_bytes(self) -> int:
        return 2 * sum(copy.num_bytes for copy, _ in self._kept.values())

    def clear(self) -> None:
        """Forget all lists."""
        with self._lock:
            self._kept.clear()
        self._seen.clear()


def _place(held: Sequence[Plain], member: fl.Type) -> ClientRun:
    """Return values of clients in this process as a run."""
    rows = stored.count_rows_of_each(held)
    weights = None if rows is None else np.array(rows, np.float64)
    return ClientRun(HeldSource(held), member, np.arange(len(held)), weights)
