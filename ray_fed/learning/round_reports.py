"""The report of each round of a run, by the number of its call."""

from ray_fed.observability import events
from ray_fed.observability.report import ReportBuilder, RoundReport


class RoundReports:
    """An event sink that keeps reports of some calls until they are taken."""

    def __init__(self) -> None:
        self._builder = ReportBuilder()
        self._found: dict[int, RoundReport | None] = {}

    def expect(self, number: int) -> None:
        """Keep the report of the call of a number."""
        self._found[number] = None

    def take(self, number: int) -> RoundReport | None:
        """Return that report, and keep it no longer."""
        return self._found.pop(number, None)

    def on_event(self, event: events.Event) -> None:
        """Add an event to the report of its round."""
        self._builder.on_event(event)
        if isinstance(event, events.RoundFinished):
            last = self._builder.last
            if event.round_index in self._found and last is not None:
                self._found[event.round_index] = last
