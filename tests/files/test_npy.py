"""Arrays in numpy's format, and two threads that read them at once."""

# pyright: reportUnknownLambdaType=false

import concurrent.futures
import gc
import inspect
import io
import math
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ray_fed.files import npy

ARRAY = np.arange(6, dtype=np.float32).reshape(1, 2, 3, order="F")


def _saved(array: Any, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **kwargs)
    return file.getvalue()


@pytest.mark.parametrize(
    "array", [ARRAY, np.int8(3), np.array(["a", "ü"]), np.zeros((0, 2))]
)
def test_an_array_is_read_as_it_was_saved(array: Any) -> None:
    saved = _saved(array)

    reader = npy.ArrayReader(io.BytesIO(saved))
    read = reader.read()

    np.testing.assert_array_equal(read, array)
    found = reader.shape, reader.dtype
    assert (read.shape, read.dtype) == found == (array.shape, array.dtype)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3), (5, 0), (0, 2)])
def test_rows_are_read_so_many_at_a_time(shape: tuple[int, ...], order: Any) -> None:
    array = np.arange(math.prod(shape), dtype=">i2").reshape(shape, order=order)
    stored, packed = io.BytesIO(_saved(array)), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", stored.getvalue())

    with zipfile.ZipFile(packed) as archive:
        for count in (1, 2, 5, 100):
            stored.seek(0)
            for file in (stored, archive.open("x.npy")):
                runs = list(npy.ArrayReader(file).read_rows(count))

                np.testing.assert_array_equal(np.concatenate(runs), array)
                assert max(map(len, runs)) <= count


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("change", [lambda x: x + b"x", lambda x: x[:-1]])
def test_rows_are_all_that_there_is(change: Any, order: Any) -> None:
    saved = change(_saved(np.zeros((5, 3), order=order)))

    for count in (1, 100):
        with pytest.raises(ValueError, match="cut short, or has more"):
            list(npy.ArrayReader(io.BytesIO(saved)).read_rows(count))


@pytest.fixture
def while_collecting() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has something done once, when the garbage of a literal's parser is collected."""
    threshold = gc.get_threshold()
    callbacks: list[Any] = []

    def do(action: Callable[[], object]) -> None:
        parsing = threading.current_thread()

        def collect(_phase: str, _info: object) -> None:
            if threading.current_thread() is parsing and _is_parser(_caller()):
                gc.callbacks.remove(collect)
                action()

        callbacks.append(collect)
        gc.callbacks.append(collect)
        gc.set_threshold(1)

    yield do
    gc.set_threshold(*threshold)
    gc.callbacks[:] = [each for each in gc.callbacks if each not in callbacks]


def _caller() -> Any:
    """Return the frame whose allocation began a collection, seen from a callback."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None  # noqa: PT018
    return frame.f_back.f_back


def _is_parser(frame: Any) -> bool:
    return frame.f_code.co_name == "parse" and frame.f_globals["__name__"] == "ast"


@pytest.mark.parametrize(
    "read",
    [
        lambda file: npy.ArrayReader(file).shape,
        lambda file: npy.ArrayReader(file).read(),
    ],
    ids=["header", "array"],
)
def test_two_threads_read_headers_in_turn(
    read: Callable[[Any], Any],
    while_collecting: Callable[[Callable[[], object]], None],
) -> None:
    saved = _saved(ARRAY)
    others: list[concurrent.futures.Future[Any]] = []

    def let_the_other_read() -> None:
        others.append(pool.submit(read, io.BytesIO(saved)))
        concurrent.futures.wait(others, timeout=0.5)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        while_collecting(let_the_other_read)
        first = read(io.BytesIO(saved))
        if not others:
            pytest.skip("This CPython collects no garbage while it parses.")
        second = others[0].result(timeout=10)

    np.testing.assert_equal(first, second)
