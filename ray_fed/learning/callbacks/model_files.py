"""The best model of a run as a Keras file."""

import os
import pathlib
from typing import Any, Literal

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files.opening import expand_home
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.callbacks.whole_files import check_place, replacing
from ray_fed.learning.history import History, RoundRecord
from ray_fed.learning.models import Model
from ray_fed.learning.stopping import is_rising
from ray_fed.observability import reprs


class ModelCheckpoint(Callback):
    """Saves the model of the best round so far, as a `.keras` file.

    Args:
        path: of the file; replaced by each better model, never half-written.
        model: that is trained.
        metric: as `History.values` takes it; the best round has the best value.
        mode: as for `EarlyStopping`.

    Raises:
        ConfigError: the path has another suffix, or the mode is none.
        ValueMismatchError: as a run begins: as `Model.to_keras` says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Model,
        metric: str = "loss",
        mode: Literal["auto", "min", "max"] = "auto",
    ) -> None:
        self._path = pathlib.Path(expand_home(path))
        if self._path.suffix != ".keras":
            raise errors.ConfigError(
                f"Expected a name that ends with .keras, found `{self._path}`."
            )
        self._model = model
        self.metric = metric
        self._is_rising = is_rising(metric, mode)
        self._history = History()

    @override
    def __repr__(self) -> str:
        path = reprs.shorten(str(self._path))
        return f"ModelCheckpoint({path!r}, metric={self.metric!r})"

    @override
    def on_start(self, history: History) -> None:
        check_place(self._path)
        # A layer that cannot be made again is told before the run, not after a round.
        self._model.to_keras(self._model.initial_weights())
        self._history = history

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._history = self._history.with_round(record)

    @override
    def needs_state(self, record: RoundRecord) -> bool:
        *before, now = self._history.values(self.metric)
        if now is None or now != now:  # noqa: PLR0124 (a loss over no examples is NaN)
            return False
        known = [value for value in before if value is not None]
        if self._is_rising:
            return all(now > value or value != value for value in known)  # noqa: PLR0124
        return all(now < value or value != value for value in known)  # noqa: PLR0124

    @override
    def on_state(self, record: RoundRecord, state: Any) -> None:
        with replacing(self._path) as temporary:
            self._model.to_keras(state).save(temporary)
