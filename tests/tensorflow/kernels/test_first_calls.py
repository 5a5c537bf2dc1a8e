"""The first call of a graph, in which TensorFlow optimizes it, runs alone."""

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import execute

from ray_fed.tensorflow.kernels.graph_functions import as_graph


def add_one(x: Any) -> list[Any]:
    return [x + 1.0]


def test_calls_wait_for_the_first_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = as_graph(add_one, [tf.TensorSpec([], tf.float32)])
    lock, num_active, most_active = threading.Lock(), 0, [0]
    both_run = threading.Barrier(2)
    actual = execute.execute_with_cancellation

    def counted(*args: Any) -> Any:
        nonlocal num_active
        with lock:
            num_active += 1
            most_active[-1] = max(most_active[-1], num_active)
        if len(most_active) == 2:
            both_run.wait(30)
        try:
            return actual(*args)
        finally:
            with lock:
                num_active -= 1

    monkeypatch.setattr(execute, "execute_with_cancellation", counted)

    def call(results: list[float]) -> None:
        results.append(float(run([tf.constant(np.float32(1))])[0]))

    for _ in range(2):
        results: list[float] = []
        threads = [threading.Thread(target=call, args=[results]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [2.0, 2.0]
        most_active.append(0)

    assert most_active[:2] == [1, 2]
