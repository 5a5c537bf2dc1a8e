"""State saved to files: whole or not at all, the same when it comes back."""

import asyncio
import collections
import contextlib
import errno
import functools
import io
import json
import logging
import math
import os
import pathlib
import random
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import federated_language as fl
import ml_dtypes
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.program import FileProgramStateManager, RayFederatedContext
from ray_fed.program.checkpoint_store import Versions
from ray_fed.tensorflow import computation


class State(NamedTuple):
    weights: Any
    count: Any


class Cursor(fl.Serializable):
    """A position in data, as a data source's iterator has."""

    def __init__(self, position: int) -> None:
        self.position = position

    @override
    def to_bytes(self) -> bytes:
        return str(self.position).encode()

    @classmethod
    @override
    def from_bytes(cls, buffer: bytes) -> "Cursor":
        return cls(int(buffer))


class OtherCursor(Cursor):
    pass


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
            and found.tolist() == expected.tolist()
        )
    if isinstance(expected, float) and math.isnan(expected):
        return type(found) is float and math.isnan(found)
    return type(found) is type(expected) and found == expected


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> FileProgramStateManager:
    return FileProgramStateManager(tmp_path / "states" / "of a program")


def strings(*items: bytes) -> Any:
    array = np.empty(len(items), object)
    array[:] = items
    return array


VALUES: dict[str, Any] = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty array": np.zeros((0, 3), np.int64),
    "array without dimensions": np.array(7, np.uint8),
    "numpy scalar": np.float32(0.1),
    "bfloat16": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "bfloat16 scalar": ml_dtypes.bfloat16(1.5),
    "bools": np.array([True, False]),
    "numpy complex": np.complex64(1 + 2j),
    "strings": strings(b"a\0", b"", b"\0\0"),
    "more strings": strings(b"a", b"bc", b"d", b"").reshape(2, 2),
    "bytes": b"\0bytes\0",
    "text": "text \udc80 \N{SNOWMAN}",
    "large int": 2**80,
    "bool": True,
    "none": None,
    "float": 0.1,
    "nan": float("nan"),
    "infinity": float("-inf"),
    "complex": 1 - 2j,
}


def test_values_come_back_as_they_were(manager: FileProgramStateManager) -> None:
    run(manager.save(VALUES, 1))

    loaded = run(manager.load(1, dict.fromkeys(VALUES, 0)))

    assert [name for name in VALUES if not same(loaded[name], VALUES[name])] == []


def test_structure_comes_back_with_its_containers(
    manager: FileProgramStateManager,
) -> None:
    state = State(
        weights=[collections.OrderedDict(b=1.0, a=(2.0, 3.0))], count={"rounds": 4}
    )

    run(manager.save(state, 3))
    loaded = run(
        manager.load(
            3, State([collections.OrderedDict(b=0, a=(0, 0))], {"rounds": None})
        )
    )

    assert loaded == state
    assert isinstance(loaded, State)
    assert list(loaded.weights[0]) == ["b", "a"]


def test_serializable_comes_back_as_its_class(
    manager: FileProgramStateManager,
) -> None:
    run(manager.save({"cursor": Cursor(17)}, 0))

    loaded = run(manager.load(0, {"cursor": Cursor(0)}))

    assert type(loaded["cursor"]) is Cursor
    assert loaded["cursor"].position == 17
    with pytest.raises(errors.ValueMismatchError, match="Cursor"):
        run(manager.load(0, {"cursor": OtherCursor(0)}))


