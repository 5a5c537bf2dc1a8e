"""Warns that work takes a slow path, with the reason and a faster alternative."""

import logging

from ray_fed.observability import events

_logger = logging.getLogger(__name__)

_SLOW_S = 1.0
"""Seconds of a round from which a slow path is worth a warning."""

_QUICK = (
    ("`sequence_", "write it as one TensorFlow computation of the dataset"),
    ("keys that clients compute", "pass them as an argument, or compute them of less"),
    ("for all clients", "send tensors, or what `rtf.data` names at each client"),
    (" tensors ", "stack small tensors to fewer, larger ones"),
    ("a result at clients", "return an aggregate of it, where that is enough"),
    ("without a mergeable form", "write it as the text in brackets says"),
    ("not of the form", "let ray_fed compile the computation"),
)
"""Pairs of a part of a reason, and the faster alternative."""


class SlowPathWarnings:
    """An event sink that warns once if a round of a second took a slow path."""

    def __init__(self) -> None:
        self._remarks: dict[str, None] = {}
        self._logged: set[str] = set()

    def on_event(self, event: events.Event) -> None:
        """Remember a slow path, and log it when its round is over."""
        match event:
            case events.RoundStarted():
                self._remarks.clear()
            case events.SubroundFinished(no_kernel=str(reason)):
                interpreted = f"clients are interpreted, call by call, as of {reason}"
                self._remarks[f"{interpreted}: {_quick_way(reason)}"] = None
            case events.ComputationUnlowered():
                self._remarks[
                    f"{event.computation} reads through tf.data, which is set up anew"
                    f" for each client, as of {event.reason}: loop by"
                    " `dataset.reduce`, and let `ClientData` batch and shuffle"
                ] = None
            case events.WorkInterpreted():
                self._remarks[
                    f"{event.work} is done step by step, as its graph raised"
                    f" {event.reason}"
                ] = None
            case events.RoundFinished() if event.seconds >= _SLOW_S:
                self._tell(event.seconds)
            case _:
                pass

    def _tell(self, seconds: float) -> None:
        for remark in self._remarks:
            if remark not in self._logged:
                self._logged.add(remark)
                _logger.warning(
                    "A slow way, in a round of %.1f s: %s.", seconds, remark
                )


def _quick_way(reason: str) -> str:
    advice = (quick for part, quick in _QUICK if part in reason)
    return next(advice, "docs/performance.md says what to try")
