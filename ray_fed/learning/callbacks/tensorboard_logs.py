"""Metrics for TensorBoard."""

import os
import time
from typing import Any

from typing_extensions import override

from ray_fed.files.opening import expand_home
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.extras import import_extra
from ray_fed.learning.history import History, RoundRecord
from ray_fed.observability import reprs


class TensorBoard(Callback):
    """Writes each number of a round as a scalar to a folder of TensorBoard's.

    A resumed run has TensorBoard drop what was logged after the round it goes on from.

    Args:
        log_dir: the folder.

    Raises:
        UserError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        extra = "tensorboard", "callbacks.TensorBoard"
        self._writers: Any = import_extra(
            "tensorboard.summary.writer.event_file_writer", *extra
        )
        self._events: Any = import_extra("tensorboard.compat.proto.event_pb2", *extra)
        self._summaries: Any = import_extra(
            "tensorboard.compat.proto.summary_pb2", *extra
        )
        self._log_dir = expand_home(log_dir)
        self._writer: Any = None

    @override
    def __repr__(self) -> str:
        return f"TensorBoard({reprs.shorten(self._log_dir)!r})"

    @override
    def on_start(self, history: History) -> None:
        self._writer = self._writers.EventFileWriter(self._log_dir)
        if history:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            step = history[-1].round + 1
            self._add(session_log=start, step=step)

    @override
    def on_round(self, record: RoundRecord) -> None:
        numbers = {"seconds": record.seconds, "retries": record.retries}
        values = [
            self._summaries.Summary.Value(
                tag=name.replace(".", "/", 1), simple_value=value
            )
            for name, value in {**record.numbers(), **numbers}.items()
        ]
        summary = self._summaries.Summary(value=values)
        self._add(summary=summary, step=record.round)
        self._writer.flush()

    def _add(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._writer.add_event(event)

    @override
    def on_end(self, history: History, reason: str) -> None:
        if self._writer is not None:
            self._writer.close()
