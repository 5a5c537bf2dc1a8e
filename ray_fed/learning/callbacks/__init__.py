"""What a run tells others: tables, trackers, models. One class each.

A callback is any object with `on_round(record)`; `Callback` has the other hooks. The
libraries of trackers are extras, imported where a callback is made.
"""

from ray_fed.learning.callbacks.files import CSV, JSONLines, ModelCheckpoint
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.callbacks.trackers import MLflow, TensorBoard, WandB

__all__ = [
    "CSV",
    "Callback",
    "JSONLines",
    "MLflow",
    "ModelCheckpoint",
    "TensorBoard",
    "WandB",
]
