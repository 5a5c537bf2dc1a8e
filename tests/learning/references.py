"""The papers' algorithms as plain loops of numpy, for linear regression.

The model is y = x w + b with the mean squared error; weights are (w, b), f64.
"""

from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np

Weights = tuple[Any, ...]
Batches = list[Any]
LABEL_TYPE = fl.TensorType(np.float32, [None, 1])


def gradient(weights: Weights, batch: Any) -> Weights:
    residual = batch["x"] @ weights[0] + weights[1] - batch["y"]
    return 2 * batch["x"].T @ residual / len(residual), 2 * residual.mean(axis=0)


def joined(batches: Batches) -> Any:
    return {key: np.concatenate([b[key] for b in batches]) for key in ("x", "y")}


def full_gradient(weights: Weights, batches: Batches) -> Weights:
    return gradient(weights, joined(batches))


def count(batches: Batches) -> int:
    return sum(len(batch["x"]) for batch in batches)


def average(values: list[Weights], sizes: list[float]) -> Weights:
    shares = [size / sum(sizes) for size in sizes]
    return tuple(
        sum(share * value[part] for share, value in zip(shares, values, strict=True))
        for part in range(2)
    )


def as_doubles(weights: Any) -> Weights:
    return tuple(np.array(part, np.float64) for part in weights)


def descend(start: Weights, batches: Batches, rate: float, push: Any = None) -> Weights:
    """One pass of local SGD; `push`, also as a function, is added to gradients."""
    own = start
    for batch in batches:
        pushed: Any = push(own) if callable(push) else push or [0.0] * len(own)
        own = tuple(
            w - rate * (g + p)
            for w, g, p in zip(own, gradient(own, batch), pushed, strict=True)
        )
    return own


def less(one: Sequence[Any], other: Sequence[Any]) -> Weights:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def more(one: Sequence[Any], other: Sequence[Any], factor: float = 1.0) -> Weights:
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def fed_prox(
    start: Weights, clients: list[Batches], rounds: int, rate: float, mu: float
) -> Weights:
    """Li et al. 2020, Equation 2: each client descends F_k(w) + mu/2 |w - w_t|^2."""
    weights = start
    for _ in range(rounds):

        def push(now: Weights) -> list[Any]:
            return [mu * d for d in less(now, weights)]  # noqa: B023 (in this round)

        trained = [descend(weights, batches, rate, push) for batches in clients]
        weights = average(trained, [count(batches) for batches in clients])
    return weights


def fed_sgd(
    start: Weights, clients: list[Batches], rounds: int, rate: float
) -> Weights:
    """McMahan et al. 2017, Section 2: one step against the mean of the gradients."""
    weights = start
    sizes = [float(count(batches)) for batches in clients]
    for _ in range(rounds):
        gradients = [full_gradient(weights, batches) for batches in clients]
        mean = average(gradients, sizes)
        weights = more(weights, mean, -rate)
    return weights


def mime_lite(
    start: Weights, clients: list[Batches], rounds: int, rate: float, beta: float
) -> Weights:
    """Karimireddy et al. 2021, Algorithm 1, with heavy-ball momentum as optimizer.

    The step is y <- y + beta s - rate g, the state s <- beta s - rate mean g.
    """
    weights, momentum = start, tuple(np.zeros_like(w) for w in start)
    sizes = [float(count(batches)) for batches in clients]
    for _ in range(rounds):
        push = [-beta * s / rate for s in momentum]
        trained = [descend(weights, each, rate, push) for each in clients]
        gradients = [full_gradient(weights, batches) for batches in clients]
        mean = average(gradients, sizes)
        weights = average(trained, sizes)
        momentum = more([beta * s for s in momentum], mean, -rate)
    return weights


def scaffold(
    start: Weights, clients: list[Batches], cohorts: list[list[int]], rate: float
) -> tuple[Weights, Weights, list[Weights]]:
    """Karimireddy et al. 2020, Algorithm 1 with Option II, server rate 1."""
    weights, control = start, tuple(np.zeros_like(w) for w in start)
    own_controls = [control for _ in clients]
    for cohort in cohorts:
        deltas: list[Weights] = []
        shifts: list[Weights] = []
        for client in cohort:
            push = less(control, own_controls[client])
            own = descend(weights, clients[client], rate, push)
            share = 1 / (len(clients[client]) * rate)
            new = more(less(own_controls[client], control), less(weights, own), share)
            deltas.append(less(own, weights))
            shifts.append(less(new, own_controls[client]))
            own_controls[client] = new
        ones = [1.0] * len(cohort)
        weights = more(weights, average(deltas, ones))
        control = more(control, average(shifts, ones), len(cohort) / len(clients))
    return weights, control, own_controls


