"""Numbers for whoever scrapes Ray's own metrics, such as Prometheus.

Ray puts "ray_" before each name, and "_total" behind that of a counter:
`ray_fed_rounds_total`. The one label of our own is the class of a failure, of which
there are few.
"""

from ray.util.metrics import Counter, Gauge, Histogram

from ray_fed.observability import events

_SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


class RoundMetrics:
    """An event sink that counts rounds, with what they cost; needs a Ray."""

    def __init__(self) -> None:
        self._rounds = Counter("fed_rounds", "Rounds that returned a result.")
        self._seconds = Histogram(
            "fed_round_seconds", "Seconds of a round, from call to result.", _SECONDS
        )
        self._clients = Counter("fed_clients", "Clients of all rounds that began.")
        self._dropped = Counter(
            "fed_dropped_clients", "Clients that rounds went on without."
        )
        self._retries = Counter(
            "fed_retries", "Attempts at subrounds that were lost.", ("failure",)
        )
        self._sent = Counter("fed_sent_bytes", "Bytes of arguments, each once.")
        self._returned = Counter("fed_returned_bytes", "Bytes that subrounds returned.")

    def on_event(self, event: events.Event) -> None:
        """Count what an event tells."""
        match event:
            case events.RoundStarted():
                self._add(self._clients, event.num_clients)
            case events.SubroundFinished():
                self._add(self._returned, event.bytes_returned)
                for attempt in event.lost:
                    if attempt.ended != "slower":  # a copy that another one overtook
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
        if amount:  # Ray's counters refuse to add nothing
            counter.inc(amount)


def workers_ready() -> Gauge:
    """Return the gauge of the workers of a pool that are ready."""
    return Gauge("fed_workers_ready", "Workers of a pool that are ready.")
