"""The clients of a table, and where their rows are.

    column of ids --> index_clients --> ClientIndex: clients' ids and numbers of rows
    row numbers --> TableRows.take --> an Arrow table of these rows

`ClientIndex` numbers the rows by client: the first client's rows come first. Its
`order` has the row of the table for each number.
"""

import abc
import dataclasses
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files.arrow_types import (
    decoded,
    decoded_table,
    is_list,
    is_text,
    value_type,
)
from ray_fed.files.features import check_columns
from ray_fed.imports import pyarrow

_logger = logging.getLogger(__name__)

_MERGED_IDS = 2**18
"""Number of ids after which the counts of several chunks are added up."""


@dataclasses.dataclass(frozen=True)
class IdColumn:
    """The name of the column with the clients' ids, and the type of the ids.

    `id_type` is `str` for text, `int` for whole numbers, and None for the column's own
    type. Another value raises ConfigError.
    """

    name: str
    id_type: type[Any] | None = None

    def __post_init__(self) -> None:
        if self.id_type not in (None, int, str):
            raise errors.ConfigError(
                "Expected `id_type` to be `str`, `int` or None, found"
                f" {errors.describe(self.id_type)}."
            )

    def type_of(self, arrow_type: Any) -> Any:
        """Return the Arrow type of the ids if the column has the type `arrow_type`."""
        is_number = pyarrow.types.is_integer(value_type(arrow_type))
        if self.id_type is str and not is_text(value_type(arrow_type)):
            return pyarrow.string()
        if self.id_type is int and not is_number:
            return pyarrow.int64()
        return arrow_type

    def cast(self, table: Any, label: str) -> Any:
        """Return an Arrow table with the column of ids converted to `id_type`.

        A table without the column is returned unchanged. Raises ValueMismatchError,
        which names the table by `label`, if an id cannot be converted.
        """
        if self.name not in table.column_names or self.id_type is None:
            return table
        place = table.column_names.index(self.name)
        column = table.column(place)
        wanted = self.type_of(column.type)
        if wanted == column.type:
            return table
        try:
            if pyarrow.types.is_floating(column.type):  # 7 or 7.0: there is no one text
                raise pyarrow.ArrowInvalid("floating-point numbers")
            if self.id_type is int and is_text(column.type):
                column = _trimmed(column)
            column = column.cast(wanted)
        except pyarrow.ArrowException as error:
            raise errors.ValueMismatchError(
                f"Expected ids that `id_type={self.id_type.__name__}` reads in the"
                f" column `{self.name}` of {label}, found {error}: write ids as text or"
                " as whole numbers."
            ) from error
        return table.set_column(place, self.name, column)

    def key_of(self, key: Any, text: str, label: str) -> Any:
        """Return the id in the name of a folder such as `client=007`.

        `key` is the id that Arrow reads from the name, or None. `text` is the id as
        text. Raises ValueMismatchError if `id_type` is `int` and `text` is no number.
        """
        if self.id_type is None or key is None:
            return key
        try:
            return self.id_type(text)
        except ValueError as error:
            raise errors.ValueMismatchError(
                f"Expected whole numbers, as `id_type=int`, in the names of folders"
                f" `{self.name}=...` of {label}, found {text!r}: pass `id_type=str`."
            ) from error

    def ambiguous(self, label: str, text: str, other: str) -> errors.ValueMismatchError:
        """Return the error for two ids, such as `007` and `7`, that are one number."""
        return errors.ValueMismatchError(
            f"Expected one way to write each id in the column `{self.name}` of {label},"
            f" found {text!r} and {other!r}, which are one whole number: pass"
            " `id_type=str` if they are two clients, or `id_type=int` if they are one."
        )

    def check_filled(self, chunk: Any, label: str) -> Any:
        """Return `chunk`, or raise ValueMismatchError if it has an empty id."""
        if (
            is_text(chunk.type)
            and pyarrow.compute.any(pyarrow.compute.equal(chunk, "")).as_py()
        ):
            raise errors.ValueMismatchError(
                f"Expected a client in every row of the column `{self.name}` of"
                f" {label}, found empty text: leave such rows out of the file."
            )
        return chunk


def _trimmed(texts: Any) -> Any:
    return pyarrow.compute.utf8_trim_whitespace(texts)


def _is_number(text: str) -> bool:
    try:
        pyarrow.scalar(text).cast(pyarrow.int64())
    except pyarrow.ArrowException:
        return False
    return True


