"""What builders and `learning.run` are given of another kind is told in words."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning import Model


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "fed_avg": lambda model: learning.build_fed_avg(model, sgd()),
    "fed_prox": lambda model: learning.build_fed_prox(model, sgd(), proximal=0.1),
    "fed_sgd": lambda model: learning.build_fed_sgd(model, sgd()),
    "mime_lite": lambda model: learning.build_mime_lite(model, sgd()),
    "scaffold": lambda model: learning.build_scaffold(model, 0.1, num_clients=3),
    "fed_eval": learning.build_fed_eval,
    "client_eval": learning.build_client_eval,
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_model_of_keras_is_told_from_one_of_learning(builder: str) -> None:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    with pytest.raises(
        errors.ValueMismatchError, match=r"Model\.from_keras\(model, loss"
    ):
        BUILDERS[builder](made)


@pytest.mark.parametrize("rate", [1, np.int64(1), np.float32(0.5), 0.5])
def test_rates_are_numbers_of_any_kind(linear_model: Model, rate: Any) -> None:
    learning.build_scaffold(
        linear_model, rate, num_clients=3, server_learning_rate=rate
    )
    learning.build_fed_prox(linear_model, sgd(), proximal=rate)


@pytest.mark.parametrize(
    "rate", ["0.1", True, None, [0.1], sgd()], ids=lambda rate: type(rate).__name__
)
def test_rates_of_another_kind_are_no_numbers(linear_model: Model, rate: Any) -> None:
    with pytest.raises(errors.ConfigError, match="above 0 and finite, a number, found"):
        learning.build_scaffold(linear_model, rate, num_clients=3)
    with pytest.raises(errors.ConfigError, match="to be at least 0, a number, found"):
        learning.build_fed_prox(linear_model, sgd(), proximal=rate)


@pytest.mark.parametrize(
    ("data", "text"),
    [({"anna": []}, "no mapping"), ([], "Expected clients in `data`, found none")],
    ids=["mapping", "none"],
)
def test_a_run_takes_a_sequence_of_clients(
    linear_model: Model, data: Any, text: str
) -> None:
    process = learning.build_fed_avg(linear_model, sgd())

    with pytest.raises(errors.ConfigError, match=text):
        learning.run(process, data, num_rounds=1)
