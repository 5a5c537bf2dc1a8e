"""Types of arrow, and the NumPy dtype and shape of a column's cells."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.imports import pyarrow
from ray_fed.values.columnar_sequence import Dims


def decoded(array: Any) -> Any:
    """Return an array, or chunks, with values in place of indices of a dictionary.

    A dictionary may have values that no row has, such as a null, or one value twice.
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
    """Return a table with `decoded` columns."""
    for index, field in enumerate(table.schema):
        if value_type(field.type) != field.type:
            column = decoded(table.column(index))
            table = table.set_column(index, field.name, column)
    return table


def value_type(arrow_type: Any) -> Any:
    """Return the arrow type that `decoded` gives the values of a column."""
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
    """Return the arrow type of the values of a column's cells, and the cells' shape."""
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
    """Return whether values are strings or bytes."""
    return (
        pyarrow.types.is_string(arrow_type)
        or pyarrow.types.is_large_string(arrow_type)
        or pyarrow.types.is_binary(arrow_type)
        or pyarrow.types.is_large_binary(arrow_type)
    )


def dtype_of(arrow_type: Any) -> np.dtype[Any] | None:
    """Return the dtype of values, object for strings, or None if no tensor has it."""
    if pyarrow.types.is_integer(arrow_type) or pyarrow.types.is_floating(arrow_type):
        return np.dtype(arrow_type.to_pandas_dtype())
    if pyarrow.types.is_boolean(arrow_type):
        return np.dtype(np.bool_)
    return np.dtype(object) if is_text(arrow_type) else None


def to_numpy(array: Any) -> NDArray[Any]:
    """Return the values of an array. Strings become objects of bytes."""
    if not is_text(array.type):
        return array.to_numpy(zero_copy_only=False)
    values = np.empty(len(array), object)
    values[:] = array.cast(pyarrow.large_binary()).to_pylist()
    return values


def is_castable(arrow_type: Any) -> bool:
    """Return whether a cast makes numbers of values that no tensor can hold."""
    return (
        pyarrow.types.is_decimal(arrow_type)
        or pyarrow.types.is_null(arrow_type)
        or (
            pyarrow.types.is_temporal(arrow_type)
            and not pyarrow.types.is_interval(arrow_type)
        )
    )


def describe_cast(name: str, arrow_type: Any) -> str:
    """Return advice on a column whose values no tensor can hold."""
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
