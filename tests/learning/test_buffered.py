"""Asynchronous steps: a clock decides, the bits do not depend on who computes."""

import asyncio
import dataclasses
import heapq
import pathlib
from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.learning import (
    Buffered,
    Guards,
    History,
    LearningProcess,
    Model,
    build_fed_avg,
    build_mime_lite,
    build_process,
    run,
    verify_clock,
)
from ray_fed.learning.aggregators import clipped, median
from ray_fed.learning.devices import Devices, LogNormal
from ray_fed.learning.schedules import BufferedClock, open_clock
from ray_fed.program import (
    FileProgramStateManager,
    PowerOfChoiceSampler,
    UniformSampler,
    WeightedSampler,
)
from tests.faults import buffered_script
from tests.faults.buffered_script import NUM_STEPS, digest

NUM_CLIENTS = 12
DEVICES = Devices(LogNormal(1.0, 1.0, seed=2), drop_out=0.2, seed=5)
SCHEDULE = Buffered(concurrency=8, buffer=3)


@pytest.fixture
def clients(make_batches: Callable[..., list[Any]]) -> list[Any]:
    sizes = [[2, 3], [4], [1, 1], [5], [3, 2], [2]] * 2
    return [make_batches(size, seed) for seed, size in enumerate(sizes)]


def train(
    process: LearningProcess, clients: list[Any], num_steps: int, **more: Any
) -> Any:
    arguments: Any = {"devices": DEVICES, "schedule": SCHEDULE, "seed": 7, **more}
    return run(process, clients, num_rounds=num_steps, **arguments)


class Replay:
    """FedBuff on a linear model, by an event queue of its own and numpy alone."""

    def __init__(self, data: list[Any], rate: float, weights: list[Any]) -> None:
        self.data, self.rate = data, rate
        self.versions = [[np.asarray(w, np.float64) for w in weights]]
        self.sizes = [sum(len(batch["y"]) for batch in client) for client in data]
        self.events: list[Any] = []  # (end, number, client, version, is lost)
        self.busy: set[int] = set()
        self.time, self.number, self.cohorts = 0.0, 0, 0
        self.queue: list[int] = []
        self.left_out: set[int] = set()
        self.records: list[Any] = []

    def begin(self) -> None:
        """Let one more client begin."""
        while True:
            if not self.queue:
                drawn = np.random.default_rng([7, self.cohorts]).choice(
                    NUM_CLIENTS, 8, replace=False
                )
                order = np.random.default_rng([7, self.cohorts, 1]).permutation(8)
                self.queue = np.sort(drawn)[order].tolist()
                self.cohorts += 1
            client = self.queue.pop(0)
            if client not in self.busy:
                break
        pace = np.exp(np.random.default_rng(2).standard_normal(NUM_CLIENTS))[client]
        draws = np.random.default_rng([5, self.number, client, 1])
        chance, share = draws.random(2)
        end = self.time + pace * self.sizes[client] * (share if chance < 0.2 else 1)
        event = end, self.number, client, len(self.versions) - 1, chance < 0.2
        heapq.heappush(self.events, event)
        self.busy.add(client)
        self.number += 1

    def work(self, client: int, version: int) -> list[Any]:
        """Return the change of weights of one epoch of SGD."""
        kernel, bias = self.versions[version]
        for batch in self.data[client]:
            x, y = batch["x"].astype(np.float64), batch["y"]
            error = 2 * (x @ kernel + bias - y) / len(y)
            kernel, bias = (
                kernel - self.rate * x.T @ error,
                bias - self.rate * error.sum(0),
            )
        before = self.versions[version]
        return [kernel - before[0], bias - before[1]]

    def step(self) -> None:
        """Take three updates, by the weights of their staleness."""
        taken: list[Any] = []
        while len(taken) < SCHEDULE.buffer:
            while len(self.events) < SCHEDULE.concurrency:
                self.begin()
            self.time, _, client, version, is_lost = heapq.heappop(self.events)
            self.busy.remove(client)
            if not is_lost:
                taken.append((client, version))
        now = len(self.versions) - 1
        whole = [each for each in taken if each[0] not in self.left_out]
        moved, total = [0.0, 0.0], sum(self.sizes[client] for client, _ in whole)
        for client, version in whole if total else []:
            scale = self.sizes[client] / np.sqrt(1 + now - version) / total
            change = self.work(client, version)
            moved = [m + scale * d for m, d in zip(moved, change, strict=True)]
        newest = self.versions[-1]
        self.versions.append([w + m for w, m in zip(newest, moved, strict=True)])
        self.records.append((*zip(*taken, strict=True), self.time))


