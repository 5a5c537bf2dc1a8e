"""Which NumPy dtype and shape the cells of a column have, by its Arrow type."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.imports import pyarrow
from ray_fed.values.columnar_sequence import Dims


def decoded(array: Any) -> Any:
    """Return an Arrow array without dictionary encoding, views or fixed-size bytes.

    A dictionary may have values that no row has, such as a null, or one value twice.
    Raises ConfigError for categories that are neither text nor numbers.
    """
    wanted = value_type(array.type)
    if wanted == array.type:
        return array
    if hasattr(wanted, "extension_name"):  # such as the intervals of `pandas.cut`
        raise errors.ConfigError(
            f"Expected categories that are text or numbers, found `{wanted}`: give them"
            " names, such as by `pandas.cut(..., labels=[...])`, or pass"
            ' `column.astype("string")`.'
        )
    return array.cast(wanted)


def decoded_table(table: Any) -> Any:
    """Return an Arrow table with all columns converted by `decoded`."""
    for index, field in enumerate(table.schema):
        if value_type(field.type) != field.type:
            column = decoded(table.column(index))
            table = table.set_column(index, field.name, column)
    return table


def value_type(arrow_type: Any) -> Any:
    """Return the Arrow type that an array of `arrow_type` has after `decoded`."""
    if pyarrow.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if pyarrow.types.is_string_view(arrow_type):
        return pyarrow.large_string()
    if pyarrow.types.is_binary_view(arrow_type) or pyarrow.types.is_fixed_size_binary(
        arrow_type
    ):
        return pyarrow.large_binary()
    return arrow_type


def cell_of(arrow_type: Any) -> tuple[Any, Dims]:
    """Return the Arrow type of the values in a column's cells, and a cell's shape."""
    arrow_type = value_type(arrow_type)
    shape: list[int] = []
    if hasattr(arrow_type, "shape") and hasattr(arrow_type, "storage_type"):
        shape = list(arrow_type.shape)
        inside = getattr(arrow_type, "value_type", None)  # Ray's tensors say it so:
        arrow_type = inside or arrow_type.scalar_type
    while pyarrow.types.is_fixed_size_list(arrow_type):
        shape.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    ragged = pyarrow.types.is_list(arrow_type) or pyarrow.types.is_large_list(
        arrow_type
    )
    if ragged and not shape:
        return arrow_type.value_type, (None,)
    return arrow_type, tuple(shape)


def is_list(arrow_type: Any) -> bool:
    """Return whether a column's cells are lists, of a fixed length or not."""
    return (
        pyarrow.types.is_list(arrow_type)
        or pyarrow.types.is_large_list(arrow_type)
        or pyarrow.types.is_fixed_size_list(arrow_type)
    )


def is_text(arrow_type: Any) -> bool:
    """Return whether values of an Arrow type are strings or bytes."""
    return (
        pyarrow.types.is_string(arrow_type)
        or pyarrow.types.is_large_string(arrow_type)
        or pyarrow.types.is_binary(arrow_type)
        or pyarrow.types.is_large_binary(arrow_type)
    )


def dtype_of(arrow_type: Any) -> np.dtype[Any] | None:
    """Return the dtype for an Arrow type: object for strings, None if no dtype fits."""
    if pyarrow.types.is_integer(arrow_type) or pyarrow.types.is_floating(arrow_type):
        return np.dtype(arrow_type.to_pandas_dtype())
    if pyarrow.types.is_boolean(arrow_type):
        return np.dtype(np.bool_)
    return np.dtype(object) if is_text(arrow_type) else None


def to_numpy(array: Any) -> NDArray[Any]:
    """Convert an Arrow array to NumPy. Strings become an object array of bytes."""
    if not is_text(array.type):
        return array.to_numpy(zero_copy_only=False)
    values = np.empty(len(array), object)
    values[:] = array.cast(pyarrow.large_binary()).to_pylist()
    return values


def is_castable(arrow_type: Any) -> bool:
    """Return whether a type that no tensor can hold can be cast to numbers."""
    return (
        pyarrow.types.is_decimal(arrow_type)
        or pyarrow.types.is_null(arrow_type)
        or (
            pyarrow.types.is_temporal(arrow_type)
            and not pyarrow.types.is_interval(arrow_type)
        )
    )


def describe_cast(name: str, arrow_type: Any) -> str:
    """Return what a user can do about a column whose values no tensor can hold."""
    if pyarrow.types.is_decimal(arrow_type):
        return f'pass `dtypes={{"{name}": np.float64}}`, or leave the column out.'
    if pyarrow.types.is_null(arrow_type):
        return (
            "every cell of it is missing: leave the column out, or let NaN through with"
            f' `dtypes={{"{name}": np.float32}}` and `missing="keep"`.'
        )
    if pyarrow.types.is_temporal(arrow_type):
        unit = getattr(arrow_type, "unit", "days")
        if pyarrow.types.is_timestamp(arrow_type) or pyarrow.types.is_date(arrow_type):
            unit += " since 1970-01-01"
        return (
            f'pass `dtypes={{"{name}": np.int64}}` for whole numbers in its unit'
            f' ({unit}), as pandas\' `astype("int64")` gives them, or leave the column'
            " out."
        )
    return "convert it, or leave the column out."
