"""Compare two learning rates with Ray Tune: each trial trains on its own worker.

    python examples/tune_learning_rates.py

Needs `pip install "ray[tune]"`.
"""

import tempfile
from typing import Any

import numpy as np
from ray import tune

NUM_WORKERS = 1  # of each trial


def train(settings: dict[str, float]) -> None:
    """Run one trial: train with a learning rate, and report the last loss."""
    import keras

    import ray_fed
    from ray_fed import learning

    ray_fed.init(config=ray_fed.Config(workers=NUM_WORKERS, progress="off"))
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(20, 30, 4)).astype(np.float32)
    clients = [[{"x": x, "y": (x[:, 0] > 0).astype(np.int32)}] for x in rows]
    model = learning.Model.from_keras(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    process = learning.build_fed_avg(model, keras.optimizers.SGD(settings["rate"]))
    result = learning.run(process, clients, num_rounds=5, cohort_size=10)
    tune.report({"loss": result.history.values("loss")[-1]})
    ray_fed.shutdown()


def main() -> None:
    """Try two learning rates, and print the better one."""
    bundles: list[Any] = [{"CPU": 1}] + [{"CPU": 1}] * NUM_WORKERS
    tuner = tune.Tuner(
        tune.with_resources(train, tune.PlacementGroupFactory(bundles)),
        param_space={"rate": tune.grid_search([0.01, 0.3])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
    )
    best = tuner.fit().get_best_result().config or {}
    print("best learning rate:", best["rate"])


if __name__ == "__main__":
    main()