def test_steps_are_those_of_a_loop_in_numpy(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    result = train(averaging, clients, NUM_STEPS)
    replay = Replay(clients, 0.05, averaging.initialize().weights.trainable)
    for _ in range(NUM_STEPS):
        replay.step()
    found = [(r.clients, r.versions, r.simulated_time) for r in result.history]
    assert [each[:2] for each in found] == [each[:2] for each in replay.records]
    times = [[each[2] for each in records] for records in (found, replay.records)]
    np.testing.assert_allclose(*times, rtol=1e-12)
    for weights, wanted in zip(
        result.state.weights.trainable, replay.versions[-1], strict=True
    ):
        np.testing.assert_allclose(weights, wanted, rtol=1e-5, atol=1e-5)
    assert max(max(record.staleness) for record in result.history) > 4


def test_clients_that_are_empty_or_left_out_move_nothing(
    linear_model: Model, clients: list[Any]
) -> None:
    clients[2] = clients[5] = clients[8] = []
    clients[3] = [{**clients[3][0], "x": np.full_like(clients[3][0]["x"], np.inf)}]
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        guards=Guards(non_finite="leave_out"),
    )
    result = train(process, clients, 40)
    replay = Replay(clients, 0.05, process.initialize().weights.trainable)
    replay.left_out = {3}
    for _ in range(40):
        replay.step()
    taken = [record.clients for record in result.history]
    assert taken == [each[0] for each in replay.records]
    assert {2, 3, 5, 8} <= {client for each in taken for client in each}
    for weights, wanted in zip(
        result.state.weights.trainable, replay.versions[-1], strict=True
    ):
        np.testing.assert_allclose(weights, wanted, rtol=1e-5, atol=1e-5)


