"""Federated learning on Keras models: an ordinary user of ray_fed's public names.

Importing this package imports TensorFlow and Keras. Call `ray_fed.init` before you
build a Keras model: TensorFlow's threads are fixed by the first thing it computes.
"""

import ray_fed.learning.callbacks as callbacks
import ray_fed.learning.partition as partition
import ray_fed.tensorflow  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ray_fed.learning import aggregators
from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.composition import (
    Guards,
    ServerState,
    ServerView,
    build_process,
    send_weights,
)
from ray_fed.learning.ditto import build_ditto
from ray_fed.learning.fed_avg import build_fed_avg
from ray_fed.learning.fed_dyn import build_fed_dyn
from ray_fed.learning.fed_eval import build_client_eval, build_fed_eval, spread
from ray_fed.learning.fed_nova import build_fed_nova
from ray_fed.learning.fed_per import build_fed_per
from ray_fed.learning.fed_prox import build_fed_prox
from ray_fed.learning.fed_sgd import build_fed_sgd
from ray_fed.learning.history import EarlyStopping, History, RoundRecord
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.mime_lite import build_mime_lite
from ray_fed.learning.models import Delta, Model, ModelWeights
from ray_fed.learning.normalization import build_normalization
from ray_fed.learning.partition import split_by_label
from ray_fed.learning.processes import LearningProcess, Part
from ray_fed.learning.q_fed_avg import build_q_fed_avg
from ray_fed.learning.run_loop import TrainingResult, run
from ray_fed.learning.scaffold import build_scaffold

__all__ = [
    "ClientStates",
    "Delta",
    "EarlyStopping",
    "Guards",
    "History",
    "LearningProcess",
    "LocalTraining",
    "Model",
    "ModelWeights",
    "Part",
    "RoundRecord",
    "ServerState",
    "ServerView",
    "TrainingResult",
    "aggregators",
    "build_client_eval",
    "build_ditto",
    "build_fed_avg",
    "build_fed_dyn",
    "build_fed_eval",
    "build_fed_nova",
    "build_fed_per",
    "build_fed_prox",
    "build_fed_sgd",
    "build_mime_lite",
    "build_normalization",
    "build_process",
    "build_q_fed_avg",
    "build_scaffold",
    "callbacks",
    "partition",
    "run",
    "send_weights",
    "split_by_label",
    "spread",
]
