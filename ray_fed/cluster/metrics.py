"""Ray metrics about rounds and workers, which Ray exports to Prometheus.

Ray puts "ray_" before each name, and "_total" after the name of a counter, as in
`ray_fed_rounds_total`. Each metric has the label `run`, the name of the run. The metric
`fed_retries` also has the label `failure`, a class of `failures`.
"""

from typing import TypeVar

from ray.util.metrics import Counter, Gauge, Histogram

from ray_fed.observability import events

_SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]
_RUN = ("run",)

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


def _of_run(metric: _Metric, run: str) -> _Metric:
    metric.set_default_tags({"run": run})
    return metric


class RoundMetrics:
    """Updates Ray's metrics from the events of rounds.

    The metrics count rounds, seconds, clients, retries and bytes. The process must be
    connected to Ray. `run` is the value of the label `run`.
    """

    def __init__(self, run: str) -> None:
        def count(name: str, description: str, *labels: str) -> Counter:
            return _of_run(Counter(name, description, (*_RUN, *labels)), run)

        self._rounds = count("fed_rounds", "Rounds that returned a result.")
        seconds = "Seconds of a round, from call to result."
        self._seconds = _of_run(
            Histogram("fed_round_seconds", seconds, _SECONDS, _RUN), run
        )
        self._clients = count("fed_clients", "Clients of all rounds that began.")
        dropped = "Clients whose work failed and that rounds left out."
        self._dropped = count("fed_dropped_clients", dropped)
        lost = "Attempts at subrounds that were lost."
        self._retries = count("fed_retries", lost, "failure")
        self._sent = count("fed_sent_bytes", "Bytes of arguments, each once.")
        self._returned = count("fed_returned_bytes", "Bytes that subrounds returned.")

    def on_event(self, event: events.Event) -> None:
        """Update the metrics that an event affects. Most events affect none."""
        match event:
            case events.RoundStarted():
                self._add(self._clients, event.num_clients)
            case events.SubroundFinished():
                self._add(self._returned, event.bytes_returned)
                for attempt in event.lost:
                    if attempt.ended != "slower":  # a slower copy did not fail
                        self._retries.inc(1, {"failure": attempt.ended})
            case events.ClientDropped():
                self._dropped.inc()
            case events.RoundFinished():
                self._rounds.inc()
                self._seconds.observe(event.seconds)
                self._add(self._sent, event.bytes_broadcast + event.bytes_sliced)
            case _:
                pass

    @staticmethod
    def _add(counter: Counter, amount: int) -> None:
        if amount:  # Ray's counters refuse to add zero
            counter.inc(amount)


def workers_ready(run: str) -> Gauge:
    """Create Ray's gauge for the number of ready workers. `run` is its label."""
    ready = "Workers of a pool that are ready."
    return _of_run(Gauge("fed_workers_ready", ready, _RUN), run)
