"""A process that was forked from one with a context, whose threads did not follow."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("forked_script.py")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_forked_process_is_told_the_way_out_and_harms_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    )

    told = json.loads(done.stdout.splitlines()[-1])
    assert "forked from" in told["call"]
    assert "`spawn`" in told["call"]
    assert "TensorFlow" in told["init"]
    assert "`spawn`" in told["init"]
    assert told["shutdown"] is None
    assert told["on Ray"] == 1.0  # workers are processes of their own
    assert told["before"] == told["after"] == 1.0
