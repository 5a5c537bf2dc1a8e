"""How far a run is: a bar in a terminal or notebook, lines elsewhere."""

from ray_fed.learning.history import RoundRecord
from ray_fed.learning.process_calls import ProcessCalls
from ray_fed.observability import reprs
from ray_fed.observability.display import RoundProgress

_MOST_NUMBERS, _MOST_OF_EACH = 3, 2


class RunProgress:
    """Shows rounds as they are done, on the standard error of this process.

    Args:
        calls: whose events are shown.
        num_rounds: of the whole run.
        done: rounds before a resume.
    """

    def __init__(self, calls: ProcessCalls, num_rounds: int, done: int) -> None:
        self._progress = RoundProgress(num_rounds, done=done)
        self._evaluated: RoundRecord | None = None
        calls.subscribe(self._progress)
        self._progress.say("")

    def advance(self, record: RoundRecord) -> None:
        """Show that a round is done, with the latest evaluation."""
        if record.evaluation is not None:
            self._evaluated = record
        self._progress.advance(show_metrics(record, self._evaluated))

    def close(self) -> None:
        """Leave what is shown as it is."""
        self._progress.__exit__()


def show_metrics(record: RoundRecord, evaluated: RoundRecord | None) -> str:
    """Return metrics of training and of evaluation, told apart, in a line.

    Args:
        record: of the round.
        evaluated: the last one that was evaluated.
    """
    training = _show(record, "training.", "")
    if evaluated is None:
        return "  ".join(training[:_MOST_NUMBERS])
    evaluation = _show(evaluated, "evaluation.", "evaluation ")[:_MOST_OF_EACH]
    if evaluated.round < record.round:
        evaluation.append(f"(round {evaluated.round})")
    return "  ".join([*training[:_MOST_OF_EACH], *evaluation])


def _show(record: RoundRecord, part: str, label: str) -> list[str]:
    """Return the metrics of a part, without counts."""
    return [
        f"{label}{name.removeprefix(part)} {reprs.show_number(value)}"
        for name, value in record.numbers().items()
        if name.startswith(part) and not name.endswith("num_examples")
    ]
