from typing import Any

import dp_accounting
import dp_accounting.pld
import dp_accounting.rdp
import federated_language as fl
import keras
import numpy as np
import pytest
import scipy.stats

import ray_fed.errors as errors
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import Model, accounting, aggregators, build_fed_avg
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.learning.aggregators import private

NUM_DRAWS = 2_000
UPDATE_TYPE = fl.TensorType(np.float32, [NUM_DRAWS])
WEIGHT_TYPE = fl.TensorType(np.float32)


def run_rounds(aggregator: Any, updates: list[Any], rounds: int) -> list[Any]:
    part = aggregator.build(UPDATE_TYPE, WEIGHT_TYPE)
    state = part.initialize()
    weights = [np.float32(1)] * len(updates)
    found: list[Any] = []
    for _ in range(rounds):
        state, merged, metrics = part.next(state, updates, weights)
        found.append((state, merged, metrics))
    return found


def test_noise_has_its_distribution_and_is_drawn_anew(
    thread_context: ExecutionContext,
) -> None:
    made = aggregators.dp_mean(2.0, 1.5, 4, 100, 1e-5, seed=3)
    zeros = [np.zeros(NUM_DRAWS, "f")] * 3

    (_, first, metrics), (_, second, _) = run_rounds(made, zeros, 2)

    deviation = 1.5 * 2.0 / 4
    assert metrics["noise_deviation"] == np.float32(deviation)
    for drawn in (first, second):
        test = scipy.stats.kstest(drawn, "norm", args=(0, deviation))
        assert test.pvalue > 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(NUM_DRAWS)
    np.testing.assert_array_equal(run_rounds(made, zeros, 1)[0][1], first)
    assert thread_context.last_report is not None
    assert thread_context.last_report.no_kernel == ()


def test_denominator_is_fixed_and_updates_are_clipped() -> None:
    made = aggregators.dp_mean(1.0, 1e-6, 10, 100, 1e-5)
    update = np.full(NUM_DRAWS, 3.0, "f")

    ((_, merged, _),) = run_rounds(made, [update, update], 1)

    np.testing.assert_allclose(merged, 2 / np.sqrt(NUM_DRAWS) / 10, rtol=1e-4)


def test_tree_noise_grows_with_the_nodes_of_a_prefix() -> None:
    made = aggregators.dp_ftrl_mean(1.0, 2.0, 1, 6, 1e-5, seed=1)
    zeros = [np.zeros(NUM_DRAWS, "f")]

    rounds = run_rounds(made, zeros, 8)

    sums = np.cumsum([merged for _, merged, _ in rounds[:6]], axis=0)
    for leaves, total in enumerate(sums, start=1):
        deviation = 2.0 * np.sqrt(leaves.bit_count())
        test = scipy.stats.kstest(total, "norm", args=(0, deviation))
        assert test.pvalue > 0.001, leaves
    # Rounds 7 and 8 are of a new tree.
    restarted = rounds[6][1] + rounds[7][1]
    assert scipy.stats.kstest(restarted, "norm", args=(0, 2.0)).pvalue > 0.001
    assert abs(np.corrcoef(restarted, sums[1])[0, 1]) < 4 / np.sqrt(NUM_DRAWS)


def test_adaptive_bound_follows_a_noisy_share() -> None:
    made = aggregators.dp_mean("adaptive", 0.5, 100, 1_000, 1e-5)
    updates = [np.full(NUM_DRAWS, 1e-6, "f")] * 100

    (_, _, first), (_, _, second) = run_rounds(made, updates, 2)

    # All 100 are within the bound: exp(-0.2 (1 - 0.5)), and noise of 5 of 100 clients.
    assert first["clip_norm"] == np.float32(0.1)
    assert abs(second["clip_norm"] / (0.1 * np.exp(-0.1)) - 1) < 0.2 * 0.05 * 4
    assert second["clip_norm"] != np.float32(0.1 * np.exp(-0.1))


def test_noise_of_a_count_is_paid_for_by_that_of_the_sum() -> None:
    of_sum, of_count = private.split_noise(1.0, 5.0)

    assert of_sum > 1.0
    np.testing.assert_allclose(of_sum**-2 + (2 * of_count) ** -2, 1.0)


