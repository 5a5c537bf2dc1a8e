"""MNIST, from its four IDX files or from Keras.

Source of the data and its format:
    Yann LeCun, Corinna Cortes, Christopher J. C. Burges: The MNIST database of
    handwritten digits. 1998, http://yann.lecun.com/exdb/mnist/.
"""

import gzip
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_UNSIGNED_BYTES = 8
"""The code of the only type of numbers that MNIST has."""


class Images(NamedTuple):
    """Images with their labels.

    Attributes:
        x: The images, f32[n, 784], from 0 to 1.
        y: The labels, i32[n].
    """

    x: NDArray[np.float32]
    y: NDArray[np.int32]

    def batch(self, size: int) -> list[dict[str, Any]]:
        """Return the images and labels in batches of `size`, the last one smaller."""
        starts = range(0, len(self.y), size)
        return [{"x": self.x[s : s + size], "y": self.y[s : s + size]} for s in starts]


def load_mnist(folder: pathlib.Path | None) -> tuple[Images, Images]:
    """Return the images to train on, and the images to test on.

    Args:
        folder: The folder of the files `train-images-idx3-ubyte`,
            `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
            `t10k-labels-idx1-ubyte`, each of which may end with `.gz`. None: Keras
            downloads MNIST.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file has another format.
    """
    if folder is None:
        import keras

        train, test = keras.datasets.mnist.load_data()
        return _scale(*train), _scale(*test)
    train, test = (
        _scale(_read(folder, f"{kind}-images", 3), _read(folder, f"{kind}-labels", 1))
        for kind in ("train", "t10k")
    )
    return train, test


def _scale(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Images:
    x = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
    return Images(x, labels.astype(np.int32))


def _read(folder: pathlib.Path, name: str, num_dimensions: int) -> NDArray[np.uint8]:
    named = re.compile(rf"{name}[-.]idx{num_dimensions}-ubyte(\.gz)?")
    found = [path for path in folder.glob("*") if named.fullmatch(path.name)]
    if not found:
        raise FileNotFoundError(
            f"Expected `{name}-idx{num_dimensions}-ubyte`, plain or with `.gz`, in"
            f" `{folder}`, found no such file: pass the folder of MNIST's four files as"
            " `--data`."
        )
    content = found[0].read_bytes()
    if found[0].suffix == ".gz":
        content = gzip.decompress(content)
    start = 4 + 4 * num_dimensions
    is_right = content[:4] == bytes([0, 0, _UNSIGNED_BYTES, num_dimensions])
    shape = np.frombuffer(content[4:start], ">u4").tolist() if is_right else []
    if not is_right or len(content) - start != np.prod(shape):
        raise ValueError(
            f"Expected an IDX file of unsigned bytes with {num_dimensions} dimensions"
            f" as `{found[0]}`, found another format, or a file that was cut short."
        )
    return np.frombuffer(content[start:], np.uint8).reshape(shape)
