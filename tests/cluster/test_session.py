"""Connecting: what is not there is said at once."""

import subprocess
import sys

SCRIPT = """
import ray_fed
try:
    ray_fed.create_context(ray_fed.Config(), address="127.0.0.1:1")
except ray_fed.errors.ClusterError as error:
    print(error)
"""


def test_address_where_nothing_listens_is_refused_at_once() -> None:
    # In a process of its own: this one may have joined a Ray already.
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "a Ray at `127.0.0.1:1`" in ran.stdout
