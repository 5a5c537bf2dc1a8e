"""Data of clients in the form that a kernel takes, and the shapes that clients have.

The data is laid once and may serve many rounds; the random states belong to one round.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.tensorflow.kernels.client_tensors import (
    ClientLayout,
    ClientShape,
    LaidPart,
)
from ray_fed.tensorflow.kernels.shaped_clients import Window
from ray_fed.tensorflow.tensors import copies


@dataclasses.dataclass(frozen=True)
class UniformShape:
    """The key of a graph for leaves whose clients are all of one shape.

    Attributes:
        clients: the shape of each client.
        window: how many clients' rows one step of the graph takes.
    """

    clients: ClientShape
    window: Window


@dataclasses.dataclass(frozen=True)
class LaidData:
    """The data of some clients, for any round.

    Attributes:
        tensors: the data, laid as `ClientLayout` does.
        shapes: the different shapes of these clients; None stands for clients that
            have no shape.
        kinds: for each client the index of its shape in `shapes`; empty where shapes
            decide nothing.
    """

    tensors: Sequence[tf.Tensor]
    shapes: Sequence[ClientShape | None]
    kinds: NDArray[np.intp]

    @classmethod
    def of(
        cls,
        layout: ClientLayout,
        parts: Sequence[LaidPart],
        *,
        with_shapes: bool,
    ) -> "LaidData":
        """Put together the data of some clients.

        Args:
            layout: of the data of one client.
            parts: all that it has, of the same clients.
            with_shapes: whether to look for the shapes of the clients.
        """
        tensors = layout.join(parts)
        if with_shapes:
            return cls(tensors, *layout.shapes(tensors))
        return cls(tensors, [], np.empty(0, np.intp))

    def count_bytes(self) -> int:
        """Return about how many bytes the tensors hold."""
        return sum(map(copies.count_bytes, self.tensors))


@dataclasses.dataclass(frozen=True)
class LaidClients:
    """The clients that one or several calls of a kernel cover, in one round.

    Attributes:
        states: the states of random ops in the clients' work, and of those in the
            accumulation: i64[clients, sites, 3] each.
        data: the data of the clients.
        shape: the shape of all clients of the leaves to fold; None where these leaves
            are folded by the graph for clients of any shape.
    """

    states: tuple[tf.Tensor, tf.Tensor]
    data: LaidData
    shape: UniformShape | None = None

    def of_shape(self, shape: UniformShape | None) -> "LaidClients":
        """Return the same clients, for leaves of a shape."""
        return dataclasses.replace(self, shape=shape)
