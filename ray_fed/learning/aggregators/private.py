"""Means with noise from the server, which give clients central differential privacy.

    DP-FedAvg   (sum_k clip(delta_k, C) + N(0, (z C)^2)) / m
    DP-FTRL     the same, with the noise of a tree over rounds: sums of rounds 1 to t
                have the noise of at most log2(t) + 1 nodes

m is `clients_per_round`, whatever the number of clients that took part. An adaptive
bound C follows the number of clients whose norm is within C. This number also gets
noise, and the noise of the sum is larger to pay for it.

Sources:
    Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: Learning Differentially
    Private Recurrent Language Models. ICLR 2018, https://arxiv.org/abs/1710.06963,
    Algorithm 1 with the estimator f_f.

    Galen Andrew, Om Thakkar, Brendan McMahan, Swaroop Ramaswamy: Differentially Private
    Learning with Adaptive Clipping. NeurIPS 2021, https://arxiv.org/abs/1905.03871,
    Algorithm 1 and Theorem 1.

    Peter Kairouz, Brendan McMahan, Shuang Song, Om Thakkar, Abhradeep Thakurta, Zheng
    Xu: Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021,
    https://arxiv.org/abs/2103.00039, Algorithm 1 and Section 3 (restarts).
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
import math
from collections import OrderedDict
from typing import Any, Literal, get_args

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.accounting import (
    Accountant,
    NoiseState,
    SampledGaussian,
    TreeGaussian,
    check_cohorts,
)
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    Summed,
    refuse_statistics,
)
from ray_fed.learning.aggregators.clipping import AdaptiveNorm, clip
from ray_fed.learning.checks import check_number, expect_one_of
from ray_fed.learning.tensors import specs_of

_LEVELS = 31
"""Largest number of levels of a tree: the bits of a round's number."""

_ADAPTIVE = AdaptiveNorm()


