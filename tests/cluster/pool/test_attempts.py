"""What is remembered of attempts, for reports and for the error that ends a call."""

import pytest

import ray_fed.errors as errors
from ray_fed.cluster.pool.actions import Failure
from ray_fed.cluster.pool.attempts import AttemptLog
from ray_fed.plan import outcomes


def _attempt(number: int, worker: str) -> outcomes.Attempt:
    return outcomes.Attempt(number, worker, 100 + number, f"10.0.0.{number}")


def _twice_lost() -> AttemptLog:
    """Of subround `a`, which asked at 10 s; lost after 2 s, waited, lost after 1 s."""
    log = AttemptLog()
    log.asked("a", 10.0)
    log.granted("a", _attempt(1, "w1"), 11.0)
    log.lost("w1", Failure("crash", "it died"), 13.0)
    log.asked("a", 13.0)
    log.granted("a", _attempt(2, "w2"), 20.0)
    log.lost("w2", Failure("memory", "no room", 7, "Traceback ..."), 21.0)
    return log


def test_lost_attempts_say_who_ran_when_and_how_it_ended() -> None:
    log = _twice_lost()

    assert log.lost_of("a") == (
        outcomes.Attempt(1, "w1", 101, "10.0.0.1", 1.0, 2.0, "crash", "it died"),
        outcomes.Attempt(2, "w2", 102, "10.0.0.2", 10.0, 1.0, "memory", "no room"),
    )


def test_worker_that_is_lost_after_its_subround_is_on_no_record() -> None:
    log = AttemptLog()
    log.asked("a", 0.0)
    log.granted("a", _attempt(1, "w1"), 0.0)
    log.done("w1")

    log.lost("w1", Failure("crash", "it died"), 1.0)

    assert log.lost_of("a") == ()


def test_loss_that_is_told_twice_is_one_attempt() -> None:
    log = AttemptLog()
    log.asked("a", 0.0)
    log.granted("a", _attempt(1, "w1"), 0.0)

    for _ in range(2):
        log.lost("w1", Failure("crash", "it died"), 1.0)

    assert len(log.lost_of("a")) == 1


def test_forgotten_subround_has_no_attempts() -> None:
    log = _twice_lost()

    log.forget("a")

    assert log.lost_of("a") == ()


@pytest.mark.parametrize(
    ("failure_class", "expected"),
    [
        pytest.param("memory", errors.RetryBudgetError, id="budget"),
        pytest.param("hang", errors.DeadlineError, id="hang"),
    ],
)
def test_final_error_has_the_last_failure(
    failure_class: str, expected: type[errors.LocatedError]
) -> None:
    error = _twice_lost().final_error("a", "Too often.", failure_class)

    assert type(error) is expected
    assert error.location == errors.Location(client_index=7, node="10.0.0.2", attempt=2)
    assert error.cause_text == "Traceback ..."


def test_final_error_of_what_never_ran_has_no_place() -> None:
    error = AttemptLog().final_error("a", "No worker starts.", "fatal")

    assert error.location == errors.Location()
    assert str(error) == "No worker starts."