def test_resumed_steps_have_the_same_bits(
    averaging: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    class Stop:
        """Ends a run in the midst, while the next step was begun."""

        def __init__(self, *rounds: int) -> None:
            self.rounds = rounds

        def on_round(self, record: Any) -> None:
            if record.round in self.rounds:
                raise ArithmeticError

    whole = train(averaging, clients, 30)
    for stop in (1, 2, 9, 10, 23):
        with pytest.raises(errors.CallbackError):
            train(
                averaging,
                clients,
                30,
                storage_path=tmp_path,
                checkpoint_every=4,
                callbacks=[Stop(stop)],
            )
    result = train(averaging, clients, 30, storage_path=tmp_path)
    assert digest(result) == digest(whole)
    manager = FileProgramStateManager(tmp_path, "round_")
    structure = {"state": averaging.initialize()}
    saved, version = asyncio.run(manager.load_latest(structure))
    for found, wanted in zip(
        saved["state"].weights.trainable, result.state.weights.trainable, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    assert version == 30
    assert len(train(averaging, clients, 5, storage_path=tmp_path).history) == 30
    other = Buffered(concurrency=8, buffer=3, exponent=1.0)
    with pytest.raises(errors.ConfigError, match="`exponent` of the `schedule`"):
        train(averaging, clients, 31, storage_path=tmp_path, schedule=other)


def test_a_changed_history_is_found(
    averaging: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    arguments: Any = {"devices": DEVICES, "schedule": SCHEDULE, "seed": 7}
    state = train(averaging, clients, 3).state
    train(averaging, clients, 8, storage_path=tmp_path, state=state)
    train(averaging, clients, 12, storage_path=tmp_path, state=state)
    records = list(History.load(tmp_path))

    verify_clock(History(records), averaging, clients, **arguments)
    last = records[-1]
    for name, changed in (
        ("clients", last.clients[::-1]),
        ("versions", (last.versions[0] - 1, *last.versions[1:])),
        ("simulated_time", np.nextafter(last.simulated_time or 0.0, 0.0)),
        ("wasted_seconds", last.wasted_seconds + 1),
        ("live_versions", 1),
        ("round_index", last.round_index + 1),
    ):
        other: Any = {name: changed}
        history = History([*records[:-1], dataclasses.replace(last, **other)])
        with pytest.raises(errors.ValueMismatchError, match=f"`{name}` of round 12"):
            verify_clock(history, averaging, clients, **arguments)
    arguments["seed"] = 8
    with pytest.raises(errors.ValueMismatchError, match="of round 4"):
        verify_clock(History(records), averaging, clients, **arguments)
    arguments["sampler"] = PowerOfChoiceSampler(2)
    with pytest.raises(errors.ConfigError, match="draws without metrics of clients"):
        verify_clock(History(records), averaging, clients, **arguments)


@pytest.mark.parametrize("workers", [1, 3])
def test_steps_have_the_same_bits_on_any_number_of_threads(
    averaging: LearningProcess, clients: list[Any], workers: int
) -> None:
    wanted = digest(train(averaging, clients, NUM_STEPS))
    config = ray_fed.Config.load(backend="local", workers=workers, subrounds=workers)
    with ray_fed.create_context(config) as context:
        fl.framework.set_default_context(context)
        assert digest(train(averaging, clients, NUM_STEPS)) == wanted


@pytest.mark.slow
def test_layers_with_random_numbers_resume(
    make_batches: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.MeanSquaredError(),
        label_type=fl.TensorType(np.float32, [None, 1]),
    )
    process = build_fed_avg(model, keras.optimizers.SGD(0.05), keras.optimizers.Adam())
    data = [make_batches([4], seed) for seed in range(6)]
    schedule = Buffered(4, 2, averages="weights", max_staleness=3)
    context: Any = fl.framework.get_context_stack().current

    def go(num_steps: int, place: Any) -> Any:
        context.resume_at(0)
        return train(process, data, num_steps, storage_path=place, schedule=schedule)

    go(5, tmp_path)
    assert digest(go(12, tmp_path)) == digest(go(12, None))


def test_a_buffer_of_one_is_the_mixture_of_weights_of_fed_async(
    linear_model: Model, clients: list[Any]
) -> None:
    alpha = 0.5
    process = build_fed_avg(
        linear_model, keras.optimizers.SGD(0.05), keras.optimizers.SGD(alpha)
    )
    schedule = Buffered(4, 1, staleness=lambda t: 1 / (1 + t), averages="weights")
    result = train(process, clients, 10, schedule=schedule)
    states = [process.initialize().weights.trainable]
    replay = Replay(clients, 0.05, states[0])
    for record in result.history:
        version, client = record.versions[0], record.clients[0]
        start = replay.versions[version]
        trained = [
            w + d for w, d in zip(start, replay.work(client, version), strict=True)
        ]
        mixed = alpha / (1 + record.staleness[0])
        newest = replay.versions[-1]
        replay.versions.append(
            [(1 - mixed) * w + mixed * t for w, t in zip(newest, trained, strict=True)]
        )
    for found, wanted in zip(
        result.state.weights.trainable, replay.versions[-1], strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert max(record.staleness[0] for record in result.history) > 0


def test_one_client_at_a_time_is_not_stale(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    schedule = Buffered(1, 1, averages="weights")
    result = train(averaging, clients, 4, schedule=schedule)
    state = averaging.initialize()
    for record in result.history:
        assert record.staleness == (0,)
        state, _ = averaging.next(state, [clients[record.clients[0]]])
    for found, wanted in zip(
        result.state.weights.trainable, state.weights.trainable, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def open_test_clock(
    schedule: Buffered, devices: Devices, **sampler: Any
) -> BufferedClock:
    chosen = sampler.get("sampler", UniformSampler(0))
    process = LearningProcess(None, None)
    fleet = devices.fleet(process, [[]] * 10)

    def draw(number: int, size: int | None) -> list[int]:
        return chosen.sample(number, 10, size)

    clock = open_clock(schedule, fleet, draw, 10, None, 0)
    assert isinstance(clock, BufferedClock)
    return clock


def test_the_clock_keeps_its_invariants() -> None:
    speeds = LogNormal(1.0, 2.0)
    clock = open_test_clock(
        Buffered(6, 2, max_staleness=4), Devices(speeds, examples=1.0, drop_out=0.3)
    )
    begun = time_before = 0.0
    spent = wasted = 0.0
    saved = b""
    for index in range(200):
        step = clock.advance(index)
        saved = step.saved
        clock.check()
        assert step.time >= time_before
        assert all(index - 4 <= version <= index for version in step.versions)
        assert len({*step.live, index + 1}) <= 5
        time_before, begun = step.time, begun + step.num_asked
        wasted += step.wasted
        spent = step.time
    assert 0 < wasted < 6 * spent
    again = open_test_clock(
        Buffered(6, 2, max_staleness=4), Devices(speeds, examples=1.0, drop_out=0.3)
    )
    again.begin(200, saved)
    assert again.advance(200) == clock.advance(200)
    broken = saved.replace(b'"time": ', b'"time": 9')
    with pytest.raises(errors.SavedStateError, match="tasks of different clients"):
        again.begin(200, broken)


def test_clients_begin_in_their_hours_and_by_the_sampler() -> None:
    hours = [[0]] * 5 + [[2]] * 5
    clock = open_test_clock(
        Buffered(3, 2), Devices(1000.0, examples=1.0, hours=hours, period=3)
    )
    for index in range(30):
        step = clock.advance(index)
        for client in step.clients:
            began = (step.time // 3600) % 3
            assert client < 5 or began in (2, 0)
    weighted = WeightedSampler([0.0] * 7 + [1.0] * 3)
    clock = open_test_clock(
        Buffered(3, 2), Devices(LogNormal(1.0, 1.0), examples=1.0), sampler=weighted
    )
    found = {client for index in range(9) for client in clock.advance(index).clients}
    assert found == {7, 8, 9}
    never = Devices(1.0, examples=1.0, hours=[[]] * 10)
    with pytest.raises(errors.ConfigError, match="can begin work in step 1"):
        open_test_clock(Buffered(3, 2), never).advance(0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_on_ray_have_the_bits_of_threads(
    local_contexts: Any, ray_contexts: Any
) -> None:
    # Without `subrounds`, such short work would run on one worker. Tests of faults
    # compare rounds of two workers.
    found: list[str] = []
    for workers in (0, 1, 3):
        context = local_contexts(workers=2)
        if workers:
            context = ray_contexts(workers=workers, subrounds=workers)
        fl.framework.set_default_context(context)
        found.append(digest(buffered_script.train(None)))
    assert len(set(found)) == 1


def test_aggregators_and_guards_take_late_updates(
    linear_model: Model, clients: list[Any]
) -> None:
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        aggregator=clipped(0.1, median(max_clients=3)),
        guards=Guards(non_finite="leave_out"),
    )
    broken = [*clients]
    broken[3] = [{**clients[3][0], "x": np.full_like(clients[3][0]["x"], np.inf)}]
    result = train(process, broken, 8)
    left_out = [record.training["left_out"] for record in result.history]
    assert left_out == [record.clients.count(3) for record in result.history]
    assert sum(left_out) > 0
    assert all(np.isfinite(each).all() for each in result.state.weights.trainable)


def test_other_updates_than_changes_of_weights_are_refused(
    linear_model: Model, clients: list[Any]
) -> None:
    mime = build_mime_lite(linear_model, keras.optimizers.SGD(0.05))
    with pytest.raises(errors.ConfigError, match="a `Delta`, whose size"):
        train(mime, clients, 1)

    def client(server: Any, batches: Any) -> Any:
        trained = linear_model.evaluate(server.weights, batches)
        return {"x": server.weights.trainable[1]}, 1.0, trained

    def server(weights: Any, state: Any, update: Any) -> Any:
        del update
        return weights, state

    own = build_process(linear_model, client=client, server=server)
    with pytest.raises(errors.ConfigError, match="a `Delta`, whose size"):
        train(own, clients, 1)
    bad = Buffered(3, 2, staleness=lambda t: -1.0 - t)
    with pytest.raises(errors.ConfigError, match=r"`staleness\(0\)`"):
        train(mime, clients, 1, schedule=bad)
