"""Computations, saved state and data files whose bytes are damaged."""

# pyright: reportUnknownLambdaType=false

import asyncio
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf

from ray_fed import errors, framework
from ray_fed import tensorflow as rtf
from ray_fed.program import FileProgramStateManager
from tests.properties.malformed import REFUSED, Case, Either, Place, damaged, same
from tests.properties.malformed_arguments import INT, MAKERS
from tests.properties.malformed_oracle import NotOfTypeError, UnsureError, expect

NO_COMPUTATIONS: tuple[Any, ...] = (
    None, 3, "text", b"", b"\0", b"\xff" * 40, [], object(), int, bytearray(b"abc"),
    b"\x0a" * 1000, np.zeros(3, np.uint8), INT,
)  # fmt: skip


def computations(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield serialised computations that are damaged, or that are none."""

    @rtf.computation(np.int32)
    def increment(x: Any) -> Any:
        return x + 1

    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def total(x: Any) -> Any:
        return fl.federated_sum(fl.federated_map(increment, x))

    @fl.federated_computation(
        fl.FederatedType(np.int32, fl.CLIENTS), fl.FederatedType(np.int32, fl.SERVER)
    )
    def both(x: Any, y: Any) -> Any:
        return fl.federated_sum(x), y

    whole = [(total, [1, 2]), (both, ([1, 2], 3)), (increment, 4)]
    written = [(framework.serialize_computation(comp), arg) for comp, arg in whole]
    while True:
        if generator.random() < 0.1:
            wrong = generator.choice(NO_COMPUTATIONS)
            name = generator.choice(["serialize", "deserialize"])
            call: Any = getattr(framework, f"{name}_computation")
            run = lambda call=call, wrong=wrong: call(wrong)  # noqa: E731
            yield Case("computation", f"{name} {wrong!r:.60}", run, REFUSED)
            continue
        content, arg = generator.choice(written)
        broken = damaged(generator, content)
        read = lambda broken=broken, arg=arg: _invoked(place, broken, arg)  # noqa: E731
        label = f"of {len(content)} bytes, {len(broken)} left"
        yield Case("computation", label, read, Either(_is_of_its_type))


def _invoked(place: Place, content: bytes, arg: Any) -> tuple[fl.Type, Any]:
    comp = framework.deserialize_computation(content)
    return comp.type_signature.result, place.context.invoke(comp, arg)


def _is_of_its_type(found: tuple[fl.Type, Any]) -> bool:
    type_spec, value = found
    try:
        expect(value, type_spec)
    except UnsureError:
        return True
    except NotOfTypeError:
        return False
    return True


STATE = {
    "model": np.arange(6, dtype=np.float32).reshape(2, 3),
    "words": ["a", b"b", None, 2.5, True],
    "count": 3,
}


def states(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield saved state that is damaged, and values that cannot be saved."""
    folder = place.folder / "states"
    manager = FileProgramStateManager(folder)
    asyncio.run(manager.save({**STATE, "count": 2}, 1))
    asyncio.run(manager.save(STATE, 2))
    path = folder / "program_state_2.zip"
    whole = path.read_bytes()
    others = FileProgramStateManager(place.folder / "others", keep_total=1)
    is_state = lambda found: same(found, STATE) or same(found, {**STATE, "count": 2})  # noqa: E731
    while True:
        if generator.random() < 0.3:
            value = generator.choice(MAKERS)()
            run = lambda value=value: _saved(others, value)  # noqa: E731
            accepts = functools.partial(_is_saved, value)
            yield Case("state", errors.describe(value), run, Either(accepts))
            continue
        content = damaged(generator, whole)
        run = lambda content=content: _latest(manager, path, content)  # noqa: E731
        yield Case("state", f"{len(content)} bytes", run, Either(is_state))


def _is_saved(value: Any, found: Any) -> bool:
    return same(found, value) or (
        isinstance(value, float | complex) and repr(found) == repr(value)
    )


def _latest(manager: FileProgramStateManager, path: Any, content: bytes) -> Any:
    path.write_bytes(content)
    return asyncio.run(manager.load_latest(STATE))[0]


def _saved(manager: FileProgramStateManager, value: Any) -> Any:
    asyncio.run(manager.remove_all())
    asyncio.run(manager.save([value], 1))
    return asyncio.run(manager.load(1, [value]))[0]


COLUMN = np.arange(40, dtype=np.int64)


def _write_npz(path: str) -> None:
    np.savez_compressed(path, x=COLUMN)


def _write_records(path: str) -> None:
    with tf.io.TFRecordWriter(path) as writer:
        for value in COLUMN:
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
            features = tf.train.Features(feature={"x": feature})
            writer.write(tf.train.Example(features=features).SerializeToString())


def _write_arrow(path: str) -> None:
    table = pa.table({"x": COLUMN})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


WRITERS: Mapping[str, Callable[[str], None]] = {
    "npz": _write_npz,
    "npy": lambda path: np.save(path, COLUMN),
    "parquet": lambda path: pyarrow.parquet.write_table(pa.table({"x": COLUMN}), path),
    "arrow": _write_arrow,
    "tfrecord": _write_records,
}


def files(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield data files that are damaged."""
    whole = {
        suffix: fl.federated_computation(lambda x: x, spec)
        for suffix, spec in (
            ("column", VALUES),
            ("sequence", fl.SequenceType(np.int64)),
        )
    }
    written: dict[str, bytes] = {}
    for suffix, write in WRITERS.items():
        path = place.folder / f"data.{suffix}"
        write(str(path))
        written[suffix] = path.read_bytes()
    while True:
        suffix, content = generator.choice(list(written.items()))
        shape = generator.choice(list(whole))
        broken = damaged(generator, content)
        path = place.folder / f"data.{suffix}"
        run = lambda path=path, broken=broken, comp=whole[shape]: _read(  # noqa: E731
            place, path, broken, comp
        )
        accepts = ACCEPTED.get(suffix, _is_some_column)
        yield Case("file", f"{suffix} as a {shape}", run, Either(accepts))


VALUES = fl.TensorType(np.int64, [None])


def _read(place: Place, path: Any, content: bytes, comp: Any) -> Any:
    path.write_bytes(content)
    value = rtf.data(str(path), comp.type_signature.parameter)
    return place.context.invoke(comp, value)


def _is_column(found: Any) -> bool:
    return np.array_equal(np.asarray(found), COLUMN)


def _is_some_column(found: Any) -> bool:
    array = np.asarray(found)
    return array.ndim == 1 and (array.dtype == np.int64 or not array.size)


def _is_of_records(found: Any) -> bool:
    """Return whether records are whole, whichever of them were lost or doubled."""
    return _is_some_column(found) and set(np.asarray(found).tolist()) <= set(
        COLUMN.tolist()
    )


ACCEPTED = {"npz": _is_column, "tfrecord": _is_of_records}
"""Formats with checksums, and what may be read of them."""
