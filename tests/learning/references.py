"""The papers' algorithms as plain loops of numpy, for linear regression.

The model is y = x w + b with the mean squared error; weights are (w, b), f64.
"""

from typing import Any

import federated_language as fl
import numpy as np

Weights = tuple[Any, ...]
Batches = list[Any]
LABEL_TYPE = fl.TensorType(np.float32, [None, 1])


def gradient(weights: Weights, batch: Any) -> Weights:
    residual = batch["x"] @ weights[0] + weights[1] - batch["y"]
    return 2 * batch["x"].T @ residual / len(residual), 2 * residual.mean(axis=0)


def full_gradient(weights: Weights, batches: Batches) -> Weights:
    joined = {key: np.concatenate([b[key] for b in batches]) for key in ("x", "y")}
    return gradient(weights, joined)


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


def fed_prox(
    start: Weights, clients: list[Batches], rounds: int, rate: float, mu: float
) -> Weights:
    """Li et al. 2020, Equation 2: each client descends F_k(w) + mu/2 |w - w_t|^2."""
    weights = start
    for _ in range(rounds):
        trained: list[Weights] = []
        for batches in clients:
            own = weights
            for batch in batches:
                own = tuple(
                    w - rate * (g + mu * (w - w0))
                    for w, g, w0 in zip(own, gradient(own, batch), weights, strict=True)
                )
            trained.append(own)
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
        weights = tuple(w - rate * g for w, g in zip(weights, mean, strict=True))
    return weights


def mime_lite(
    start: Weights, clients: list[Batches], rounds: int, rate: float, beta: float
) -> Weights:
    """Karimireddy et al. 2021, Algorithm 1, with heavy-ball momentum as optimiser.

    The step is y <- y + beta s - rate g, the state s <- beta s - rate mean g.
    """
    weights, momentum = start, tuple(np.zeros_like(w) for w in start)
    sizes = [float(count(batches)) for batches in clients]
    for _ in range(rounds):
        trained: list[Weights] = []
        for batches in clients:
            own = weights
            for batch in batches:
                own = tuple(
                    y + beta * s - rate * g
                    for y, s, g in zip(own, momentum, gradient(own, batch), strict=True)
                )
            trained.append(own)
        gradients = [full_gradient(weights, batches) for batches in clients]
        mean = average(gradients, sizes)
        weights = average(trained, sizes)
        momentum = tuple(
            beta * s - rate * g for s, g in zip(momentum, mean, strict=True)
        )
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
            own = weights
            for batch in clients[client]:
                own = tuple(
                    y - rate * (g - ci + c)
                    for y, g, ci, c in zip(
                        own,
                        gradient(own, batch),
                        own_controls[client],
                        control,
                        strict=True,
                    )
                )
            steps = len(clients[client])
            new = tuple(
                ci - c + (x - y) / (steps * rate)
                for ci, c, x, y in zip(
                    own_controls[client], control, weights, own, strict=True
                )
            )
            deltas.append(tuple(y - x for y, x in zip(own, weights, strict=True)))
            shifts.append(
                tuple(n - o for n, o in zip(new, own_controls[client], strict=True))
            )
            own_controls[client] = new
        ones = [1.0] * len(cohort)
        share = len(cohort) / len(clients)
        weights = tuple(
            w + d for w, d in zip(weights, average(deltas, ones), strict=True)
        )
        control = tuple(
            c + share * s for c, s in zip(control, average(shifts, ones), strict=True)
        )
    return weights, control, own_controls


def adaptive_clip(
    start: Weights, clients: list[Batches], rounds: int, rate: float, adapt: Any
) -> tuple[Weights, float]:
    """Andrew et al. 2021, Algorithm 1 without noise, over one pass of local SGD."""
    weights, bound = start, adapt.initial
    for _ in range(rounds):
        deltas: list[Weights] = []
        within: list[bool] = []
        for batches in clients:
            own = weights
            for batch in batches:
                own = tuple(
                    w - rate * g for w, g in zip(own, gradient(own, batch), strict=True)
                )
            delta = tuple(y - x for y, x in zip(own, weights, strict=True))
            norm = np.sqrt(sum((part**2).sum() for part in delta))
            within.append(norm <= bound)
            deltas.append(tuple(part * min(1.0, bound / norm) for part in delta))
        mean = average(deltas, [1.0] * len(clients))
        weights = tuple(w + d for w, d in zip(weights, mean, strict=True))
        bound *= np.exp(-adapt.learning_rate * (np.mean(within) - adapt.quantile))
    return weights, bound
