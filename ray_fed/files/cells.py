"""Cells of a client's rows as numpy arrays, without a copy where that can be."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import is_list, is_text, to_numpy
from ray_fed.files.features import Features, Leaf
from ray_fed.values.columnar_sequence import Column, ColumnarSequence


def decode(features: Features, table: Any, client: object) -> ColumnarSequence:
    """Return the rows of a client as a sequence, without a copy where that can be.

    Args:
        features: what they are.
        table: of arrow, with `columns`, `decoded_table`.
        client: its id, for errors.

    Raises:
        ValueMismatchError: a cell is null or not a number, does not fit the dtype
            that it is cast to, or a list has another length than its column's type.
    """
    if features.missing == "drop":
        table = table.filter(find_whole(table))
    reader = _Cells(features, table, client)
    columns = tuple(map(reader.read, features.leaves))
    return ColumnarSequence(columns, table.num_rows)


def find_whole(table: Any) -> NDArray[np.bool_]:
    """Return which rows have neither a null nor a NaN, in lists neither."""
    whole = np.ones(table.num_rows, np.bool_)
    for column in table.columns:
        whole &= ~_find_missing(column)
    return whole


def _find_missing(column: Any) -> NDArray[np.bool_]:
    compute = opening.import_extra("pyarrow.compute")
    types = opening.import_extra("pyarrow.types")
    array = _combined(column)
    is_float = types.is_floating(array.type)
    missing = np.array(compute.is_null(array, nan_is_null=is_float))
    if is_list(array.type):
        inside = _find_missing(array.flatten())
        missing[compute.list_parent_indices(array).to_numpy()[inside]] = True
    return missing


def _combined(column: Any) -> Any:
    """Return a column, in one or many chunks, as one array."""
    pyarrow: Any = opening.import_extra("pyarrow")
    array = column
    if isinstance(array, pyarrow.ChunkedArray):
        is_one = array.num_chunks == 1  # `combine_chunks` would copy it
        array = array.chunk(0) if is_one else array.combine_chunks()
    return array.storage if hasattr(array, "storage") else array


def _find_changed(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values a cast of arrow took for fitting that became others.

    Floats beyond the range of the dtype become infinite, and all but zero true.
    """
    match after.dtype.kind:
        case "f":
            return np.isinf(after) & ~np.isinf(before)
        case "b":
            return after != before
        case _:
            return np.zeros(len(after), np.bool_)


class _Cells:
    """Reads the tensors of one client's rows."""

    def __init__(self, features: Features, table: Any, client: object) -> None:
        self._features = features
        self._table = table
        self._client = client

    def read(self, leaf: Leaf) -> Column:
        """Return a tensor of all rows."""
        if leaf.shape == (None,):
            return self._ragged(leaf.columns[0], leaf)
        arrays = [self._fixed(name, leaf) for name in leaf.columns]
        return Column(np.stack(arrays, axis=1) if leaf.is_stacked else arrays[0])

    def _fixed(self, name: str, leaf: Leaf) -> NDArray[Any]:
        array = _combined(self._table.column(name))
        while is_list(array.type):
            self._check_nulls(name, array)
            array = array.flatten()
        values = self._values(name, array, leaf)
        return values.reshape(self._table.num_rows, *(leaf.shape or ()))

    def _ragged(self, name: str, leaf: Leaf) -> Column:
        array = _combined(self._table.column(name))
        self._check_nulls(name, array)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Column(self._values(name, array.flatten(), leaf), splits)

    def _check_nulls(self, name: str, array: Any) -> None:
        if not array.null_count:
            return
        then = 'fill them, or leave such rows out with `missing="drop"`'
        if is_text(array.type):
            then += ', or take each as `""` with `missing="keep"`'
        elif not is_list(array.type):
            # Whole numbers of a date's unit have no room in float32.
            is_time = opening.import_extra("pyarrow.types").is_temporal(array.type)
            dtype = "np.float64" if is_time else "np.float32"
            then += (
                f', or as NaN with `dtypes={{"{name}": {dtype}}}` and `missing="keep"`'
            )
        raise self._mismatch(name, f"{array.null_count} nulls", f"{then}.")

    def _values(self, name: str, array: Any, leaf: Leaf) -> NDArray[Any]:
        pyarrow: Any = opening.import_extra("pyarrow")
        keeps = self._features.missing == "keep"
        if leaf.cast_to is not None and leaf.cast_to.kind in "biuf":
            array = self._cast(name, array, leaf.cast_to)
        elif keeps and is_text(array.type):
            array = array.cast(pyarrow.large_binary()).fill_null(b"")
        if not (keeps and pyarrow.types.is_floating(array.type)):
            self._check_nulls(name, array)
        values = to_numpy(array)
        if values.dtype.kind == "f" and not keeps:
            self._check_nan(name, values)
        return values

    def _cast(self, name: str, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return numbers, of numbers, of their text, or of times in their unit."""
        pyarrow: Any = opening.import_extra("pyarrow")
        then = f"name a dtype other than {dtype}."
        if is_text(array.type):
            then = (
                "leave it out of `dtypes` and look strings up in the model"
                " (`keras.layers.StringLookup`), or make a column of numbers of them,"
                f' such as `frame["{name}"].astype("category").cat.codes`.'
            )
        if pyarrow.types.is_temporal(array.type):
            is_wide = array.type.bit_width == pyarrow.int64().bit_width
            array = array.view(pyarrow.int64() if is_wide else pyarrow.int32())
        try:
            cast = array.cast(pyarrow.from_numpy_dtype(dtype))
            whole = array.cast(pyarrow.float64(), safe=False)
        except pyarrow.ArrowException as error:
            raise self._mismatch(name, f"`{error}`", then) from error
        if dtype.kind != "f":
            self._check_nulls(name, cast)
        before = whole.to_numpy(zero_copy_only=False)
        changed = before[_find_changed(before, cast.to_numpy(zero_copy_only=False))]
        if len(changed):
            found = f"{len(changed)} that {dtype} does not hold, such as {changed[0]}"
            raise self._mismatch(name, found, then)
        return cast

    def _check_nan(self, name: str, values: NDArray[Any]) -> None:
        count = int(np.isnan(values).sum())
        if count:
            raise self._mismatch(
                name,
                f"{count} values that are not a number (NaN)",
                'fill them, leave such rows out with `missing="drop"`, or let them'
                ' through with `missing="keep"`: weights trained on them are NaN.',
            )

    def _mismatch(self, column: str, found: str, then: str) -> Exception:
        """Return the error that a cell does not fit."""
        return errors.ValueMismatchError(
            f"Expected values that fit in the column `{column}` of"
            f" {self._features.table} for the client {self._client!r}, found {found}:"
            f" {then}"
        )
