"""A process that was forked from one with a context, whose threads did not follow."""

import pathlib

import pytest

from tests.fixtures import run_script

SCRIPT = pathlib.Path(__file__).with_name("forked_script.py")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_forked_process_is_told_the_way_out_and_harms_nothing() -> None:
    told = run_script(SCRIPT, timeout_s=280)

    assert "forked from" in told["call"]
    assert "`spawn`" in told["call"]
    assert "TensorFlow" in told["init"]
    assert "`spawn`" in told["init"]
    assert told["shutdown"] is None
    assert told["on Ray"] == 1.0  # workers are processes of their own
    assert told["before"] == told["after"] == 1.0
