"""Runs whose cohorts depend on metrics of clients."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.data import ClientData
from ray_fed.learning import History, LearningProcess, Model
from ray_fed.learning.candidates import to_columns
from ray_fed.program import (
    ClientDataSource,
    ClientMetrics,
    OortSampler,
    PowerOfChoiceSampler,
    UniformSampler,
    WeightedSampler,
)
from tests.learning.counting import CLIENTS, build_counter

NUM_CLIENTS = 9
SAMPLERS = {
    "power of choice": PowerOfChoiceSampler(5, seed=2),
    "oort": OortSampler(exploration=0.6, least_exploration=0.0, decay=0.5),
}


@pytest.fixture(scope="module")
def clients(make_batches: Any) -> list[Any]:
    return [make_batches([3, 2], seed) for seed in range(NUM_CLIENTS)]


def bits(*values: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(values))


def run(process: Any, clients: Any, num_rounds: int, **more: Any) -> Any:
    settings: Any = {"cohort_size": 3, "sampler": SAMPLERS["power of choice"]} | more
    return learning.run(process, clients, num_rounds=num_rounds, **settings)


def test_power_of_choice_is_the_loop_of_the_paper(
    averaging: LearningProcess, linear_model: Model, clients: list[Any]
) -> None:
    weights = tuple(float(index) for index in range(NUM_CLIENTS))
    sampler = PowerOfChoiceSampler(5, weights, seed=7)

    result = run(averaging, clients, 4, sampler=sampler)

    evaluation = learning.build_client_eval(linear_model)
    state = averaging.initialize()
    for index, record in enumerate(result.history):
        candidates = WeightedSampler(weights, seed=7).sample(index, NUM_CLIENTS, 5)
        found = evaluation.next(state.weights, [clients[c] for c in candidates])
        losses = np.array([metrics["loss"] for metrics in found])
        largest = np.argsort(-losses)[:3]
        cohort = sorted(candidates[place] for place in largest)
        assert list(record.clients) == cohort
        assert record.candidates is not None
        assert list(record.candidates["client"]) == candidates
        np.testing.assert_array_equal(record.candidates["loss"], losses)
        assert record.candidates["num_examples"] == (5.0,) * 5
        state, _ = averaging.next(state, [clients[c] for c in cohort])
    assert bits(result.state) == bits(state)


@pytest.mark.parametrize("name", SAMPLERS)
def test_resumed_runs_have_the_cohorts_of_one_in_one_go(
    name: str, averaging: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    sampler = SAMPLERS[name]

    whole = run(averaging, clients, 6, sampler=sampler)
    run(averaging, clients, 2, sampler=sampler, storage_path=tmp_path)
    run(averaging, clients, 4, sampler=sampler, storage_path=tmp_path)
    resumed = run(averaging, clients, 6, sampler=sampler, storage_path=tmp_path)

    assert [r.clients for r in resumed.history] == [r.clients for r in whole.history]
    assert [r.candidates for r in History.load(tmp_path)] == [
        record.candidates for record in whole.history
    ]
    assert bits(resumed.state) == bits(whole.state)
    assert len({record.clients for record in whole.history}) > 1
    other = UniformSampler(0)
    with pytest.raises(errors.ConfigError, match="the `sampler`"):
        run(averaging, clients, 7, sampler=other, storage_path=tmp_path)


def see(losses: Mapping[int, float], last: int = 0) -> dict[int, ClientMetrics]:
    return {
        client: ClientMetrics(last, {"loss": loss, "num_examples": 10.0})
        for client, loss in losses.items()
    }


def test_clients_without_examples_are_chosen_last() -> None:
    sampler = PowerOfChoiceSampler(4)
    candidates = see({2: float("nan"), 4: 0.5, 5: 0.5, 7: 0.1})

    chosen = [sampler.choose(0, k, candidates) for k in (1, 2, 3, 4)]

    assert chosen == [[4], [4, 5], [4, 5, 7], [2, 4, 5, 7]]


def test_a_metric_may_not_have_the_name_of_the_clients() -> None:
    with pytest.raises(errors.ValueMismatchError, match="`client` of the sampler"):
        to_columns([2, 5], [{"client": 7.0}, {"client": 8.0}])


def test_oort_explores_a_share_that_falls() -> None:
    sampler = OortSampler(exploration=0.5, decay=0.5, least_exploration=0.1)
    seen = see(dict.fromkeys(range(20), 1.0))

    explored = [
        sum(client >= 20 for client in sampler.propose(index, 40, 10, seen))
        for index in range(5)
    ]

    assert explored == [round(10 * share) for share in (0.5, 0.25, 0.125, 0.1, 0.1)]
    assert len(sampler.propose(0, 40, 10, {})) == 10
    few = see(dict.fromkeys(range(2), 1.0))
    assert {0, 1} <= {*sampler.propose(9, 10, 9, few)}
    all_seen = see(dict.fromkeys(range(20), 1.0))
    assert len(sampler.propose(0, 20, 10, all_seen)) == 10


def test_oort_draws_clients_of_large_losses_that_wait_longest() -> None:
    sampler = OortSampler(exploration=0.0, least_exploration=0.0)
    losses = {client: 1.0 if client < 4 else 0.01 for client in range(10)}

    assert sampler.propose(5, 10, 4, see(losses)) == [0, 1, 2, 3]

    # n f is 1 to 1.05, and sqrt(0.1 log(R) / L) is 0.03 or 0.83.
    close = see(dict.fromkeys(range(10), 0.1), last=999)
    close |= see({3: 0.105, 6: 0.1}, last=0)
    assert sampler.propose(1000, 10, 2, close) == [3, 6]


def test_oort_draws_in_proportion_to_utilities() -> None:
    """Of two clients in the pool, the chances are those of their utilities."""
    losses = {0: 1.0, 1: 0.96, 2: 0.1}
    sampler = [
        OortSampler(exploration=0.0, least_exploration=0.0, seed=seed)
        for seed in range(2000)
    ]

    drawn = [each.propose(0, 3, 1, see(losses)) for each in sampler]

    assert {client for (client,) in drawn} == {0, 1}
    # The 95th percentile of 10, 9.6 and 1 is 9.96, and log(1) is 0.
    share = np.mean([client == 0 for (client,) in drawn])
    assert abs(share - 9.96 / (9.96 + 9.6)) < 4 * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize("name", SAMPLERS)
def test_wrong_settings_are_refused(
    name: str, averaging: LearningProcess, clients: list[Any]
) -> None:
    sampler = SAMPLERS[name]

    for size, match in [(None, "pass `cohort_size`"), (12, "`k` from 1 to")]:
        with pytest.raises(errors.ConfigError, match=match):
            run(averaging, clients, 1, sampler=sampler, cohort_size=size)
    with pytest.raises(errors.ConfigError, match="a `model` for a sampler"):
        run(build_counter(), CLIENTS, 1, sampler=sampler)
    data = ClientData.from_values({"a": 1.0}, np.float32)
    wrong: Any = sampler
    with pytest.raises(errors.ConfigError, match=r"adaptive sampler to `learning\.run"):
        ClientDataSource(data, wrong)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: PowerOfChoiceSampler(0), "`num_candidates`"),
        (lambda: PowerOfChoiceSampler(2, (1.0, -1.0)), "`weights` of at least 0"),
        (lambda: OortSampler(exploration=1.5), "`exploration` from 0 to 1"),
        (lambda: OortSampler(decay=-1), "`decay` from 0 to 1"),
        (lambda: OortSampler(seed=-1), "`seed`"),
        (
            lambda: PowerOfChoiceSampler(2, metric="auc").choose(0, 1, see({1: 0.5})),
            r"one of the metrics \['loss', 'num_examples'\]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_out_of_range_are_refused(build: Any, match: str) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        build()


def test_errors_of_candidates_name_the_client(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    broken = [*clients]
    broken[4] = [{"x": np.zeros((2, 3), "f"), "y": np.zeros((3, 1), "f")}]
    everyone = PowerOfChoiceSampler(NUM_CLIENTS)

    with pytest.raises(errors.ValueMismatchError, match=r"data\[4\]|client 4"):
        run(averaging, broken, 1, sampler=everyone)