def test_references_are_read_and_their_structure_is_enough_to_load(
    manager: FileProgramStateManager, local_contexts: Any
) -> None:
    @computation(fl.SequenceType(np.int32))
    def work(values: Any) -> Any:
        return State(np.float32(2.5), values)

    with RayFederatedContext(local_contexts(workers=1)) as context:
        state = context.invoke(work, [1, 2, 3])
        run(manager.save(state, 1))

        loaded, version = run(manager.load_latest(state))

        assert loaded == State(np.float32(2.5), [1, 2, 3])
        assert same(loaded.weights, np.float32(2.5))
        assert version == 1
        assert run(context.invoke(work, loaded.count).weights.get_value()) == 2.5


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        np.array([object()]),
        np.array(["a", b"b"], object),
        np.zeros(2, [("a", "i4")]),
        int,
    ],
    ids=["set", "object", "objects", "text and bytes", "records", "class"],
)
def test_value_that_would_need_pickle_is_refused(
    manager: FileProgramStateManager, value: Any, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(TypeError, match="`inside/1`"):
        run(manager.save({"inside": [1, value]}, 1))
    with pytest.raises(TypeError, match="the whole state"):
        run(manager.save(value, 1))
    with pytest.raises(TypeError, match="found the whole state of Python type `obj"):
        run(manager.save(object(), 1))

    assert run(manager.get_versions()) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("scheme", ["", "file://"], ids=["path", "URI"])
def test_tilde_is_the_home_of_the_user(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    home, working = tmp_path / "home", tmp_path / "working"
    working.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(working)

    run(FileProgramStateManager(f"{scheme}~/states").save(1, 1))

    assert [path.name for path in home.iterdir()] == ["states"]
    assert list(working.iterdir()) == []


def test_nothing_saved(manager: FileProgramStateManager) -> None:
    assert run(manager.get_versions()) is None
    assert run(manager.load_latest({})) == (None, 0)
    with pytest.raises(fl.program.ProgramStateNotFoundError, match="7"):
        run(manager.load(7, {}))


@pytest.mark.parametrize(
    ("keep_total", "kept"), [(3, [9, 10, 11]), (0, [0, 1, 5, 9, 10, 11])]
)
def test_so_many_versions_are_kept(
    tmp_path: pathlib.Path, keep_total: int, kept: list[int]
) -> None:
    manager = FileProgramStateManager(tmp_path, keep_total=keep_total)
    for version in (0, 1, 5, 9, 10, np.int64(11)):
        given: Any = version
        run(manager.save(int(version), given))

    assert run(manager.get_versions()) == kept
    assert len(list(tmp_path.iterdir())) == len(kept)
    assert run(manager.load_latest(None)) == (11, 11)
    run(manager.remove_all())
    assert run(manager.get_versions()) is None


def test_number_of_kept_versions_is_checked_when_made(tmp_path: pathlib.Path) -> None:
    for number in (1.5, "3", None, True):
        given: Any = number
        with pytest.raises(errors.ValueMismatchError, match="whole number of versions"):
            FileProgramStateManager(tmp_path, keep_total=given)


def test_version_that_is_there_is_not_overwritten(
    manager: FileProgramStateManager,
) -> None:
    run(manager.save("first", 2))

    with pytest.raises(fl.program.ProgramStateExistsError, match=r"version \[2\]"):
        run(manager.save("second", 2))
    assert run(manager.load(2, None)) == "first"


def test_other_structure_is_told(manager: FileProgramStateManager) -> None:
    run(manager.save({"a": 1, "b": [2]}, 0))

    with pytest.raises(errors.ValueMismatchError, match=r"\['a', 'b/0'\]"):
        run(manager.load(0, {"a": 1, "b": 2}))


def test_other_files_are_left_alone(tmp_path: pathlib.Path) -> None:
    names = ["other_1.zip", "program_state_x.zip", "program_state_01.zip", "notes"]
    for name in names:
        (tmp_path / name).write_text("not ours")
    manager = FileProgramStateManager(tmp_path, keep_total=1)

    run(manager.save(1, 1))
    run(manager.save(2, 2))
    run(manager.remove_all())

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


CONTENT = {
    "model": np.linspace(0, 1, 300, dtype=np.float32),
    "text": "abc",
    "words": strings(b"x" * 50, b"y"),
    "count": 3,
}


def save_two(folder: pathlib.Path) -> tuple[FileProgramStateManager, pathlib.Path]:
    """Save two versions; return the manager and the path of the later one."""
    manager = FileProgramStateManager(folder)
    run(manager.save({**CONTENT, "count": 2}, 1))
    run(manager.save(CONTENT, 2))
    return manager, folder / "program_state_2.zip"


def test_flipped_bit_is_never_read_as_a_value(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    whole = path.read_bytes()
    generator = random.Random(0)
    refused = 0

    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = run(manager.load(2, CONTENT))
        except errors.SavedStateError:
            refused += 1
        else:
            assert all(same(loaded[name], value) for name, value in CONTENT.items())

    assert refused > len(whole) / 7 / 2


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.99])
def test_cut_file_is_passed_over_for_the_one_before(
    tmp_path: pathlib.Path, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    manager, path = save_two(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * fraction)])

    with caplog.at_level(logging.WARNING):
        loaded, version = run(manager.load_latest(CONTENT))

    assert (version, loaded["count"]) == (1, 2)
    assert "Version 2 is passed over" in caplog.text
    with pytest.raises(errors.SavedStateError, match="damaged"):
        run(manager.load(2, CONTENT))


