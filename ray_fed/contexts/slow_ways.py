"""Logs a warning if a round took a slow path, with the reason and a faster way."""

import logging

from ray_fed.observability import events

_logger = logging.getLogger(__name__)

_SLOW_S = 1.0
"""Duration in seconds from which a round with a slow path is worth a warning."""

_QUICK = (
    ("`sequence_", "write it as one TensorFlow computation of the dataset"),
    ("keys that clients compute", "pass them as an argument, or compute them of less"),
    ("for all clients", "send tensors, or what `rtf.data` names at each client"),
    (" tensors ", "stack small tensors to fewer, larger ones"),
    ("a result at clients", "return an aggregate of it, where that is enough"),
    ("without a mergeable form", "write it as the text in brackets says"),
    ("not of the form", "let ray_fed compile the computation"),
)
"""Pairs of words: a part of a slow path's reason, and advice for a faster way."""


class SlowPathWarnings:
    """Logs a warning, once for each cause, if a round of over 1 s took a slow path.

    This object receives the events of rounds. A slow path is work without a kernel (a
    TensorFlow graph that does the work of many clients), or with tf.data in its graph.
    """

    def __init__(self) -> None:
        self._remarks: dict[str, None] = {}
        self._logged: set[str] = set()

    def on_event(self, event: events.Event) -> None:
        """Remember slow paths, and log them when their round is over."""
        match event:
            case events.RoundStarted():
                self._remarks.clear()
            case events.SubroundFinished(no_kernel=str(reason)):
                interpreted = f"clients ran call by call, because of {reason}"
                self._remarks[f"{interpreted}: {_quick_way(reason)}"] = None
            case events.ComputationUnlowered():
                self._remarks[
                    f"{event.computation} reads through tf.data, which is set up again"
                    f" for each client, because of {event.reason}: loop by"
                    " `dataset.reduce`, and let `ClientData` batch and shuffle"
                ] = None
            case events.WorkInterpreted():
                self._remarks[
                    f"{event.work} ran step by step, because its graph raised"
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
                    "A round of %.1f s took a slow path: %s.", seconds, remark
                )


def _quick_way(reason: str) -> str:
    advice = (quick for part, quick in _QUICK if part in reason)
    return next(advice, "docs/performance.md says what to try")
