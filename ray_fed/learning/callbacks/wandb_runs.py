"""Metrics for Weights and Biases."""

import os
from typing import Any, Literal

from typing_extensions import override

from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.extras import import_extra
from ray_fed.learning.history import History, RoundRecord


class WandB(Callback):
    """Logs each number of a round to one run of Weights and Biases.

    Args:
        project: of the run there.
        run_id: of the run; one that is resumed goes on under the same id.
        mode: "online", or "offline" to sync later; None: as wandb is configured.
        folder: for wandb's files; None: the working directory.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        run_id: str,
        mode: Literal["online", "offline"] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._wandb = import_extra("wandb", "wandb", "callbacks.WandB")
        self._options: dict[str, Any] = {
            "project": project,
            "id": run_id,
            "mode": mode,
            "dir": None if folder is None else os.fspath(folder),
        }
        self._run: Any = None

    @override
    def __repr__(self) -> str:
        return f"WandB({self._options['project']!r}, run_id={self._options['id']!r})"

    @override
    def on_start(self, history: History) -> None:
        self._run = self._wandb.init(resume="allow", **self._options)
        # A step that was logged before a kill is told again: by its own axis it counts.
        self._run.define_metric("*", step_metric="round")

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._run.log({"round": record.round, **record.numbers()})

    @override
    def on_end(self, history: History, reason: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if reason == "failed" else 0)
