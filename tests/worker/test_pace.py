"""How many clients a call of a graph covers, and that each stack learns it anew."""

import ray_fed.worker.stacks as stacks
from ray_fed.worker.stacks import Pace


class TestPace:
    def test_first_call_is_of_one_client(self) -> None:
        assert Pace().count(32, 5.0) == 1

    def test_later_calls_fill_their_seconds(self) -> None:
        pace = Pace()
        pace.note(1, 0.5)

        assert [pace.count(32, 5.0), pace.count(3, 5.0)] == [10, 3]

    def test_slow_clients_run_one_by_one(self) -> None:
        pace = Pace()
        pace.note(4, 80.0)

        assert pace.count(32, 5.0) == 1

    def test_no_time_at_all_covers_what_is_left(self) -> None:
        pace = Pace()
        pace.note(1, 0.0)

        assert pace.count(32, 5.0) == 32


class TestStack:
    def test_each_has_a_pace_of_its_own(self) -> None:
        first, second = stacks.device_stack(), stacks.device_stack()

        assert first.pace_of(b"fold") is first.pace_of(b"fold")
        assert first.pace_of(b"fold") is not second.pace_of(b"fold")
        first.close()
        second.close()
