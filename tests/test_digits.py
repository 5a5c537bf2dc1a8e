import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import demo


def test_every_image_has_one_owner_and_the_test_set_has_none() -> None:
    clients, test = demo.load_clients(30, seed=0)

    sizes = [sum(len(batch["y"]) for batch in batches) for batches in clients]
    assert sum(sizes) == 1437
    assert set(sizes) == {47, 48}
    (batch,) = test
    assert batch["x"].shape == (360, 8, 8)
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int32)
    assert (batch["x"].min(), batch["x"].max()) == (0.0, 1.0)
    images = [
        image.tobytes() for batches in clients for b in batches for image in b["x"]
    ]
    assert not set(images) & {image.tobytes() for image in batch["x"]}


def test_batches_are_full_but_the_last() -> None:
    clients, _ = demo.load_clients(10, seed=1, batch_size=32)

    for batches in clients:
        sizes = [len(batch["y"]) for batch in batches]
        assert set(sizes[:-1]) == {32}
        assert 0 < sizes[-1] <= 32


def test_split_and_weights_follow_the_seed() -> None:
    one, same, other = (demo.load_clients(5, seed)[0][0][0] for seed in (0, 0, 1))
    models = [demo.build_model(seed).initial_weights() for seed in (0, 0, 1)]

    np.testing.assert_array_equal(one["x"], same["x"])
    assert not np.array_equal(one["x"], other["x"])
    np.testing.assert_array_equal(models[0].trainable[0], models[1].trainable[0])
    assert not np.array_equal(models[0].trainable[0], models[2].trainable[0])


def test_more_clients_than_images_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="from 1 to 1437"):
        demo.load_clients(1438, seed=0)