class Spellings:
    """Finds ids of a CSV file that are one whole number, but differ as text.

    `007` and `7` are one number, but may be two clients.
    """

    def __init__(self, ids: IdColumn, label: str) -> None:
        self._ids, self._label = ids, label
        self._odd: Counter[tuple[int, str]] = Counter()  # rows with ids like `007`

    def to_numbers(self, texts: Any) -> Any:
        """Convert ids from text to numbers, or raise ValueMismatchError."""
        try:
            numbers = _trimmed(texts).cast(pyarrow.int64())
        except pyarrow.ArrowException:
            raise self._no_number(texts) from None
        is_plain = pyarrow.compute.equal(texts, numbers.cast(texts.type))
        if not pyarrow.compute.all(is_plain).as_py():
            is_odd = pyarrow.compute.invert(is_plain)
            pairs = numbers.filter(is_odd), texts.filter(is_odd)
            self._odd.update(zip(*(each.to_pylist() for each in pairs), strict=True))
        return numbers

    def _no_number(self, texts: Any) -> errors.ValueMismatchError:
        found = _trimmed(texts).to_pylist()
        text = next((each for each in found if not _is_number(each)), found[0])
        then = "pass `id_type=str` to read all ids as text"
        if not text:
            then = "leave rows without a client out"
        return errors.ValueMismatchError(
            "Expected whole numbers as ids, as in the first rows, in the column"
            f" `{self._ids.name}` of {self._label}, found {text!r}: {then}."
        )

    def check(self, index: "ClientIndex") -> None:
        """Raise if two ids are one number. Warn if an id like `007` became a number."""
        if not self._odd:
            return
        sizes = dict(zip(index.ids, index.sizes.tolist(), strict=True))
        first: dict[int, str] = {}
        for number, text in self._odd:
            other = first.setdefault(number, text)
            if other != text:
                raise self._ids.ambiguous(self._label, other, text)
            if sizes[number] > self._odd[number, text]:
                raise self._ids.ambiguous(self._label, text, str(number))
        number, text = next(iter(self._odd))
        _logger.warning(
            "Ids in the column `%s` of %s are read as whole numbers: %r as %d, for"
            " example. Pass `id_type=str` to read them as text, or `id_type=int` to"
            " read numbers without this warning.",
            *(self._ids.name, self._label, text, number),
        )


def _check_ids(chunk: Any, column: str, table: str, num_before: int) -> None:
    """Raise unless each row has an id. `num_before` rows were checked before."""
    is_float = pyarrow.types.is_floating(chunk.type)  # pandas' for numbers with gaps
    if count := chunk.null_count:
        first = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        then = f'.astype({{"{column}": "int64"}})' * is_float
        raise errors.ValueMismatchError(
            f"Expected a client in every row of the column `{column}` of {table},"
            f" found {count} null{'s' * (count > 1)} from row {num_before + first} on:"
            " leave such rows out, such as by"
            f' `frame.dropna(subset=["{column}"]){then}`.'
        )
    if not (pyarrow.types.is_integer(chunk.type) or is_text(chunk.type)):
        kind, of_files = ("int64", " of CSV files") if is_float else ("str", "")
        raise errors.ValueMismatchError(
            f"Expected whole numbers or strings, an id for each client, in the column"
            f" `{column}` of {table}, found `{chunk.type}`: make it one, such as by"
            f' `frame.astype({{"{column}": "{kind}"}})`, or by `id_type=str`{of_files}.'
        )


