import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import (
    CohortSampler,
    LearningProcess,
    Model,
    RoundRecord,
    build_fed_avg,
    run,
)


class Counter(NamedTuple):
    """A state that remembers what it was given."""

    round_index: int
    seen: tuple[Any, ...]


def build_counter() -> LearningProcess:
    def advance(state: Counter, data: list[Any]) -> tuple[Counter, dict[str, int]]:
        seen = (*state.seen, tuple(data))
        return Counter(state.round_index + 1, seen), {"num_clients": len(data)}

    return LearningProcess(lambda: Counter(0, ()), advance)


CLIENTS = [[name] for name in "abcdef"]


def test_all_clients_take_part_without_a_cohort_size() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=2)

    assert result.state.seen == (tuple(CLIENTS), tuple(CLIENTS))
    assert [record.clients for record in result.rounds] == [tuple(range(6))] * 2


def test_each_round_has_the_cohort_of_its_sampler() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=3, cohort_size=2, seed=9)

    sampler = CohortSampler(6, 2, 9)
    for index, (record, seen) in enumerate(
        zip(result.rounds, result.state.seen, strict=True)
    ):
        assert record.round_index == index
        assert list(record.clients) == sampler.sample(index)
        assert seen == tuple(CLIENTS[client] for client in record.clients)


def test_resumed_run_equals_one_in_one_go() -> None:
    whole = run(build_counter(), CLIENTS, num_rounds=5, cohort_size=3, seed=1)
    first = run(build_counter(), CLIENTS, num_rounds=2, cohort_size=3, seed=1)

    rest = run(
        build_counter(),
        CLIENTS,
        num_rounds=3,
        cohort_size=3,
        seed=1,
        state=first.state,
    )

    assert rest.state == whole.state
    assert [record.round_index for record in rest.rounds] == [2, 3, 4]


def test_rounds_are_evaluated_and_told() -> None:
    told: list[tuple[Any, RoundRecord]] = []

    result = run(
        build_counter(),
        CLIENTS,
        num_rounds=2,
        evaluate=lambda state: {"rounds": state.round_index},
        on_round=lambda state, record: told.append((state, record)),
    )

    assert [record.evaluation for record in result.rounds] == [
        {"rounds": 1},
        {"rounds": 2},
    ]
    assert [record for _, record in told] == list(result.rounds)
    assert told[-1][0] == result.state


def test_no_rounds_return_the_initial_state() -> None:
    result = run(build_counter(), CLIENTS, num_rounds=0)

    assert result.state == Counter(0, ())
    assert result.rounds == ()


def test_cohort_larger_than_all_clients_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="from 1 to 6"):
        run(build_counter(), CLIENTS, num_rounds=1, cohort_size=7)


def test_resumed_training_has_the_same_bits(
    linear_model: Model, make_batches: Callable[..., list[Any]]
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(4)]
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        keras.optimizers.SGD(1.0, momentum=0.9),
    )
    whole = run(process, clients, num_rounds=3, cohort_size=2)

    first = run(process, clients, num_rounds=1, cohort_size=2)
    rest = run(process, clients, num_rounds=2, cohort_size=2, state=first.state)

    for one, other in zip(
        whole.state.weights.trainable, rest.state.weights.trainable, strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_error_of_a_round_lists_at_most_ten_clients() -> None:
    def fail(state: Counter, data: list[Any]) -> Any:
        del state, data
        raise ValueError("no")

    process = LearningProcess(lambda: Counter(0, ()), fail)

    with pytest.raises(ValueError, match="no") as caught:
        run(process, [[]] * 1000, num_rounds=1)

    (note,) = caught.value.__notes__
    assert len(re.findall(r"\d+", note)) == 11
    assert note.endswith(" and 990 others.")


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ValueError("data[0]"), "The cohort is, in order, `clients[i]` for i in {}."),
        (
            errors.ComputationError("no", errors.Location(client_index=1)),
            "The client at position 1 of the cohort is `clients[{[1]}]`.",
        ),
    ],
    ids=["no place", "a place"],
)
def test_error_of_a_round_says_which_clients_its_cohort_has(
    error: Exception, note: str
) -> None:
    def fail(state: Counter, data: list[Any]) -> Any:
        del state, data
        raise error

    process = LearningProcess(lambda: Counter(0, ()), fail)

    with pytest.raises(type(error)) as caught:
        run(process, CLIENTS, num_rounds=1, cohort_size=3, seed=9)

    cohort = CohortSampler(6, 3, 9).sample(0)
    expected = note.replace("{[1]}", str(cohort[1])).replace(
        "{}", ", ".join(map(str, cohort))
    )
    assert caught.value.__notes__ == [expected]
