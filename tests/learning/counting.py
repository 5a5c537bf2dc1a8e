"""A process without a federation: its state remembers what it was given."""

from typing import Any, NamedTuple

from ray_fed.learning import LearningProcess

CLIENTS = [[name] for name in "abcdef"]


class Counter(NamedTuple):
    """A state that remembers what it was given."""

    round_index: int
    seen: tuple[Any, ...]


class Tally(NamedTuple):
    """A state that can be saved: its structure stays the same."""

    round_index: int
    total: float


def build_counter() -> LearningProcess:
    def advance(state: Counter, data: list[Any]) -> tuple[Counter, dict[str, int]]:
        seen = (*state.seen, tuple(data))
        return Counter(state.round_index + 1, seen), {"num_clients": len(data)}

    return LearningProcess(lambda: Counter(0, ()), advance)


def build_tally() -> LearningProcess:
    def advance(state: Tally, data: list[Any]) -> tuple[Tally, dict[str, float]]:
        total = state.total * 1.1 + sum(ord(client[0]) for client in data)
        loss = 1000.0 - total
        return Tally(state.round_index + 1, total), {"loss": loss}

    return LearningProcess(lambda: Tally(0, 0.0), advance)
