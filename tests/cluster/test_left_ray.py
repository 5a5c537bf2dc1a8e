"""`ray.shutdown` by the user, while work of ray_fed is under way and before more."""

import pathlib
from typing import Any

import pytest

from tests.fixtures import run_script

SCRIPT = pathlib.Path(__file__).with_name("left_ray_script.py")
WORK = ["call", "next call", "clients read", "dataset", "clients used"]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(580)]


@pytest.fixture(scope="module")
def told() -> Any:
    return run_script(SCRIPT, timeout_s=560)


@pytest.mark.parametrize("name", WORK)
def test_work_on_a_ray_that_was_left_says_so(told: Any, name: str) -> None:
    wanted = "ContextStateError: Expected this process to be connected to the same Ray"
    assert told[name].startswith(wanted)
    assert "`ray.shutdown` was called" in told[name]


def test_what_was_left_closes_in_silence_and_starts_no_ray(told: Any) -> None:
    assert told["close"] == "None"
    assert told["Ray runs"] is False
    assert told["starts"] == 3  # the two of the user, and the context's own


def test_context_of_its_own_ray_says_so_and_works_afterwards(told: Any) -> None:
    assert "backend ray (its own Ray at " in told["context"]
    assert told["mean"] == 1.0
