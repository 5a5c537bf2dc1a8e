"""Writes the work of a client, or of the server, as a function over tensors.

TensorFlow is imported when one of these names is first used. This takes seconds. If
`ray_fed.init` was called before, workers start in this time.
"""

from typing import TYPE_CHECKING

import ray_fed.imports as imports

if TYPE_CHECKING:
    from ray_fed.tensorflow.external_data import data
    from ray_fed.tensorflow.graphs.identity import identify_computation
    from ray_fed.tensorflow.tensors.specs import to_type
    from ray_fed.tensorflow.tracing import computation

__all__ = ["computation", "data", "identify_computation", "to_type"]

__getattr__ = imports.import_lazily(
    __name__,
    {
        "computation": "ray_fed.tensorflow.tracing",
        "data": "ray_fed.tensorflow.external_data",
        "identify_computation": "ray_fed.tensorflow.graphs.identity",
        "to_type": "ray_fed.tensorflow.tensors.specs",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
