"""Texts of any error can be encoded, and are of bounded length."""

import pytest

from ray_fed import error_texts, errors, tracebacks


class _MuteError(ValueError):
    def __str__(self) -> str:  # pyright: ignore[reportImplicitOverride]
        raise ValueError("no text")


class _OddError(ValueError):
    def __str__(self) -> str:  # pyright: ignore[reportImplicitOverride]
        return None  # noqa: PLE0307  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("too large"), "too large"),
        (ValueError("ligne é"), "ligne é"),
        (ValueError("bad \udce9"), r"bad \udce9"),
        (ValueError("\x1b[1mno\x1b[0m call"), "no call"),
        (ValueError(), "no message"),
        (_MuteError(), "no message"),
        (_OddError(), "no message"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_any_error_has_a_message(error: Exception, message: str) -> None:
    assert error_texts.message_of(error) == message
    assert error_texts.summarize(error) == f"{type(error).__name__}: {message}"


def test_long_message_keeps_its_ends_and_says_how_long_it_was() -> None:
    message = error_texts.message_of(ValueError("a" + "x" * 49_999_998 + "z"))

    assert message.startswith("axxx")
    assert message.endswith("xxxz")
    assert "50,000,000 characters" in message
    assert len(message) < 10_100


def test_traceback_of_any_error_can_be_encoded_and_is_short() -> None:
    cause = ValueError("bad \udce9" * 1_000_000)
    error = KeyError("key")
    error.__cause__ = cause

    text = error_texts.traceback_of(error)

    assert text.startswith("ValueError: bad")
    assert text.rstrip().endswith("KeyError: 'key'")
    assert len(text.encode()) < 50_000


@pytest.mark.parametrize("cls", [errors.ComputationError, errors.RetryBudgetError])
def test_located_errors_have_such_texts(cls: type[errors.LocatedError]) -> None:
    error = cls("bad \udce9", cause_text="at \udce9" * 100_000)

    assert str(error) == r"bad \udce9"
    assert len(error.cause_text.encode()) < 50_000


def test_sendable_error_has_the_text_of_its_cause() -> None:
    error = errors.ValueMismatchError("Expected a, found \udce9.")
    error.__cause__ = ValueError("bad \udce9")

    sent = errors.sendable(error)

    assert str(sent) == r"Expected a, found \udce9."
    assert isinstance(sent.__cause__, tracebacks.WorkerTraceback)
    assert str(sent.__cause__) == "on the worker:\nValueError: bad \\udce9\n"