@pytest.mark.parametrize(
    ("noise", "sampled", "of", "rounds"),
    [(1.0, 100, 10_000, 500), (0.6, 50, 1_000, 20), (4.0, 10, 10, 3)],
)
def test_epsilon_is_that_of_dp_accounting(
    noise: float, sampled: int, of: int, rounds: int
) -> None:
    made: Any = aggregators.dp_mean(1.0, noise, sampled, of, 1e-6)
    accountant = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(
        sampled / of, dp_accounting.GaussianDpEvent(noise)
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))

    epsilon = made.privacy.epsilon(rounds)

    assert epsilon == accountant.get_epsilon(1e-6)
    assert made.privacy.epsilon(0) == 0.0


def test_epsilon_of_trees_counts_passes_and_the_rounds_of_the_last() -> None:
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    tree = dp_accounting.SingleEpochTreeAggregationDpEvent
    accountant.compose(dp_accounting.SelfComposedDpEvent(tree(5.0, 8), 2))
    accountant.compose(tree(5.0, 3))

    epsilon = TreeGaussian(5.0, 1e-6, 8).epsilon(19)

    assert epsilon == accountant.get_epsilon(1e-6)


@pytest.mark.parametrize(
    ("privacy", "computed"),
    [(SampledGaussian(1.25, 1e-6, 0.5), 1), (TreeGaussian(1.25, 1e-6, 8), 8)],
)
def test_rounds_of_one_kind_are_computed_once(privacy: Any, computed: int) -> None:
    accounting.compute_rdp.cache_clear()

    spent = [privacy.epsilon(count) for count in range(1, 30)]

    assert spent == sorted(spent)
    assert accounting.compute_rdp.cache_info().misses == computed


def test_training_with_noise_spends_by_the_rounds_of_its_state(
    linear_model: Model, make_batches: Any
) -> None:
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        aggregator=aggregators.dp_mean(0.5, 1.0, 2, 10, 1e-5),
    )
    state = process.initialize()

    state, metrics = process.next(state, [make_batches([4], 0), make_batches([2], 1)])
    again, _ = process.next(state, [[]])

    assert list(metrics)[-2:] == ["clip_norm", "noise_deviation"]
    assert process.privacy is not None
    assert process.privacy == SampledGaussian(1.0, 1e-5, 0.2)
    assert process.privacy.epsilon(int(again.round_index)) > process.privacy.epsilon(1)
    # Noise hides that nobody had examples.
    assert not np.array_equal(again.weights.trainable[0], state.weights.trainable[0])


def dp_mean(clip_norm: Any = 1.0, noise: Any = 1.0, **more: Any) -> Any:
    settings: Any = {"clients_per_round": 2, "num_clients": 10, "delta": 1e-5} | more
    return aggregators.dp_mean(clip_norm, noise, **settings)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: dp_mean(np.inf), "`clip_norm` above 0 and finite"),
        (lambda: dp_mean(clip_norm=True), "`clip_norm` above 0"),
        (lambda: dp_mean(noise=-1.0), "`noise_multiplier` at least 0"),
        (lambda: dp_mean(noise=np.inf), "`noise_multiplier` at least 0 and"),
        (lambda: dp_mean(accountant="prv"), "`accountant` to be one of"),
        (lambda: dp_mean(clients_per_round=20), "`clients_per_round` .* from 1 to 10"),
        (lambda: dp_mean(clients_per_round=2.5), "`clients_per_round` to be a whole"),
        (lambda: dp_mean(num_clients=np.inf), "`num_clients` to be a whole"),
        (lambda: dp_mean(delta="a"), "`delta` above 0"),
        (lambda: dp_mean(seed=2**31), "`seed` to be a whole"),
        (lambda: dp_mean(seed=None), "`seed` to be a whole"),
        (lambda: aggregators.dp_ftrl_mean(1.0, 1.0, 2, 10, 1.0), "`delta`"),
        (
            lambda: aggregators.clipped(aggregators.AdaptiveNorm(), dp_mean()).build(
                UPDATE_TYPE, WEIGHT_TYPE
            ),
            "fixed bound",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_without_a_guarantee_are_refused(build: Any, match: str) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        build()


def find_noise(epsilon: Any = 8.0, **more: Any) -> float:
    settings: Any = {
        "num_rounds": 200,
        "clients_per_round": 100,
        "num_clients": 10_000,
        "delta": 1e-5,
    }
    return aggregators.find_noise_multiplier(epsilon, **settings | more)


def calibrate(
    make_accountant: Any,
    epsilon: float,
    num_rounds: int,
    probability: float,
    bracket: Any = None,
) -> float:
    """Return the noise that dp-accounting finds."""

    def make_event(noise_multiplier: float) -> Any:
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, num_rounds)

    return dp_accounting.calibrate_dp_mechanism(
        make_accountant, make_event, epsilon, 1e-5, bracket
    )


