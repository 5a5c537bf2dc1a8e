"""What a run tells callbacks: any object with `on_round` is one."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import federated_language as fl
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
from ray_fed.learning.history import History, RoundRecord

_logger = logging.getLogger("ray_fed.learning.run_loop")


@runtime_checkable
class RoundCallback(Protocol):
    """The one method that a callback must have."""

    def on_round(self, record: RoundRecord) -> None:
        """Take what a round did, once it is evaluated."""
        ...


class Callback:
    """A callback that does nothing: override what you need; all are optional.

    Methods are called on a thread of the run, one after another, while the next round
    runs. After a kill, rounds since the last saved one are told again.
    """

    @override
    def __repr__(self) -> str:
        return f"<callback {type(self).__name__}>"

    def on_start(self, history: History) -> None:
        """Take the rounds before a resume; empty where a run begins."""

    def on_round(self, record: RoundRecord) -> None:
        """Take what a round did, once it is evaluated."""

    def needs_state(self, record: RoundRecord) -> bool:  # noqa: ARG002
        """Return whether `on_state` is to be called after this round."""
        return False

    def on_state(self, record: RoundRecord, state: Any) -> None:
        """Take the state after a round, as plain values."""

    def on_end(self, history: History, reason: str) -> None:
        """Take the end of the run, also where it failed."""


class ReleaseCallback(Callback):
    """Releases metrics with a release manager of federated_language.

    The manager is given `{"training": ..., "evaluation": ...}` with the number
    of the round, from 1, as the key.

    Args:
        manager: releases them.
    """

    def __init__(self, manager: fl.program.ReleaseManager[Any, int]) -> None:
        self._manager = manager
        self.name = type(manager).__name__

    @override
    def on_round(self, record: RoundRecord) -> None:
        value = {"training": record.training, "evaluation": record.evaluation}
        asyncio.run(self._manager.release(value, record.round))


class Callbacks:
    """All callbacks of a run.

    Args:
        callbacks: objects with `on_round`, and release managers.
        logs: whether what one raises is logged, and the run goes on.

    Raises:
        ConfigError: something is neither.
    """

    def __init__(self, callbacks: Sequence[Any], *, logs: bool) -> None:
        self._callbacks = [_as_callback(each) for each in callbacks]
        self._logs = logs

    def start(self, history: History) -> None:
        """Tell all that the run begins.

        Raises:
            CallbackError: one of them raised.
        """
        for each in self._callbacks:
            self._call(each, "on_start", "as the run began", history)

    def round(self, record: RoundRecord) -> None:
        """Tell all that a round is done.

        Raises:
            CallbackError: one of them raised; those after it were not told.
        """
        when = f"after round {record.round}"
        for each in self._callbacks:
            self._call(each, "on_round", when, record)

    def wanting_state(self, record: RoundRecord) -> list[Any]:
        """Return those that want the state after a round."""
        when = f"after round {record.round}"
        return [
            each
            for each in self._callbacks
            if self._call(each, "needs_state", when, record)
        ]

    def state(self, wanting: Sequence[Any], record: RoundRecord, state: Any) -> None:
        """Give some the state after a round."""
        when = f"after round {record.round}"
        for each in wanting:
            self._call(each, "on_state", when, record, state)

    def end(self, history: History, reason: str) -> None:
        """Tell all that the run ends, each also where another one raised.

        Raises:
            CallbackError: one of them raised.
        """
        first: errors.CallbackError | None = None
        for each in self._callbacks:
            try:
                self._call(each, "on_end", "as the run ended", history, reason)
            except errors.CallbackError as error:
                first = first or error
        if first is not None:
            raise first

    def _call(self, callback: Any, method: str, when: str, *args: Any) -> Any:
        hook = getattr(callback, method, None)
        if hook is None:
            return None
        try:
            return hook(*args)
        except Exception as error:
            name = getattr(callback, "name", None) or type(callback).__name__
            if self._logs:
                _logger.exception("The callback %s raised %s.", name, when)
                return None
            raise errors.CallbackError(
                f"Expected the callback `{name}` to return from `{method}` {when},"
                f" found {error_texts.summarize(error).rstrip('.')}. What has a"
                ' `storage_path` is saved; on_error="log" goes on without it.'
            ) from error


def _as_callback(found: Any) -> Any:
    if isinstance(found, fl.program.ReleaseManager):
        return ReleaseCallback(found)
    if isinstance(found, type) or not isinstance(found, RoundCallback):
        raise errors.ConfigError(
            "Expected objects with a method `on_round(record)`, or release managers, as"
            f" `callbacks`, found {errors.describe(found)}."
        )
    return found
