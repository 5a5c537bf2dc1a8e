"""Checks and casts of the batches that clients have.

Inputs and labels of a batch must have the same number of rows. This is checked here for
lists and for values of `ClientData` in memory. The result of a user's function is
checked when a worker calls the function. Files are not checked.
"""

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.program import ClientData, ClientReference

_logger = logging.getLogger("ray_fed.learning.run_loop")


class BatchCaster:
    """Casts arrays in lists of batches to the dtypes that `process.next` takes.

    An array is cast only if no number changes, except by rounding. If `cast` is None,
    the first cast is logged. Batches of a process without types stay as they are.
    `member` is the type of one client's data, or None if it is unknown.
    """

    def __init__(self, process: Any, *, cast: bool | None) -> None:
        signature = getattr(process.next, "type_signature", None)
        parameter = getattr(signature, "parameter", None)
        *_, data = getattr(parameter, "items", lambda: [("", None)])()
        element = getattr(getattr(data[1], "member", None), "element", None)
        self.member: Any = getattr(data[1], "member", None)
        self._type: Any = element if cast is not False else None
        self._is_silent = bool(cast)

    def __call__(self, batches: Any) -> Any:
        """Return cast batches. A value that is not a list is returned unchanged."""
        if self._type is None or not isinstance(batches, list):
            return batches
        before = cast("list[Any]", batches)
        after = [self._cast(batch, self._type) for batch in before]
        return before if all(map(operator.is_, before, after)) else after

    def _cast(self, value: Any, type_spec: Any) -> Any:
        if isinstance(type_spec, fl.StructType):
            types = list(type_spec.items())
            if isinstance(value, Mapping):
                named = cast("Mapping[Any, Any]", value)
                after = {n: self._cast(named[n], t) for n, t in types if n in named}
                stays = all(named[name] is made for name, made in after.items())
                return named if stays else dict(named) | after
            if type(value) is tuple and len(value) == len(types):
                pairs = zip(cast("tuple[Any, ...]", value), types, strict=True)
                members = tuple(self._cast(each, t) for each, (_, t) in pairs)
                return value if all(map(operator.is_, value, members)) else members
            return value
        if not isinstance(value, np.ndarray) or not isinstance(
            type_spec, fl.TensorType
        ):
            return value
        wanted, kinds = np.dtype(type_spec.dtype), {"i": "iu", "u": "iu", "f": "fiub"}
        is_near = value.dtype.kind in kinds.get(wanted.kind, "")
        if value.dtype == wanted or not is_near:
            return value
        with np.errstate(over="ignore"):
            made = cast("Any", value).astype(wanted)
        is_kept = (
            np.isfinite(made) == np.isfinite(value)
            if value.dtype.kind == "f"
            else (made == value)
        )
        if not np.all(is_kept):
            return value  # a later check of types refuses it
        if not self._is_silent:
            self._is_silent = True
            _logger.warning(
                "Clients have arrays of %s where the model takes %s: they are cast."
                " Pass `cast=True` to hide this warning, or `cast=False` for an error.",
                value.dtype,
                wanted,
            )
        return made


def detach(batches: Any) -> Any:
    """Copy batches with their arrays, because a lazy sequence may reuse an array."""
    match batches:
        case np.ndarray():
            return cast("NDArray[Any]", batches).copy()
        case list() | tuple() if not hasattr(batches, "_fields"):
            return type(batches)(map(detach, cast("list[Any]", batches)))
        case tuple():
            return type(batches)(*map(detach, cast("tuple[Any, ...]", batches)))
        case dict():
            named = cast("dict[Any, Any]", batches)
            return {name: detach(value) for name, value in named.items()}
        case _:
            return batches


def check_clients(data: object, member: fl.Type | None) -> None:
    """Check that `data` has a list of batches, or a reference, for each client.

    `member` is the type of one client's data, or None if it is unknown. The batches in
    lists are not checked here. Raises ConfigError for a table, and ValueMismatchError
    for a client's value of another type.
    """
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise errors.ConfigError(
            "Expected the batches of each client as `data`, found a table of"
            f" `{type(data).__name__}`: pass `ClientData.from_table(data, client=,"
            " x=, y=, batch_size=32)`."
        )
    if member is None:
        return
    if isinstance(data, ClientData):
        data.check_type(member)
    elif isinstance(data, list):
        for client in cast("list[Any]", data):
            if isinstance(client, ClientReference):
                client.check_type(member)
            elif isinstance(member, fl.SequenceType) and isinstance(
                client, Mapping | np.ndarray
            ):
                kind = "a batch" if isinstance(client, Mapping) else "an array"
                raise errors.ValueMismatchError(
                    "Expected a list of batches for each client as `data`, found"
                    f" {kind} in place of a list: pass `[[batch], ...]`, where"
                    " `[batch]` is a client with one batch."
                )