@pytest.mark.parametrize("epsilon", [8.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_noise_for_an_epsilon_is_that_of_dp_accounting(epsilon: float) -> None:
    found = find_noise(epsilon)

    assert found == calibrate(dp_accounting.rdp.RdpAccountant, epsilon, 200, 0.01)
    made: Any = aggregators.dp_mean(1.0, found, 100, 10_000, 1e-5)
    assert epsilon - 1e-3 < made.privacy.epsilon(200) <= epsilon


@pytest.mark.slow
def test_privacy_loss_distributions_need_less_noise() -> None:
    settings = {"num_rounds": 5, "clients_per_round": 500}

    found = find_noise(0.5, accountant="pld", **settings)

    by_rdp = find_noise(0.5, **settings)
    assert found < by_rdp
    bracket = dp_accounting.ExplicitBracketInterval(found - 0.01, by_rdp)
    accountant: Any = dp_accounting.pld.PLDAccountant
    exact = calibrate(accountant, 0.5, 5, 0.05, bracket)
    assert found == pytest.approx(exact, abs=2e-6)
    assert SampledGaussian(found, 1e-5, 0.05).epsilon(5) > 0.5


def test_epsilon_by_privacy_loss_distributions_is_that_of_dp_accounting() -> None:
    made: Any = aggregators.dp_mean(1.0, 2.0, 50, 1_000, 1e-5, accountant="pld")
    accountant = dp_accounting.pld.PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, gaussian), 100)

    epsilon = made.privacy.epsilon(100)

    assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert (
        made.privacy.epsilon(50) < epsilon < SampledGaussian(2, 1e-5, 0.05).epsilon(100)
    )
    assert made.privacy.epsilon(0) == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epsilon": 0.0}, "`epsilon` above 0"),
        ({"epsilon": np.inf}, "`epsilon` above 0 and finite"),
        ({"num_rounds": 0}, "`num_rounds`"),
        ({"clients_per_round": 20_000}, "`clients_per_round`"),
        ({"delta": 0.0}, "`delta` above 0"),
        ({"accountant": "gdp"}, "`accountant` to be one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_have_no_noise_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        find_noise(**settings)


@pytest.mark.parametrize("clip_norm", [1.0, "adaptive"])
def test_without_noise_epsilon_is_infinite_and_the_mean_is_exact(
    clip_norm: Any,
) -> None:
    made: Any = aggregators.dp_mean(clip_norm, 0.0, 4, 10, 1e-5)
    updates = [np.full(NUM_DRAWS, 1e-5, "f"), np.full(NUM_DRAWS, -3.0, "f")]

    (_, merged, metrics), (_, _, second) = run_rounds(made, updates, 2)

    bound = metrics["clip_norm"]
    clipped = -bound / np.sqrt(NUM_DRAWS)
    np.testing.assert_allclose(merged, (1e-5 + clipped) / 4, rtol=1e-5)
    assert metrics["noise_deviation"] == 0
    assert [made.privacy.epsilon(count) for count in (0, 1, 9)] == [0, np.inf, np.inf]
    if clip_norm == "adaptive":  # one of two clients is within, of four expected
        expected = bound * np.exp(-0.2 * (1 / 4 - 0.5))
        np.testing.assert_allclose(second["clip_norm"], expected, rtol=1e-6)
    tree: Any = aggregators.dp_ftrl_mean(1.0, 0, 4, 10, 1e-5)
    ((_, merged, _),) = run_rounds(tree, updates, 1)
    assert len(set(merged)) == 1
    assert tree.privacy.epsilon(1) == np.inf


def test_missing_dp_accounting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)

    with pytest.raises(errors.UserError, match="pip install dp-accounting"):
        SampledGaussian(1.0, 1e-5, 0.1).epsilon(1)
    with pytest.raises(errors.UserError, match="pip install dp-accounting"):
        find_noise()
