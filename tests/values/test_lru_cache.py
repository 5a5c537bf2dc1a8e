"""What is kept, what is dropped, and when."""

import threading

import pytest

from ray_fed.values.lru_cache import LruCache


@pytest.fixture
def dropped() -> list[str]:
    return []


@pytest.fixture
def cache(dropped: list[str]) -> LruCache[int, str]:
    """Return two values, of 1 and 2, in room for two."""
    found = LruCache[int, str](2, dropped.append)
    found.put(1, "one")
    found.put(2, "two")
    return found


def test_least_recently_used_is_dropped(
    cache: LruCache[int, str], dropped: list[str]
) -> None:
    cache.find(1)
    cache.put(3, "three")

    assert dropped == ["two"]
    assert cache.items() == [(1, "one"), (3, "three")]


def test_makes_what_is_not_there_once(cache: LruCache[int, str]) -> None:
    made = iter(["three"])

    assert [cache.get(3, lambda: next(made)) for _ in range(2)] == ["three"] * 2
    assert cache.find(1) is None


def test_value_in_place_of_another_drops_that_alone(
    cache: LruCache[int, str], dropped: list[str]
) -> None:
    cache.put(1, "uno")
    cache.put(1, "uno")

    assert cache.items() == [(2, "two"), (1, "uno")]
    assert dropped == ["one"]


def test_of_two_that_were_made_at_once_the_first_counts(
    cache: LruCache[int, str], dropped: list[str]
) -> None:
    def make() -> str:
        assert cache.get(3, lambda: "three") == "three"  # meanwhile
        return "another"

    assert cache.get(3, make) == "three"
    assert dropped == ["one", "another"]


def test_clear_drops_all(cache: LruCache[int, str], dropped: list[str]) -> None:
    cache.clear()

    assert sorted(dropped) == ["one", "two"]
    assert cache.find(1) is None


def test_what_cannot_be_made_is_not_there(cache: LruCache[int, str]) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get(3, lambda: str(1 // 0))

    assert cache.items() == [(1, "one"), (2, "two")]


def test_threads_may_share_one() -> None:
    cache = LruCache[int, int](3)
    wrong: list[int] = []

    def use(start: int) -> None:
        for index in range(start, start + 20_000):
            key = index % 7
            if cache.get(key, lambda key=key: key) != key:
                wrong.append(key)

    threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert len(cache.items()) == 3


def test_heavy_values_leave_but_for_the_latest_few() -> None:
    dropped: list[str] = []
    cache: LruCache[str, str] = LruCache(9, dropped.append, max_weight=10, least=2)
    for name, weight in {"a": 4, "b": 4, "c": 4, "d": 30, "e": 30}.items():
        cache.get(name, lambda name=name: name, weight)

    assert dropped == ["a", "b", "c"]
    cache.drop("d", lambda value: value == "other")
    cache.drop("d", lambda value: value == "d")
    assert cache.items() == [("e", "e")]
    assert dropped == ["a", "b", "c", "d"]