def check_batches(clients: Mapping[int, Any], ids: Sequence[object] = ()) -> None:
    """Check that inputs and labels of each batch have the same number of rows.

    `clients` has each client's batches by its index. `ids` has the ids of all clients,
    if they have ids. Labels that are NaN log a warning. Raises ValueMismatchError,
    which names the client and the batch.
    """
    for index, batches in clients.items():
        client = f"with the id {ids[index]!r}" if ids else f"`data[{index}]`"
        kind = _kind_of_one(batches)
        if kind:
            raise errors.ValueMismatchError(
                f"Expected a list of batches as the data of the client {client}, found"
                f" {kind}."
            )
        if isinstance(batches, ClientReference):
            batches.check_batches()
        if not isinstance(batches, list):
            continue
        for number, batch in enumerate(cast("list[Any]", batches)):
            counts = dict(_counts(batch))
            if len(set(counts.values())) > 1:
                shown = ", ".join(f"`{n}` {count}" for n, count in counts.items())
                raise errors.ValueMismatchError(
                    f"Expected one number of rows in the batch {number} of the client"
                    f" {client}, found {shown}: pass the inputs and the labels of the"
                    " same rows. A single row is no batch: stack rows, such as by"
                    " `np.stack`."
                )
            if _has_nan(batch):
                _logger.warning(
                    "The batch %d of the client %s has labels that are not a"
                    " number (NaN): weights that are trained on them are NaN.",
                    number,
                    client,
                )


def _kind_of_one(value: Any) -> str:
    """Describe a value that is not a list of batches, with a remedy, or return ""."""
    if hasattr(value, "iloc"):
        return (
            f"a table of `{type(value).__name__}`: pass one table of all clients to"
            " `ClientData.from_table(table, client=, x=, y=, batch_size=32)`"
        )
    if type(value) is tuple and all(hasattr(part, "ndim") for part in value):
        return f"a tuple of {len(value)} arrays: `[(x, y)]` has one batch"
    return ""


def count_rows(batches: Any) -> Any:
    """Return the sizes of a client's batches without reading its data.

    For a list, these are the numbers of rows of its batches, or None for a batch
    without an array. For another sequence, this is its length, or None if it has no
    length.
    """
    if not isinstance(batches, list):
        return len(batches) if hasattr(batches, "__len__") else None
    counts = (_counts(batch) for batch in cast("list[Any]", batches))
    return [found[0][1] if found else None for found in counts]


def _has_nan(batch: Any) -> bool:
    labels = [leaf for name, leaf in _leaves(batch, "") if name.split(".")[0] == "y"]
    return any(_is_nan(label).any() for label in labels)


def find_nan(batches: Any) -> str:
    """Return a sentence that locates the first NaN in a list of batches, or ""."""
    listed = cast("list[Any]", batches) if isinstance(batches, list) else []
    for number, batch in enumerate(listed):
        for name, value in _leaves(batch, ""):
            places = np.argwhere(_is_nan(value)).tolist()
            if places:
                row, *inside = places[0]
                column = f", column {', '.join(map(str, inside))}" if inside else ""
                where = f"in row {row}{column}"
                return f" Its batch {number} has a NaN in `{name}`, {where}."
    return ""


def _is_nan(value: Any) -> NDArray[np.bool_]:
    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return np.isnan(value) if is_float else np.zeros(0, np.bool_)


def _counts(batch: Any) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name, leaf in _leaves(batch, ""):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            found.append((name, int(shape[0])))
        elif isinstance(leaf, list):
            found.append((name, len(leaf)))
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[str, Any]", value).items())
    elif isinstance(value, tuple) and not name:
        pairs = list(zip(("x", "y"), cast("tuple[Any, ...]", value), strict=False))
    else:
        yield name, value
        return
    for key, inside in pairs:
        yield from _leaves(inside, f"{name}.{key}" if name else str(key))
