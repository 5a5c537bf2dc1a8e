"""Which files computations may name."""

import os
import pathlib
import time

import pytest

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.opening import DataFile
from ray_fed.values import read_limits

REFUSED = {
    "s3://bucket/a.npz": "s3",
    "https://host/a.npz": "https",
    "http://127.0.0.1:1/a.npz#x": "http",
    "S3://bucket/a.npz": "S3",
    "ssh://host/a.npz": "ssh",
    "data:text/plain;base64,aGk=/a.npz": "data",
    "zip://a.npz::memory://b.zip": "zip",
    "simplecache::s3://bucket/a.npz": "simplecache",
    "memory://x::https://host/a.npz": "https",
    "zip::s3::memory://a.npz": "zip",
    "nosuch://a.npz": "nosuch",
    "://a.npz": "",
}


@pytest.mark.parametrize(("uri", "protocol"), REFUSED.items(), ids=REFUSED)
def test_other_protocols_are_refused_by_name(uri: str, protocol: str) -> None:
    with pytest.raises(errors.UnsupportedError) as caught:
        DataFile.parse(uri)

    told = str(caught.value)
    assert f"found `{protocol}` in" in told
    assert "['file', 'local', 'memory']" in told
    assert f'Config(data={{"protocols": ["{protocol}"]}})' in told


def test_local_files_and_memory_need_no_setting() -> None:
    for uri in (
        *("a.npz", "/data/a.npz#x", "file:///data/a.npz", "local:///data/a.npz"),
        *("memory://a.npz", "/data/a:b.npz", "/data/a::b.npz"),
    ):
        assert DataFile.parse(uri).uri == uri.removesuffix("#x")


def test_all_protocols_of_a_chain_are_to_be_named() -> None:
    chain = "simplecache::s3://bucket/a.npz"

    with read_limits.limited(read_limits.Limits(protocols=("s3", "simplecache"))):
        assert DataFile.parse(chain).uri == chain
    with (
        read_limits.limited(read_limits.Limits(protocols=("simplecache",))),
        pytest.raises(errors.UnsupportedError, match="found `s3`"),
    ):
        DataFile.parse(chain)


@pytest.fixture
def old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a file whose times count as old."""
    monkeypatch.setattr(opening, "_COARSE_S", -1.0)
    path = tmp_path / "a.npz"
    path.write_bytes(b"rows")
    return path


def test_stamp_stays_while_a_file_does(old_file: pathlib.Path) -> None:
    for prefix in ("", "file://", "local://"):
        stamps = {DataFile.parse(f"{prefix}{old_file}#x").stamp() for _ in range(3)}

        assert len(stamps) == 1
        assert None not in stamps


@pytest.mark.parametrize("change", ["longer", "same length", "replaced", "times kept"])
def test_stamp_changes_with_a_file(old_file: pathlib.Path, change: str) -> None:
    file = DataFile.parse(str(old_file))
    before, status = file.stamp(), old_file.stat()
    time.sleep(0.02)  # a tick of the clock that files' times are taken from

    if change == "replaced":
        other = old_file.with_name("b")
        other.write_bytes(b"swor")
        other.replace(old_file)
    else:
        old_file.write_bytes(b"more rows" if change == "longer" else b"swor")
    if change == "times kept":
        os.utime(old_file, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert file.stamp() not in (None, before)


def test_nothing_vouches_for_what_just_changed_or_is_no_file(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "a.npz").write_bytes(b"rows")
    os.mkfifo(tmp_path / "fifo")

    for name in ("a.npz", "missing.npz", "", "fifo"):
        assert DataFile.parse(str(tmp_path / name)).stamp() is None


def test_nothing_vouches_for_other_file_systems(
    old_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old_file.with_name("memory:")
    folder.mkdir()
    old_file.rename(folder / "a.npz")
    monkeypatch.chdir(old_file.parent)
    assert pathlib.Path("memory://a.npz").exists()

    assert DataFile.parse("memory://a.npz").stamp() is None