@dataclasses.dataclass(frozen=True)
class NoisyMean(Summed):
    """The aggregator of `dp_mean` and `dp_ftrl_mean`, which explain the other fields.

    The noise follows from the seed and the state, a `NoiseState`. So a round that is
    repeated from the same state draws the same noise.

    Attributes:
        norm: Bound on a client's update.
        noise_multiplier: Noise of the sum, after the share for an adaptive bound.
        privacy: Privacy that each round spends.
        count_noise: Standard deviation of the noise of an adaptive bound's count.
        rounds_per_tree: Number of rounds of a tree. None: each round has its own noise.
        counts_empty_rounds: True, because noise hides that nobody took part.
    """

    norm: float | AdaptiveNorm
    noise_multiplier: float
    clients_per_round: int
    seed: int
    privacy: SampledGaussian | TreeGaussian | None
    num_clients: int | None
    count_noise: float = 0.0
    rounds_per_tree: int | None = None
    counts_empty_rounds: bool = True

    @override
    def initial_state(self) -> NoiseState:
        assert self.privacy is not None
        norm = self.norm
        bound = norm.initial if isinstance(norm, AdaptiveNorm) else norm
        spends = tf.constant(self.privacy.a_round, tf.float64)
        return NoiseState(tf.constant(0), tf.constant(bound, tf.float32), spends)

    @override
    def check(self, update_type: fl.Type) -> None:
        name = "dp_mean" if self.rounds_per_tree is None else "dp_ftrl_mean"
        refuse_statistics(update_type, name, "noise puts variances below zero")
        _check_floats(update_type, name)

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        clipped, norm = clip(update, state.bound)
        counts = weight > 0
        clipped = tf.nest.map_structure(
            lambda t: tf.where(counts, t, tf.zeros_like(t)), clipped
        )
        within = tf.cast(counts & (norm <= state.bound), tf.float32)
        return clipped, (tf.cast(counts, tf.float32), within)

    @override
    def server(self, sums: Any, state: Any) -> Any:
        update, (_, within) = sums
        round_index, bound, spends = state
        deviation = self.noise_multiplier * bound

        def add_noise(t: Any, place: int) -> tf.Tensor:
            if not self.noise_multiplier:
                return t
            return t + tf.cast(deviation * self._noise(t, place, round_index), t.dtype)

        noisy = [
            add_noise(t, place) / self.clients_per_round
            for place, t in enumerate(tf.nest.flatten(update))
        ]
        metrics = OrderedDict(
            clip_norm=bound, noise_deviation=deviation / self.clients_per_round
        )
        if isinstance(self.norm, AdaptiveNorm):
            # The count's place follows the places of all tensors.
            if self.count_noise:
                drawn = self._noise(within, len(noisy), round_index)
                within += self.count_noise * drawn
            share = within / self.clients_per_round
            bound = self.norm.next_bound(bound, share)
        new_state = NoiseState(round_index + 1, bound, spends)
        return tf.nest.pack_sequence_as(update, noisy), new_state, metrics

    def _noise(self, like: Any, place: int, round_index: Any) -> Any:
        """Return the unscaled noise of a round for one tensor of the update.

        With trees, this is the growth of a tree's noise since the previous round.
        """
        if self.rounds_per_tree is None:
            return self._draw(like, place, round_index, 0)
        tree = round_index // self.rounds_per_tree
        leaf = round_index % self.rounds_per_tree
        after = self._prefix_noise(like, place, tree, leaf + 1)
        return after - self._prefix_noise(like, place, tree, leaf)

    def _prefix_noise(self, like: Any, place: int, tree: Any, leaves: Any) -> Any:
        """Return the sum of the noise of the nodes that cover a tree's first leaves."""

        def add(level: Any, total: Any) -> Any:
            node = tf.bitwise.right_shift(leaves, level)
            # If `node` is odd, the node before it on this level ends the prefix.
            drawn = self._draw(like, place, tree, (level + 1) * 2**24 + node)
            return level + 1, total + tf.cast(node % 2, tf.float32) * drawn

        levels = max(1, (self.rounds_per_tree or 1).bit_length())
        total = tf.zeros_like(like, tf.float32)
        for level in range(min(levels, _LEVELS)):
            _, total = add(tf.constant(level), total)
        return total

    def _draw(self, like: Any, place: int, first: Any, second: Any) -> Any:
        fold_in: Any = tf.random.fold_in
        key = tf.constant([self.seed, place])
        for number in (first, second):
            key = fold_in(key, number)
        return tf.random.stateless_normal(like.shape, key)


@tracebacks.shorten
def dp_mean(
    clip_norm: float | AdaptiveNorm | Literal["adaptive"],
    noise_multiplier: float,
    clients_per_round: int,
    num_clients: int,
    delta: float,
    *,
    seed: int = 0,
    accountant: Accountant = "rdp",
) -> Aggregator:
    """Return DP-FedAvg's mean: clipped updates, Gaussian noise, a fixed denominator.

    The guarantee, `process.privacy.epsilon(state.round_index)`, holds for cohorts that
    are Poisson samples. Metrics of training, such as the loss, have no noise, so the
    guarantee does not cover them. Clients count the same, however many examples they
    have. Metrics of this aggregator are `clip_norm`, the bound C of the round, and
    `noise_deviation`, the standard deviation of the noise of each coordinate of the
    mean.

    Args:
        clip_norm: C, the bound on the norm of a client's update. With "adaptive", it
            begins with 0.1 and follows the median of the clients' norms.
        noise_multiplier: z, the standard deviation of the noise divided by C, >= 0. An
            adaptive bound uses about a tenth of it. `find_noise_multiplier` returns the
            value for an epsilon. With 0, rounds have no noise, and epsilon is infinite.
        clients_per_round: m, the expected size of a cohort, >= 1.
        num_clients: Number of clients to sample from, >= `clients_per_round`.
        delta: Probability with which the guarantee may fail, > 0 and < 1.
        seed: Seed of the noise, >= 0. Anybody who knows it can remove the noise.
        accountant: Method of computing epsilon: "rdp", by Rényi divergences, or "pld",
            by privacy loss distributions. "pld" gives a smaller epsilon for the same
            noise, and takes longer for each record.

    Raises:
        ConfigError: An argument is out of its range.
    """
    _check_numbers(noise_multiplier, clients_per_round, num_clients, delta, seed)
    expect_one_of("accountant", accountant, get_args(Accountant))
    privacy = SampledGaussian(
        noise_multiplier, delta, clients_per_round / num_clients, accountant
    )
    norm = _ADAPTIVE if clip_norm == "adaptive" else clip_norm
    if not isinstance(norm, AdaptiveNorm):
        _check_norm(norm)
        return NoisyMean(
            norm, noise_multiplier, clients_per_round, seed, privacy, num_clients
        )
    count_noise = clients_per_round / 20  # Section 3.1 of Andrew et al.
    of_sum, count_noise = split_noise(noise_multiplier, count_noise)
    return NoisyMean(
        norm, of_sum, clients_per_round, seed, privacy, num_clients, count_noise
    )


