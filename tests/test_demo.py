"""The demo as users start it: in a process of its own; its data, split by label.

`.ci/run` runs it on Ray.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

from ray_fed import demo

_COMMAND = [sys.executable, "-m", "ray_fed.cli", "demo"]
_SMALL = ["--clients", "6", "--workers", "2", "--json", "--rounds"]


def run_demo(num_rounds: str, *args: str) -> dict[str, Any]:
    finished = subprocess.run(
        [*_COMMAND, *_SMALL, num_rounds, *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_demo_resumes_and_leaves_figures_a_model_and_a_picture(
    tmp_path: pathlib.Path,
) -> None:
    saved, picture = tmp_path / "model.keras", tmp_path / "curve.png"
    place = ["--storage-path", str(tmp_path / "run")]

    first = run_demo("2", "--backend", "local", *place)
    report = run_demo(
        "3", "--backend", "local", *place, "--save", str(saved), "--plot", str(picture)
    )

    facts = "accuracy loss rounds clients_per_second retries seconds"
    assert list(report) == facts.split()
    assert (first["rounds"], report["rounds"], report["retries"]) == (2, 3, 0)
    assert report["loss"] < first["loss"]
    assert report["clients_per_second"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    model: Any = keras.models.load_model(saved)
    assert model.count_params() == 9610


def test_every_image_is_in_a_batch_of_one_owner_or_in_the_test_set() -> None:
    clients, test = demo.load_clients(30, seed=0)

    sizes = [[len(batch["y"]) for batch in batches] for batches in clients]
    assert sum(map(sum, sizes)) == 1437
    assert set(map(tuple, sizes)) == {(8,) * 5 + (7,), (8,) * 6}
    (batch,) = test
    assert batch["x"].shape == (360, 8, 8)
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int32)
    assert (batch["x"].min(), batch["x"].max()) == (0.0, 1.0)
    images = [
        image.tobytes() for batches in clients for b in batches for image in b["x"]
    ]
    assert not set(images) & {image.tobytes() for image in batch["x"]}


def test_split_and_weights_follow_the_seed() -> None:
    one, same, other = (demo.load_clients(5, seed)[0][0][0] for seed in (0, 0, 1))
    models = [demo.build_model(seed).initial_weights() for seed in (0, 0, 1)]

    np.testing.assert_array_equal(one["x"], same["x"])
    assert not np.array_equal(one["x"], other["x"])
    np.testing.assert_array_equal(models[0].trainable[0], models[1].trainable[0])
    assert not np.array_equal(models[0].trainable[0], models[2].trainable[0])
