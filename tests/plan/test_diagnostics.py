"""Notes: what work tells, collected by whoever evaluates it."""

import asyncio

import pytest

from ray_fed.plan import diagnostics

UNKEYED = diagnostics.RandomOpsUnkeyed(
    "the computation `f`", "ab", ("draw (RandomCrop)",)
)
UNLOWERED = diagnostics.ComputationUnlowered(
    "the computation `f`", "ab", "FlatMapDataset"
)


def test_tasks_tell_whoever_started_them() -> None:
    async def work() -> None:
        diagnostics.note([UNKEYED])

    async def evaluate() -> set[diagnostics.Note]:
        with diagnostics.noting() as noted:
            await asyncio.gather(
                work(), asyncio.to_thread(diagnostics.note, [UNLOWERED])
            )
        return noted

    assert asyncio.run(evaluate()) == {UNKEYED, UNLOWERED}


def test_work_that_was_interpreted_is_noted_with_the_first_line_of_its_error() -> None:
    note = diagnostics.WorkInterpreted.of("a merge", ValueError("refused\nat a line"))

    assert note == diagnostics.WorkInterpreted("a merge", "ValueError: refused")


def _raised_in(module: str, statement: str) -> Exception:
    """Return what a line of a module of this name raises."""
    try:
        exec(statement, {"__name__": module})
    except Exception as error:  # noqa: BLE001 (any: it is returned)
        return error
    raise AssertionError(f"Expected an error of `{statement}`, found none.")


@pytest.mark.parametrize(
    ("module", "statement", "is_final"),
    [
        ("ray_fed.somewhere", "None.missing", True),
        ("ray_fed.somewhere", "assert False", True),
        ("ray_fed.somewhere", "{}['missing']", True),
        ("ray_fed.somewhere", "raise ValueError('refused')", False),
        (
            "ray_fed.somewhere",
            "from ray_fed import errors as e; raise e.ClusterError",
            True,
        ),
        ("tensorflow.somewhere", "None.missing", False),
        ("__main__", "{}['missing']", False),
    ],
)
def test_final_errors_are_those_of_ray_fed_s_lines_and_of_the_cluster(
    module: str, statement: str, is_final: bool
) -> None:
    error = _raised_in(module, statement)

    assert diagnostics.is_final(error) == is_final
    if is_final:  # it is raised instead of noted
        with pytest.raises(type(error)):
            diagnostics.WorkInterpreted.of("a merge", error)


def test_defect_that_tensorflow_raises_again_is_one() -> None:
    again = _raised_in("tensorflow.somewhere", "raise KeyError('missing')")
    again.__context__ = _raised_in("ray_fed.somewhere", "{}['missing']")

    assert diagnostics.is_final(again)


def test_error_that_stands_for_another_one_is_no_defect() -> None:
    refused = _raised_in("ray_fed.somewhere", "raise ValueError('refused')")
    refused.__cause__ = _raised_in("ray_fed.somewhere", "{}['missing']")

    assert not diagnostics.is_final(refused)
