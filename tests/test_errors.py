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


@pytest.mark.parametrize("cls", _all_errors())
def test_error_pickles_with_its_message(cls: type[errors.RayFedError]) -> None:
    error = cls("Expected X, found Y.")

    again: errors.RayFedError = pickle.loads(pickle.dumps(error))

    assert type(again) is cls
    assert str(again) == "Expected X, found Y."
    assert again.args == error.args


def test_computation_error_pickles_with_its_fields() -> None:
    error = errors.ComputationError("It raised.", LOCATION, "Traceback ...")

    again: errors.ComputationError = pickle.loads(pickle.dumps(error))

    assert again.message == "It raised."
    assert again.location == LOCATION
    assert again.cause_text == "Traceback ..."
    assert str(again) == str(error)


def test_budget_error_pickles_with_its_fields() -> None:
    error = errors.RetryBudgetError("Too often.", "memory", LOCATION)

    again: errors.RetryBudgetError = pickle.loads(pickle.dumps(error))

    assert again.message == "Too often."
    assert again.failure_class == "memory"
    assert again.location == LOCATION
    assert str(again) == str(error)


@pytest.mark.parametrize("cls", _all_errors())
def test_error_is_drawn_in_the_tree(cls: type[errors.RayFedError]) -> None:
    assert f" {cls.__name__} " in " ".join(f"{inspect.getdoc(errors)} ".split())


@pytest.mark.claim("semantics.76", "semantics.77", "semantics.78")
@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        pytest.param(errors.UserError, (errors.RayFedError,), id="UserError"),
        pytest.param(errors.ConfigError, (errors.UserError, ValueError), id="Config"),
        pytest.param(
            errors.ValueMismatchError, (errors.UserError, TypeError), id="ValueMismatch"
        ),
        pytest.param(
            errors.UnsupportedError, (errors.UserError, ValueError), id="Unsupported"
        ),
        pytest.param(
            errors.MissingIntrinsicError,
            (errors.UserError, NotImplementedError),
            id="MissingIntrinsic",
        ),
        pytest.param(
            errors.CardinalityError, (errors.UserError, ValueError), id="Cardinality"
        ),
        pytest.param(
            errors.ContextStateError,
            (errors.UserError, RuntimeError),
            id="ContextState",
        ),
        pytest.param(
            errors.ComputationError, (errors.UserError, RuntimeError), id="Computation"
        ),
        pytest.param(
            errors.UpToMergeTypeError, (errors.UserError, TypeError), id="UpToMerge"
        ),
        pytest.param(
            errors.MergeTypeNotAssignableError,
            (errors.UserError, TypeError),
            id="Merge",
        ),
        pytest.param(
            errors.AfterMergeStructureError,
            (errors.UserError, ValueError),
            id="AfterMerge",
        ),
        pytest.param(
            errors.CompileError, (errors.RayFedError, ValueError), id="Compile"
        ),
        pytest.param(
            errors.ClusterError, (errors.RayFedError, RuntimeError), id="Cluster"
        ),
        pytest.param(errors.ResourceError, (errors.ClusterError,), id="Resource"),
        pytest.param(
            errors.DeadlineError, (errors.ClusterError, TimeoutError), id="Deadline"
        ),
        pytest.param(errors.WorkerLost, (errors.ClusterError,), id="WorkerLost"),
        pytest.param(errors.RetryBudgetError, (errors.ClusterError,), id="RetryBudget"),
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
        pytest.param(errors.Location(), "", id="nothing known"),
        pytest.param(
            errors.Location(client_index=0), "client at position 0", id="client"
        ),
        pytest.param(
            LOCATION,
            "call 3, subround 1, client at position 7, node 10.0.0.1, attempt 2",
            id="all known",
        ),
    ],
)
def test_location_says_what_is_known(location: errors.Location, text: str) -> None:
    assert str(location) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(errors.ComputationError("Bad."), "Bad.", id="nowhere"),
        pytest.param(
            errors.ComputationError("Bad.", errors.Location(client_index=4)),
            "Bad. [client at position 4]",
            id="computation",
        ),
        pytest.param(
            errors.RetryBudgetError("Bad.", "crash", errors.Location(node="n")),
            "Bad. [node n]",
            id="budget",
        ),
    ],
)
def test_message_ends_with_where_it_happened(error: Exception, text: str) -> None:
    assert str(error) == text


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