@tracebacks.shorten
def dp_ftrl_mean(
    clip_norm: float,
    noise_multiplier: float,
    clients_per_round: int,
    num_clients: int,
    delta: float,
    *,
    seed: int = 0,
) -> Aggregator:
    """Return the mean of DP-FTRL: clipped updates and the noise of a tree over rounds.

    A pass over all clients has `ceil(num_clients / clients_per_round)` rounds, and each
    pass begins a new tree. The guarantee needs no sampling, but each client may take
    part at most once in a pass. With SGD at the server this is DP-FTRL with restarts.

    Args:
        clip_norm: C, the bound on the norm of a client's update, > 0.
        noise_multiplier: z, the standard deviation of a tree node's noise divided by C,
            >= 0. With 0, rounds have no noise, and epsilon is infinite.
        clients_per_round: m, the fixed denominator, >= 1.
        num_clients: Number of clients of a pass, >= `clients_per_round`.
        delta: Probability with which the guarantee may fail, > 0 and < 1.
        seed: Seed of the noise, >= 0. Anybody who knows it can remove the noise.

    Raises:
        ConfigError: An argument is out of its range.
    """
    _check_numbers(noise_multiplier, clients_per_round, num_clients, delta, seed)
    _check_norm(clip_norm)
    rounds = math.ceil(num_clients / clients_per_round)
    privacy = TreeGaussian(noise_multiplier, delta, rounds)
    return NoisyMean(
        clip_norm,
        noise_multiplier,
        clients_per_round,
        seed,
        privacy,
        num_clients,
        rounds_per_tree=rounds,
    )


def split_noise(noise_multiplier: float, count_noise: float) -> tuple[float, float]:
    """Split a noise multiplier between a sum and a count of clients.

    Return the noise multiplier of the sum, z_sum = (z^-2 - (2 sigma_b)^-2)^(-1/2), and
    the deviation sigma_b of the count's noise. Both together protect as z alone does on
    the sum (Theorem 1). If `count_noise` is not above z / 2, sigma_b is z. Without
    noise, both are 0.
    """
    if not noise_multiplier:
        return 0.0, 0.0
    if 2 * count_noise <= noise_multiplier:
        count_noise = noise_multiplier
    left = noise_multiplier**-2 - (2 * count_noise) ** -2
    return left**-0.5, count_noise


def _check_norm(norm: Any) -> None:
    # Noise protects a client only if the client's update is bounded.
    wanted = 'above 0 and finite, or "adaptive"'
    check_number("clip_norm", norm, lambda bound: bound > 0, wanted)


def _check_floats(update_type: Any, name: str) -> None:
    # Norms, and so the noise, cover floats only.
    for spec in tf.nest.flatten(specs_of(update_type)):
        if not spec.dtype.is_floating:
            raise errors.ValueMismatchError(
                f"Expected updates of floats for `{name}`, found {spec.dtype.name}:"
                " cast it at the clients."
            )


def _check_numbers(
    noise_multiplier: Any,
    clients_per_round: Any,
    num_clients: Any,
    delta: Any,
    seed: Any,
) -> None:
    check_number(
        "noise_multiplier", noise_multiplier, lambda z: z >= 0, "at least 0 and finite"
    )
    check_cohorts(clients_per_round, num_clients, delta)
    read_whole("seed", seed, 0, 2**31 - 1)