def no_rows(table: str) -> errors.ValueMismatchError:
    """Return the error for a table without clients."""
    return errors.ValueMismatchError(
        f"Expected rows of clients in {table}, found none."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ClientIndex:
    """The clients of a table, and where their rows are.

    Attributes:
        ids: The clients' ids, ascending.
        arrow_ids: The ids as an Arrow array.
        sizes: i64[clients], the number of rows of each client.
        is_sorted: Whether the rows of the table are in the order of the ids.
        order: i64[rows], the row indices of the first client, then of the second
            client, and so on. None if rows are sorted, or before `with_order`.
    """

    ids: Sequence[Any]
    arrow_ids: Any
    sizes: NDArray[np.int64]
    is_sorted: bool
    order: NDArray[np.int64] | None = None

    @property
    def ends(self) -> NDArray[np.int64]:
        """i64[clients + 1]: client i has the rows from `ends[i]` to `ends[i + 1]`."""
        return np.append(0, np.cumsum(self.sizes))

    def positions_of(self, column: Any) -> NDArray[np.int32] | None:
        """Return the index in `ids` of each row's client, or None if an id is unknown.

        `column` has the rows' ids, as an Arrow array from `decoded`.
        """
        found = pyarrow.compute.index_in(column, value_set=self.arrow_ids)
        return None if found.null_count else found.to_numpy()

    def with_order(self, chunks: Iterable[Any]) -> "ClientIndex":
        """Return a copy with `order`. `chunks` have the ids of all rows, in order."""
        if self.is_sorted:
            return self
        column = pyarrow.chunked_array([decoded(chunk) for chunk in chunks])
        positions = self.positions_of(column)
        assert positions is not None  # the same ids were counted
        order = np.argsort(positions, kind="stable")
        return dataclasses.replace(self, order=order)


def index_clients(chunks: Iterable[Any], name: str, table: str) -> ClientIndex:
    """Return the clients in a column of ids, with the number of rows of each.

    `chunks` are Arrow arrays with the ids of successive rows. Errors call the column
    `name` and its table `table`. Raises ValueMismatchError if there is no row, a row
    has no id, or ids are neither whole numbers nor strings.
    """
    counts: list[Any] = []
    num_rows, num_ids, most_ids = 0, 0, _MERGED_IDS
    is_sorted, last = True, None
    for chunk in map(decoded, chunks):
        _check_ids(chunk, name, table, num_rows)
        if not len(chunk):
            continue
        num_rows += len(chunk)
        if is_sorted:
            begins = last is None or pyarrow.compute.less_equal(last, chunk[0])
            ordered = pyarrow.compute.all(
                pyarrow.compute.less_equal(chunk[:-1], chunk[1:])
            )
            is_sorted = bool(begins) and ordered.as_py() is not False
            last = chunk[-1]
        ids, rows = chunk.value_counts().flatten()
        counts.append(pyarrow.table({"id": ids, "rows": rows}))
        num_ids += len(ids)
        if num_ids > most_ids:
            counts = [_add_up(counts)]
            num_ids = len(counts[0])
            most_ids = max(_MERGED_IDS, 2 * num_ids)
    if not counts:
        raise no_rows(table)
    added = _add_up(counts).sort_by("id")
    ids = added.column("id").combine_chunks()
    sizes = added.column("rows").to_numpy().astype(np.int64)
    return ClientIndex(ids.to_pylist(), ids, sizes, is_sorted)


def _add_up(counts: Sequence[Any]) -> Any:
    added = pyarrow.concat_tables(counts).group_by("id").aggregate([("rows", "sum")])
    return added.rename_columns(["id", "rows"])


class Opened:
    """A slot for a value that each process opens by itself, such as a file reader.

    A pickled copy is empty, so another process opens the value again. `lock` guards the
    other attributes. `end` removes the file that this process wrote, if there is one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = None
        self.end: weakref.finalize[..., Any] | None = None

    @override
    def __reduce__(self) -> Any:
        return Opened, ()


class TableRows(abc.ABC):
    """A table whose rows are read by number. Pickled copies have no open files."""

    @abc.abstractmethod
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Return some columns of some rows as a `pyarrow.Table`.

        `rows` has the numbers of the rows, ascending.
        """


def take_rows(table: Any, rows: NDArray[np.int64]) -> Any:
    """Return rows of an Arrow table by number, without a copy if they are a range."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
        return table.slice(int(rows[0]), len(rows))
    return table.take(rows)


TABLE = "the table"
"""Name of a table in memory in error messages."""


def to_arrow(table: Any, columns: Iterable[str]) -> Any:
    """Convert columns of a table in memory to an Arrow table.

    `table` is a `pyarrow.Table`, a `pandas.DataFrame`, or a mapping from names to
    columns. Columns are `decoded`. Raises ValueMismatchError for another kind of table
    or a column that Arrow has no type for, and ConfigError for a missing column.
    """
    names = list(dict.fromkeys(columns))
    check_columns(names, _column_names(table), TABLE)
    try:
        if isinstance(table, pyarrow.Table):
            found = table.select(names)
        elif isinstance(table, Mapping):
            found = pyarrow.table({name: table[name] for name in names})
            found = _fix_lists(_check_bytes(found, table))
        else:
            named = table.rename(columns=str)[names]
            found = pyarrow.Table.from_pandas(named, preserve_index=False)
            found = _fix_lists(_check_bytes(found, named))
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise errors.ValueMismatchError(
            f"Expected columns that arrow has types for, found one without ({error}):"
            " give every column values of one type."
        ) from error
    return decoded_table(found)


def _check_bytes(found: Any, table: Any) -> Any:
    """Return `found`, the Arrow form of `table`.

    Raises TypeError if a column of `table` has text and bytes, which Arrow turns into
    bytes.
    """
    for field in found.schema:
        is_bytes = pyarrow.types.is_binary(field.type)
        if is_bytes and any(isinstance(value, str) for value in table[field.name]):
            raise TypeError(f"text beside bytes in `{field.name}`")
    return found


def _fix_lists(table: Any) -> Any:
    """Give columns whose lists all have one length a type with this fixed length.

    Arrow finds no fixed length by itself in columns of pandas or of a mapping.
    """
    for index, field in enumerate(table.schema):
        if is_list(field.type):
            column = _fixed(table.column(index).combine_chunks())
            table = table.set_column(index, field.name, column)
    return table


def _fixed(array: Any) -> Any:
    lengths = array.value_lengths().unique().to_pylist() if is_list(array.type) else []
    if len(lengths) != 1 or not lengths[0]:
        return array
    return pyarrow.FixedSizeListArray.from_arrays(_fixed(array.flatten()), lengths[0])


def _column_names(table: Any) -> list[str]:
    names: Any = getattr(table, "column_names", None)  # of arrow
    if names is None:
        names = table if isinstance(table, Mapping) else getattr(table, "columns", None)
    if names is None:
        raise errors.ValueMismatchError(
            "Expected a pyarrow.Table, a pandas.DataFrame or a dictionary of columns,"
            f" found {errors.describe(table)}."
        )
    return [str(name) for name in names]
