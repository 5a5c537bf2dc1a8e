"""Federated learning on Keras models.

This package uses only the public names of the rest of ray_fed, as a user's program
does. Importing it imports TensorFlow and Keras. Call `ray_fed.init` before you build a
Keras model, because TensorFlow fixes its number of threads at its first computation.
"""

# ruff: noqa: E402 (the backend of Keras is checked before modules import Keras)

import ray_fed.learning.checks as checks

checks.check_keras_backend()

import ray_fed.learning.callbacks as callbacks
import ray_fed.learning.devices as devices
import ray_fed.learning.partition as partition
import ray_fed.tensorflow  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ray_fed.learning import aggregators
from ray_fed.learning.callbacks import EarlyStopping
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
from ray_fed.learning.fed_eval import (
    build_client_eval,
    build_fed_eval,
    evaluate_personal,
    spread,
)
from ray_fed.learning.fed_nova import build_fed_nova
from ray_fed.learning.fed_per import build_fed_per
from ray_fed.learning.fed_prox import build_fed_prox
from ray_fed.learning.fed_sgd import build_fed_sgd
from ray_fed.learning.history import History, RoundRecord
from ray_fed.learning.local_training import LocalTraining, Trained
from ray_fed.learning.mime_lite import build_mime_lite
from ray_fed.learning.models import (
    Delta,
    ForwardPass,
    FullGradient,
    Model,
    ModelWeights,
)
from ray_fed.learning.normalization import build_normalization
from ray_fed.learning.objectives import Totals
from ray_fed.learning.partition import split_by_label
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.q_fed_avg import build_q_fed_avg
from ray_fed.learning.run_loop import TrainingResult, run, verify_clock
from ray_fed.learning.scaffold import build_scaffold
from ray_fed.learning.schedules import Buffered, Synchronous
from ray_fed.learning.sweeps import SweepResult, Trial, sweep

__all__ = [
    "Buffered",
    "ClientStates",
    "Delta",
    "EarlyStopping",
    "ForwardPass",
    "FullGradient",
    "Guards",
    "History",
    "LearningProcess",
    "LocalTraining",
    "Model",
    "ModelWeights",
    "RoundRecord",
    "ServerState",
    "ServerView",
    "SweepResult",
    "Synchronous",
    "Totals",
    "Trained",
    "TrainingResult",
    "Trial",
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
    "devices",
    "evaluate_personal",
    "partition",
    "run",
    "send_weights",
    "split_by_label",
    "spread",
    "sweep",
    "verify_clock",
]
