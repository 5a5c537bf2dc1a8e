"""Made-up images in MNIST's files, for the programs that read these."""

import gzip
import pathlib

import numpy as np
import pytest
from numpy.typing import NDArray

NUM_TRAINED, NUM_TESTED = 2000, 100


def write_idx(path: pathlib.Path, values: NDArray[np.uint8]) -> None:
    """Write an IDX file of unsigned bytes, compressed if its name ends with `.gz`."""
    sizes = np.array(values.shape, ">u4").tobytes()
    content = bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder of MNIST's files, in which the bright line is the digit."""
    folder = tmp_path_factory.mktemp("digits")
    generator = np.random.default_rng(0)
    for kind, size in {"train": NUM_TRAINED, "t10k": NUM_TESTED}.items():
        labels = generator.integers(0, 10, size).astype(np.uint8)
        images = generator.integers(0, 100, (size, 28, 28)).astype(np.uint8)
        images[np.arange(size), labels] = 255
        write_idx(folder / f"{kind}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{kind}-labels-idx1-ubyte", labels)
    return folder