def adaptive_clip(
    start: Weights, clients: list[Batches], rounds: int, rate: float, adapt: Any
) -> tuple[Weights, float]:
    """Andrew et al. 2021, Algorithm 1 without noise, over one pass of local SGD."""
    weights, bound = start, adapt.initial
    for _ in range(rounds):
        deltas = [less(descend(weights, each, rate), weights) for each in clients]
        norms = [np.sqrt(sum((part**2).sum() for part in each)) for each in deltas]
        clipped = [
            tuple(part * min(1.0, bound / norm) for part in delta)
            for delta, norm in zip(deltas, norms, strict=True)
        ]
        weights = more(weights, average(clipped, [1.0] * len(clients)))
        within = np.mean([norm <= bound for norm in norms])
        bound *= np.exp(-adapt.learning_rate * (within - adapt.quantile))
    return weights, bound


def fed_nova(
    start: Weights, clients: list[Batches], rounds: int, rate: float, epochs: int
) -> Weights:
    """Wang et al. 2020, Section 4: w + tau_eff sum_k p_k (w_k - w) / tau_k."""
    weights = start
    sizes = [float(count(batches)) for batches in clients]
    steps = [len(batches) * epochs for batches in clients]
    effective = float(np.average(steps, weights=sizes))
    for _ in range(rounds):
        by_step = [
            tuple(d / tau for d in less(descend(weights, each * epochs, rate), weights))
            for each, tau in zip(clients, steps, strict=True)
        ]
        mean = average(by_step, sizes)
        weights = more(weights, mean, effective)
    return weights


def fed_dyn(
    start: Weights,
    clients: list[Batches],
    cohorts: list[list[int]],
    rate: float,
    alpha: float,
) -> tuple[Weights, Weights, list[Weights]]:
    """Acar et al. 2021, Algorithm 1, its minimum by one pass of local SGD."""
    weights, h = start, tuple(np.zeros_like(w) for w in start)
    own = [h for _ in clients]
    for cohort in cohorts:
        trained: list[Weights] = []
        for client in cohort:

            def push(now: Weights, kept: Weights = own[client]) -> list[Any]:
                drawn = less(now, weights)  # noqa: B023 (called in this pass alone)
                return [alpha * d - g for d, g in zip(drawn, kept, strict=True)]

            trained.append(descend(weights, clients[client], rate, push))
            own[client] = more(own[client], less(trained[-1], weights), -alpha)
        total = [sum(less(each, weights)[part] for each in trained) for part in (0, 1)]
        h = more(h, total, -alpha / len(clients))
        mean = average(trained, [1.0] * len(trained))
        weights = more(mean, h, -1 / alpha)
    return weights, h, own


def loss(weights: Weights, batches: Batches) -> float:
    rows = joined(batches)
    return float(np.mean((rows["x"] @ weights[0] + weights[1] - rows["y"]) ** 2))


def q_fed_avg(
    start: Weights, clients: list[Batches], rounds: int, rate: float, q: float
) -> Weights:
    """Li et al. 2020, Algorithm 2, with L = 1 / rate."""
    weights = start
    for _ in range(rounds):
        summed, divisor = (0.0, 0.0), 0.0
        for batches in clients:
            now = loss(weights, batches)
            delta = less(weights, descend(weights, batches, rate))
            scaled = [d / rate for d in delta]
            squares = sum(float((d**2).sum()) for d in scaled)
            summed = more(summed, scaled, now**q)
            divisor += q * now ** (q - 1) * squares + now**q / rate
        weights = more(weights, summed, -1 / divisor)
    return weights


def ditto(
    start: Weights,
    clients: list[Batches],
    cohorts: list[list[int]],
    rate: float,
    pull: float,
) -> tuple[Weights, list[Weights]]:
    """Li et al. 2021, Algorithm 1: federated averaging, and v_k beside it."""
    weights, own = start, [start for _ in clients]
    for cohort in cohorts:

        def push(now: Weights) -> list[Any]:
            return [pull * d for d in less(now, weights)]  # noqa: B023 (in this round)

        trained = [descend(weights, clients[client], rate) for client in cohort]
        for client in cohort:
            own[client] = descend(own[client], clients[client], rate, push)
        sizes = [float(count(clients[client])) for client in cohort]
        weights = average(trained, sizes)
    return weights, own


def fed_per(
    start: Weights, clients: list[Batches], cohorts: list[list[int]], rate: float
) -> tuple[Any, list[Any]]:
    """Arivazhagan et al. 2019: the kernel is shared, each client keeps its bias."""
    kernel, own = start[0], [start[1] for _ in clients]
    for cohort in cohorts:
        kernels: list[Any] = []
        for client in cohort:
            base, own[client] = descend((kernel, own[client]), clients[client], rate)
            kernels.append(base)
        sizes = [float(count(clients[client])) for client in cohort]
        kernel = np.average(kernels, axis=0, weights=sizes)
    return kernel, own