def put_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # absolute, it may be too long


ARRAY = {"kind": "array", "member": "0.npy", "dtype": None, "scalar": False}


def put_archive(
    path: pathlib.Path,
    member: bytes,
    compression: int = zipfile.ZIP_STORED,
    described: Any = ARRAY,
) -> None:
    """Write an archive whose checksums are right, with one member."""
    manifest = {"format": 2, "values": [{"name": "model", "value": described}]}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("0.npy", member)
        archive.writestr("manifest.json", json.dumps(manifest))


def npy(header: str, content: bytes = b"") -> bytes:
    """Return an array of numpy's format with a header of that text."""
    return (
        b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + content
    )


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


FOUR = npy(header("(4,)"), bytes(16))


def put_larger_than_declared(path: pathlib.Path) -> None:
    """Declare fewer bytes of a compressed member than it has, as zip bombs do."""
    put_archive(path, FOUR + bytes(2**20), zipfile.ZIP_DEFLATED)
    declare_size(path, len(FOUR))


def put_overlapping(path: pathlib.Path) -> None:
    """Declare more bytes of a member than the file has."""
    put_archive(path, FOUR)
    declare_size(path, 2**31, both=True)


def declare_size(path: pathlib.Path, size: int, *, both: bool = False) -> None:
    """Write another size of the first member into the directory of an archive."""
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", size)
    if both:
        content[entry + 20 : entry + 24] = struct.pack("<I", size)
    path.write_bytes(content)


MEMBERS = {
    "10**25 elements": npy(header(f"({10**25},)")),
    "10**25 elements of nothing": npy(header(f"({10**25},)", "'|V0'")),
    "10**11 elements": npy(header(f"({10**11},)")),
    "product of sizes beyond 64 bits": npy(header(f"({2**33}, {2**31})")),
    "unclosed header": npy("{'descr': '<f4', 'shape': (3,"),
    "unclosed text": npy("{'descr': '<f4"),
    "deep header": npy("(" * 5000),
    "many signs in a header": npy("-" * 9000 + "1"),
    "header of another kind": npy("[1, 2]"),
    "dtype that is none": npy(header("(1,)", "'<q9'"), bytes(9)),
    "negative size": npy(header("(-1,)")),
    "two negative sizes": npy(header("(-1, -4)"), bytes(16)),
    "fewer elements than content": npy(header("(2,)"), bytes(16)),
    "array of arrays": npy(header("(1,)", "('<f4', (2,))"), bytes(8)),
    "later version of the format": b"\x93NUMPY\x09\0" + bytes(100),
}
DESCRIBED: dict[str, Any] = {
    "one member for two values": {
        "kind": "list",
        "keys": None,
        "values": [ARRAY, ARRAY],
    },
    "no such kind": {**ARRAY, "kind": "pickle"},
    "no such member": {**ARRAY, "member": "1.npy"},
    "floats as bytes": {**ARRAY, "kind": "bytes"},
    "list as a number": {"kind": "json", "value": [1]},
    "no description": [],
}
COMPRESSED = {
    "deflate": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}
