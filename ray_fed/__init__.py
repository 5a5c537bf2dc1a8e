"""Ray-backed execution of federated computations: the names a user needs.

    import ray_fed
    from ray_fed import tensorflow as rtf       # the front end; imports TensorFlow

    with ray_fed.init() as context:             # local Ray, or one that is running
        ...                                     # call federated computations

Importing this package loads neither TensorFlow nor a cluster. Import it before Keras or
TensorFlow: it keeps their start-up lines off the screen, and has TensorFlow take memory
of a GPU as it needs it (`TF_FORCE_GPU_ALLOW_GROWTH`, where you have not set that).
"""

import os

import ray_fed.errors as errors
import ray_fed.quiet_imports as quiet_imports
from ray_fed.config import Config, Retry, Subrounds, Workers
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.installation import create_context, init, shutdown
from ray_fed.observability.report import RoundReport

quiet_imports.install()
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
