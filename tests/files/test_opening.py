"""Which files computations may name."""

import pytest

import ray_fed.errors as errors
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


@pytest.mark.parametrize(
    "uri",
    [
        "a.npz",
        "/data/a.npz#x",
        "file:///data/a.npz",
        "local:///data/a.npz",
        "memory://a.npz",
        "/data/a:b.npz",
        "/data/a::b.npz",
    ],
)
def test_local_files_and_memory_need_no_setting(uri: str) -> None:
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
