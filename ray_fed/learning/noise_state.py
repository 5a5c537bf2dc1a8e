"""What a server's state says of the noise that its rounds had."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class NoiseState(NamedTuple):
    """What the server keeps of noise between rounds.

    Attributes:
        round_index: i32[], rounds so far.
        bound: f32[], on the norm of a client's update.
        spends: f64[2], what each round so far spent; see `Privacy.a_round`.
    """

    round_index: Any
    bound: Any
    spends: Any


def check_noise(privacy: Any, state: Any) -> None:
    """Refuse a state whose rounds had other noise than those that are to follow.

    Args:
        privacy: of the process that goes on; None: it has no noise.
        state: of the server, plain values.

    Raises:
        ConfigError: epsilon would count the state's rounds wrongly.
    """
    if privacy is not None:
        for found in _noise_in(state):
            privacy.check_continues(found.spends, int(found.round_index))


def _noise_in(state: Any) -> Iterator[NoiseState]:
    # What a round returns is by name, and of no class.
    named: Any = state if isinstance(state, Mapping) else {}
    if isinstance(state, NoiseState):
        yield state
    elif tuple(named) == NoiseState._fields:
        yield NoiseState(**named)
    elif isinstance(state, tuple | Mapping):
        parts: Any = named.values() if named else state
        for part in parts:
            yield from _noise_in(part)