PUT: dict[str, Callable[[pathlib.Path], object]] = {
    "folder": pathlib.Path.mkdir,
    "loop of links": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": put_socket,
    "member larger than it declares": put_larger_than_declared,
    "member larger than the file": put_overlapping,
    **{
        name: functools.partial(put_archive, member=member)
        for name, member in MEMBERS.items()
    },
    **{
        name: functools.partial(put_archive, member=FOUR, described=described)
        for name, described in DESCRIBED.items()
    },
    **{
        f"compressed by {name}": functools.partial(
            put_archive, member=FOUR, compression=kind
        )
        for name, kind in COMPRESSED.items()
    },
}
"""What is put in the place of a whole state."""


@pytest.mark.parametrize("name", PUT)
def test_whatever_is_no_whole_state_is_passed_over_and_replaced_or_told(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    manager, path = save_two(tmp_path)
    monkeypatch.chdir(tmp_path)
    path.unlink()
    PUT[name](path)

    with caplog.at_level(logging.WARNING):
        loaded, version = run(manager.load_latest(CONTENT))

    assert (version, loaded["count"]) == (1, 2)
    assert "Version 2 is passed over" in caplog.text
    with pytest.raises(errors.SavedStateError, match=r"program_state_2\.zip"):
        run(manager.load(2, {"model": 0}))
    if name == "folder":
        with pytest.raises(errors.SavedStateError, match="folder of that name: move"):
            run(manager.save(CONTENT, 2))
        run(manager.save(CONTENT, 3))
        run(manager.remove_all())
        assert list(tmp_path.iterdir()) == [path]
    else:
        run(manager.save({**CONTENT, "count": 4}, 2))
        assert run(manager.load_latest(CONTENT))[0]["count"] == 4


def test_reading_takes_no_more_memory_than_the_file_has(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    elements = 2**26
    bomb = npy(header(f"({elements},)", "'|u1'"), bytes(elements))
    put_archive(path, bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < elements / 500

    tracemalloc.start()
    with pytest.raises(errors.SavedStateError):
        run(manager.load(2, {"model": 0}))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 2**22


class FailingFile(io.BytesIO):
    @override
    def read(self, *_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def refuse(_: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


def fail_later(_: Any) -> FailingFile:
    return FailingFile(bytes(100))


@pytest.mark.parametrize("open_failing", [refuse, fail_later])
def test_file_that_cannot_be_read_now_is_no_damage(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, open_failing: Any
) -> None:
    manager, path = save_two(tmp_path)
    before = path.read_bytes()

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_regular", open_failing)
        for use in (manager.load(2, CONTENT), manager.load_latest(CONTENT)):
            with pytest.raises(errors.StorageError, match=r"denied|Input/output"):
                run(use)
        with pytest.raises(errors.StorageError, match="Expected to read"):
            run(manager.save("other", 2))

    assert path.read_bytes() == before


def test_process_without_descriptors_is_no_damage(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, path = save_two(tmp_path)
    before = path.read_bytes()

    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        for use in (manager.load_latest(CONTENT), manager.save("other", 2)):
            with pytest.raises(OSError, match="Too many open files"):
                run(use)

    assert path.read_bytes() == before


def test_later_versions_that_lie_about_do_not_cost_the_one_saved(
    tmp_path: pathlib.Path,
) -> None:
    manager = FileProgramStateManager(tmp_path, keep_total=1)
    (tmp_path / "program_state_9.zip").mkdir()
    (tmp_path / "program_state_8.zip").write_bytes(b"damaged")

    run(manager.save("state", 4))

    assert run(manager.load_latest(None)) == ("state", 4)


@pytest.mark.parametrize(
    "version",
    [-1, True, 1.0, "1", None, 2**63, 10**5000],
    ids=["negative", "bool", "float", "text", "none", "2**63", "of 5000 digits"],
)
def test_what_can_be_no_version_is_refused(
    manager: FileProgramStateManager, version: Any
) -> None:
    for use in (manager.load(version, None), manager.save(1, version)):
        with pytest.raises(errors.UnsupportedError, match="at least 0 and below 2"):
            run(use)


@pytest.mark.parametrize(
    "names",
    [
        *({"root_dir": folder} for folder in ("a\0b", "\ud800", "", 3, b"a")),
        *({"root_dir": "a", "prefix": prefix} for prefix in ("b/c", "\0", None)),
    ],
    ids=ascii,
)
def test_what_can_be_no_folder_is_refused(names: dict[str, Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match="Expected the"):
        FileProgramStateManager(**names)


def test_file_in_place_of_the_folder_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "states").write_text("not a folder")
    manager = FileProgramStateManager(tmp_path / "states")

    for use in (manager.load_latest(None), manager.save(1, 1), manager.get_versions()):
        with pytest.raises(errors.SavedStateError, match="Expected a folder"):
            run(use)


def test_two_values_of_one_name_are_refused(manager: FileProgramStateManager) -> None:
    with pytest.raises(errors.ValueMismatchError, match="two equal names"):
        run(manager.save({"a/b": 1, "a": {"b": 2}}, 0))


def test_nothing_but_damage_is_an_error_not_a_new_start(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    path.write_bytes(b"")
    path.with_name("program_state_1.zip").write_bytes(b"")

    with pytest.raises(errors.SavedStateError, match=r"program_state_2\.zip"):
        run(manager.load_latest(CONTENT))


def test_file_of_another_format_is_told(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", '{"format": 99, "values": []}')

    for use in (manager.load(2, CONTENT), manager.load_latest(CONTENT)):
        with pytest.raises(errors.StateFormatError, match="found format 99"):
            run(use)
    with pytest.raises(fl.program.ProgramStateExistsError):
        run(manager.save(CONTENT, 2))


def test_pickles_are_not_read(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    ran = tmp_path / "ran"

    class Payload:
        @override
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    pickled = io.BytesIO()
    array = np.array([Payload()], object)
    np.lib.format.write_array(pickled, array, allow_pickle=True)
    put_archive(path, pickled.getvalue())

    with pytest.raises(errors.SavedStateError, match="allow_pickle"):
        run(manager.load(2, {"model": 0}))
    assert not ran.exists()


def test_interrupted_write_leaves_the_former_versions(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = save_two(tmp_path)

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            run(manager.save(CONTENT, 3))

    assert run(manager.get_versions()) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_leftover_of_a_killed_program_is_removed(tmp_path: pathlib.Path) -> None:
    manager, path = save_two(tmp_path)
    leftover = path.with_name(".program_state_3.zip.abc.tmp")
    leftover.write_bytes(b"half a state")

    assert run(manager.get_versions()) == [1, 2]
    run(manager.save(CONTENT, 3))

    assert not leftover.exists()
    assert run(manager.get_versions()) == [1, 2, 3]


def test_versions_that_are_removed_during_a_listing_are_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = Versions(tmp_path, "round_")
    for number in (1, 2, 3):
        versions.write(number, {"a": np.float32(number)})
    scandir = os.scandir

    def remove_after_each(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            yield entry
            for number in (1, 2, 3):
                (tmp_path / f"round_{number}.zip").unlink(missing_ok=True)

    @contextlib.contextmanager
    def list_slowly(path: Any) -> Generator[Any]:
        with scandir(path) as found:
            entries = list(found)
        yield remove_after_each(entries)

    monkeypatch.setattr(os, "scandir", list_slowly)
    assert versions.find() == [1, 2, 3]
