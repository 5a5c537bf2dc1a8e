"""Ray-backed execution of federated computations: the names a user needs.

    import ray_fed
    from ray_fed import tensorflow as rtf       # the front end

    with ray_fed.init() as context:             # local Ray, or one that is running
        ...                                     # call federated computations

Importing this package loads neither TensorFlow nor a cluster. Import it before Keras or
TensorFlow: it keeps their start-up lines off the screen, and has TensorFlow take memory
of a GPU as it needs it (`TF_FORCE_GPU_ALLOW_GROWTH`, where you have not set that).
"""

import os
from typing import TYPE_CHECKING

import ray_fed.imports as imports

if TYPE_CHECKING:
    import ray_fed.errors as errors
    from ray_fed.config import Config, Retry, Subrounds, Workers
    from ray_fed.contexts.execution_context import ExecutionContext
    from ray_fed.contexts.installation import create_context, init, shutdown
    from ray_fed.observability.report import RoundReport

imports.install()
# Else the first tensor of this process takes a whole card, and workers find none left.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

__all__ = [
    "Config",
    "ExecutionContext",
    "Retry",
    "RoundReport",
    "Subrounds",
    "Workers",
    "create_context",
    "errors",
    "init",
    "shutdown",
]

_CONFIG, _INSTALLATION = "ray_fed.config", "ray_fed.contexts.installation"
# A worker, and a command that prints its help, need few of them.
__getattr__ = imports.import_lazily(
    __name__,
    {
        "ExecutionContext": "ray_fed.contexts.execution_context",
        "RoundReport": "ray_fed.observability.report",
        "errors": "ray_fed.errors",
        **dict.fromkeys(["Config", "Retry", "Subrounds", "Workers"], _CONFIG),
        **dict.fromkeys(["create_context", "init", "shutdown"], _INSTALLATION),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
