"""What is checked before anything is built."""

import importlib
from typing import Any

import keras
import pytest

import ray_fed.errors as errors
from ray_fed.learning.checks import check_keras_backend


def test_another_backend_of_keras_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")

    with pytest.raises(
        errors.UserError, match=r"found `torch`: .*KERAS_BACKEND=tensor"
    ):
        check_keras_backend()


def test_a_backend_of_keras_that_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(importlib, "import_module", fail)

    with pytest.raises(errors.UserError, match=r"found `jax`: .*KERAS_BACKEND=tensor"):
        check_keras_backend()
