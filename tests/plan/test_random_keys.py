"""Random numbers hang on where work runs, and on nothing else."""

import asyncio
import contextlib
import contextvars
import pickle
from concurrent import futures

import numpy as np
import pytest

from ray_fed.plan import random_keys

KEY = random_keys.DrawKey(seed=1, invocation=2, first_client=4, client=5, path=("v0",))


def test_same_key_draws_the_same_after_a_trip_to_another_machine() -> None:
    again: random_keys.DrawKey = pickle.loads(pickle.dumps(KEY))

    np.testing.assert_array_equal(again.state(b"op"), KEY.state(b"op"))
    assert again.state(b"op").shape == (random_keys.STATE_SIZE,)
    assert again.state(b"op").dtype == np.int64


@pytest.mark.parametrize(
    ("key", "content"),
    [
        pytest.param(random_keys.DrawKey(0, 2, 4, 5, ("v0",)), b"op", id="seed"),
        pytest.param(random_keys.DrawKey(1, 3, 4, 5, ("v0",)), b"op", id="invocation"),
        pytest.param(random_keys.DrawKey(1, 2, 4, 6, ("v0",)), b"op", id="client"),
        pytest.param(
            random_keys.DrawKey(1, 2, 4, None, ("v0",)), b"op", id="no client"
        ),
        pytest.param(random_keys.DrawKey(1, 2, 4, 5, ("v1",)), b"op", id="local"),
        pytest.param(random_keys.DrawKey(1, 2, 4, 5, ()), b"op", id="no local"),
        pytest.param(KEY, b"another op", id="op"),
        pytest.param(
            random_keys.DrawKey(1, 2, 4, 5, ("v0",), steps=(("merge", 0, 2),)),
            b"op",
            id="step",
        ),
    ],
)
def test_other_work_draws_other_numbers(
    key: random_keys.DrawKey, content: bytes
) -> None:
    assert key.state(content).tolist() != KEY.state(b"op").tolist()


def test_steps_differ_by_function_indices_and_order() -> None:
    steps = [
        [("accumulate",)],
        [("merge", 0, 2)],
        [("merge", 0, 4)],
        [("merge", 2, 4)],
        [("select", 0)],
        [("sequence_map", 0), ("sequence_map", 1)],
        [("sequence_map", 1), ("sequence_map", 0)],
        [("sequence_map", 0), ("sequence_reduce", 1)],
    ]
    states: list[bytes] = []
    for taken in steps:
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_keys.using(KEY))
            for name, *indices in taken:
                stack.enter_context(random_keys.at_step(name, *indices))
            states.append(random_keys.state(b"op").tobytes())

    assert len(set(states)) == len(steps)


def test_client_draws_the_same_in_whatever_leaf_it_is() -> None:
    key = random_keys.DrawKey(seed=1, invocation=2)
    states: list[list[int]] = []
    for first_client, position in ((0, 7), (4, 3), (7, 0)):
        with (
            random_keys.using(key),
            random_keys.at_leaf(first_client),
            random_keys.at_client(position),
        ):
            states.append(random_keys.state(b"op").tolist())

    assert states[0] == states[1] == states[2]


def test_key_ends_with_its_block_also_after_an_error() -> None:
    with random_keys.using(KEY), random_keys.at_local("v1"):
        inside = random_keys.current()

    assert inside == random_keys.DrawKey(1, 2, 4, 5, ("v0", "v1"))
    assert random_keys.current() is None
    with pytest.raises(ValueError, match="inside"), random_keys.using(KEY):
        raise ValueError("inside")
    assert random_keys.current() is None


def test_without_a_key_every_draw_is_another() -> None:
    with (
        random_keys.at_leaf(1),
        random_keys.at_client(0),
        random_keys.at_step("merge", 0, 2),
    ):
        states = [random_keys.state(b"op").tolist() for _ in range(2)]

    assert states[0] != states[1]


def test_tasks_of_a_loop_keep_their_keys_apart() -> None:
    async def draw(client: int) -> list[int]:
        with random_keys.at_client(client):
            await asyncio.sleep(0)
            return random_keys.state(b"op").tolist()

    async def draw_all() -> list[list[int]]:
        return await asyncio.gather(*(draw(client) for client in range(3)))

    with random_keys.using(random_keys.DrawKey(1, 2)):
        states = asyncio.run(draw_all())

    assert states == [
        random_keys.DrawKey(1, 2, 0, n).state(b"op").tolist() for n in range(3)
    ]


def test_key_follows_a_context_to_another_thread() -> None:
    with random_keys.using(KEY):
        context = contextvars.copy_context()
    with futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(context.run, random_keys.current).result()

    assert found == KEY
