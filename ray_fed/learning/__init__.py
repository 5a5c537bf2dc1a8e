"""Federated learning on Keras models: an ordinary user of ray_fed's public names.

Importing this package imports TensorFlow and Keras. Call `ray_fed.init` before you
build a Keras model: TensorFlow's threads are fixed by the first thing it computes.
"""

import ray_fed.learning.callbacks as callbacks
import ray_fed.learning.partition as partition
import ray_fed.tensorflow  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ray_fed.learning.cohorts import CohortSampler, split_by_label
from ray_fed.learning.fed_avg import ServerState, build_fed_avg
from ray_fed.learning.fed_eval import build_fed_eval
from ray_fed.learning.history import History, RoundRecord
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.run import TrainingResult, run
from ray_fed.learning.stopping import EarlyStopping

__all__ = [
    "CohortSampler",
    "EarlyStopping",
    "History",
    "LearningProcess",
    "Model",
    "ModelWeights",
    "RoundRecord",
    "ServerState",
    "TrainingResult",
    "build_fed_avg",
    "build_fed_eval",
    "callbacks",
    "partition",
    "run",
    "split_by_label",
]
