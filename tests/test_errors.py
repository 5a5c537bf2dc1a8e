"""One tree of errors, which all survive the way back from another machine."""

import inspect
import pickle

import pytest

from ray_fed import errors

LOCATION = errors.Location(3, 1, 7, "10.0.0.1", 2)


def _all_errors() -> list[type[errors.RayFedError]]:
    found = [errors.RayFedError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ == errors.__name__]


def test_errors_pickle_with_their_message_and_are_drawn_in_the_tree() -> None:
    tree = " ".join(f"{inspect.getdoc(errors)} ".split())

    for cls in _all_errors():
        error = cls("Expected X, found Y.")
        again: errors.RayFedError = pickle.loads(pickle.dumps(error))

        assert type(again) is cls
        assert str(again) == "Expected X, found Y."
        assert again.args == error.args
        assert f" {cls.__name__} " in tree


@pytest.mark.parametrize(
    "error",
    [
        errors.ComputationError("It raised.", LOCATION, "Traceback ..."),
        errors.RetryBudgetError("Too often.", "memory", LOCATION),
    ],
    ids=lambda error: type(error).__name__,
)
def test_located_error_pickles_with_its_fields(error: errors.LocatedError) -> None:
    again: errors.LocatedError = pickle.loads(pickle.dumps(error))

    assert vars(again) == vars(error)
    assert again.location == LOCATION
    assert str(again) == str(error)


@pytest.mark.claim("semantics.76", "semantics.77", "semantics.78")
@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (errors.UserError, (errors.RayFedError,)),
        (errors.ConfigError, (errors.UserError, ValueError)),
        (errors.ValueMismatchError, (errors.UserError, TypeError)),
        (errors.UnsupportedError, (errors.UserError, ValueError)),
        (errors.MissingIntrinsicError, (errors.UserError, NotImplementedError)),
        (errors.CardinalityError, (errors.UserError, ValueError)),
        (errors.ContextStateError, (errors.UserError, RuntimeError)),
        (errors.ComputationError, (errors.UserError, RuntimeError)),
        (errors.UpToMergeTypeError, (errors.UserError, TypeError)),
        (errors.MergeTypeNotAssignableError, (errors.UserError, TypeError)),
        (errors.AfterMergeStructureError, (errors.UserError, ValueError)),
        (errors.CompileError, (errors.RayFedError, ValueError)),
        (errors.ClusterError, (errors.RayFedError, RuntimeError)),
        (errors.ResourceError, (errors.ClusterError,)),
        (errors.DeadlineError, (errors.ClusterError, TimeoutError)),
        (errors.RetryBudgetError, (errors.ClusterError,)),
    ],
)
def test_error_is_caught_by_what_the_tree_says(
    cls: type[Exception], bases: tuple[type[Exception], ...]
) -> None:
    assert all(issubclass(cls, base) for base in bases)


def test_user_and_cluster_errors_are_apart() -> None:
    for cls in _all_errors():
        assert not issubclass(cls, errors.UserError) or not issubclass(
            cls, errors.ClusterError | errors.CompileError
        )


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (errors.Location(), ""),
        (errors.Location(client_index=0), "client at position 0"),
        (
            LOCATION,
            "call 3, subround 1, client at position 7, node 10.0.0.1, attempt 2",
        ),
    ],
    ids=["nothing known", "client", "all known"],
)
def test_message_ends_with_what_is_known_of_the_place(
    location: errors.Location, text: str
) -> None:
    suffix = f" [{text}]" if text else ""

    assert str(location) == text
    assert str(errors.ComputationError("Bad.", location)) == f"Bad.{suffix}"
    assert str(errors.RetryBudgetError("Bad.", "crash", location)) == f"Bad.{suffix}"


def test_located_adds_to_what_is_known() -> None:
    error = errors.ComputationError("Bad.", errors.Location(client_index=4), "cause")

    located = error.located(subround_index=2, node="n")

    assert located.location == errors.Location(None, 2, 4, "n", None)
    assert located.message == "Bad."
    assert located.cause_text == "cause"
    assert error.location == errors.Location(client_index=4)


def _nested(depth: int, width: int) -> list[object]:
    """Return lists of lists, each of which has the one below so many times."""
    value: list[object] = []
    for _ in range(depth):
        value = [value] * width
    return value


class _Mute:
    def __repr__(self) -> str:  # pyright: ignore[reportImplicitOverride]
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "start"),
    [
        pytest.param([1, "a", (2.5,)], "[1, 'a', (2.5,)]", id="as repr does"),
        pytest.param({"b": 1, "a": None}, "{", id="mapping"),
        pytest.param(_nested(10_000, 1), "[[[", id="very deep"),
        pytest.param(_nested(50, 9), "[[[", id="very many"),
        pytest.param(10**5000, "<no text of it: ValueError>", id="of 5,000 digits"),
        pytest.param(_Mute(), "<_Mute", id="class without a text"),
        pytest.param("\ud800", r"'\ud800'", id="lone surrogate"),
    ],
)
def test_any_value_is_described_in_short(value: object, start: str) -> None:
    text = errors.describe(value)

    assert text.startswith(start)
    assert len(text) <= errors.MAX_SHOWN + 3
    assert text.encode()
