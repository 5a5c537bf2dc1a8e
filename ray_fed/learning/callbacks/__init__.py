"""What a run tells others: tables, trackers, models. One class each.

A callback is any object with `on_round(record)`; `Callback` has the other hooks. The
libraries of trackers are extras, imported where a callback is made.
"""

from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.callbacks.line_files import CSV, JSONLines
from ray_fed.learning.callbacks.mlflow_runs import MLflow
from ray_fed.learning.callbacks.model_files import ModelCheckpoint
from ray_fed.learning.callbacks.tensorboard_logs import TensorBoard
from ray_fed.learning.callbacks.wandb_runs import WandB

__all__ = [
    "CSV",
    "Callback",
    "JSONLines",
    "MLflow",
    "ModelCheckpoint",
    "TensorBoard",
    "WandB",
]
