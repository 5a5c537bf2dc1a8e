"""Ray-backed execution of federated computations: the names that users need.

    import ray_fed
    from ray_fed import tensorflow as rtf       # the front end

    with ray_fed.init() as context:             # joins your Ray, or starts one
        ...                                     # call federated computations

Importing this package loads neither TensorFlow nor a cluster. Import it before Keras or
TensorFlow: it keeps their start-up lines off the screen. It also lets TensorFlow take
the memory of a GPU as it needs it, unless you have set `TF_FORCE_GPU_ALLOW_GROWTH`.
"""

import os
from typing import TYPE_CHECKING

import ray_fed.imports as imports

if TYPE_CHECKING:
    import ray_fed.errors as errors
    from ray_fed.config import (
        Config,
        Data,
        Kernels,
        Retry,
        Stragglers,
        Subrounds,
        Workers,
    )
    from ray_fed.contexts.execution_context import ExecutionContext
    from ray_fed.contexts.installation import create_context, init, shutdown
    from ray_fed.observability.report import RoundReport

__version__ = "0.1.0"

imports.install()
# Otherwise the first tensor of this process takes all memory of a GPU.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

__all__ = [
    "Config",
    "Data",
    "ExecutionContext",
    "Kernels",
    "Retry",
    "RoundReport",
    "Stragglers",
    "Subrounds",
    "Workers",
    "__version__",
    "create_context",
    "errors",
    "init",
    "shutdown",
]

_CONFIG, _INSTALLATION = "ray_fed.config", "ray_fed.contexts.installation"
# A worker, and a command that prints its help, need few of these modules.
__getattr__ = imports.import_lazily(
    __name__,
    {
        "ExecutionContext": "ray_fed.contexts.execution_context",
        "RoundReport": "ray_fed.observability.report",
        "errors": "ray_fed.errors",
        **dict.fromkeys(
            [
                "Config",
                "Data",
                "Kernels",
                "Retry",
                "Stragglers",
                "Subrounds",
                "Workers",
            ],
            _CONFIG,
        ),
        **dict.fromkeys(["create_context", "init", "shutdown"], _INSTALLATION),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
