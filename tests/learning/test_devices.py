"""Devices: simulated seconds, deadlines, over-selection, hours and partial work."""

import pathlib
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import pandas as pd
import pytest

import ray_fed.errors as errors
from ray_fed.data import ClientData
from ray_fed.learning import (
    Buffered,
    History,
    LearningProcess,
    Model,
    Synchronous,
    build_fed_avg,
    build_fed_prox,
    build_scaffold,
    run,
    verify_clock,
)
from ray_fed.learning.aggregators import dp_mean
from ray_fed.learning.devices import Devices, LogNormal
from ray_fed.learning.schedules import open_clock
from ray_fed.program import (
    AvailabilitySampler,
    PoissonSampler,
    PowerOfChoiceSampler,
    UniformSampler,
)

SIZES = [2, 3, 4, 5, 6]
SECONDS = [1.0, 2.0, 0.5, 4.0, 3.0]
"""Tasks take 2, 6, 2, 20 and 18 seconds."""


@pytest.fixture
def clients(make_batches: Callable[..., list[Any]]) -> list[Any]:
    return [make_batches([size], seed) for seed, size in enumerate(SIZES)]


def weights_of(result: Any) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in result.state.weights.trainable]


def test_devices_add_times_to_the_same_rounds(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    arguments: Any = {"num_rounds": 3, "cohort_size": 2, "seed": 4}
    plain = run(averaging, clients, **arguments)
    timed = run(averaging, clients, devices=Devices(SECONDS), **arguments)
    assert weights_of(timed) == weights_of(plain)
    assert [r.clients for r in timed.history] == [r.clients for r in plain.history]
    took = [
        max(SECONDS[c] * SIZES[c] for c in record.clients) for record in plain.history
    ]
    found = [record.simulated_time for record in timed.history]
    np.testing.assert_allclose(np.array(found, float), np.cumsum(took))
    assert [record.simulated_time for record in plain.history] == [None] * 3
    assert "simulated_time" not in plain.history.rows()[0]
    assert timed.history.rows()[0]["staleness"] == 0


def test_bytes_take_time(averaging: LearningProcess, clients: list[Any]) -> None:
    moved = averaging.client_bytes
    assert moved is not None
    devices = Devices(1.0, download=8.0, upload={i: i + 1.0 for i in range(5)})
    history = run(averaging, clients, num_rounds=1, devices=devices).history
    wanted = [
        moved.sent / 8 + SIZES[i] + moved.returned / (i + 1) for i in range(len(SIZES))
    ]
    assert history[0].simulated_time == pytest.approx(max(wanted))


def test_numbers_of_examples_are_those_of_tables_or_given(
    averaging: LearningProcess,
) -> None:
    rows = {"who": ["a", "b", "b"], "x": [[1.0, 2.0, 3.0]] * 3, "y": [[1.0]] * 3}
    data = ClientData.from_table(
        pd.DataFrame(rows), client="who", x="x", y="y", batch_size=2
    )
    fleet = Devices(2.0).fleet(averaging, data.epochs(3))
    assert fleet.epoch_s.tolist() == [6.0, 12.0]
    seconds: Any = pd.Series([2.0, 1.0], index=["b", "a"])
    fleet = Devices(seconds, examples=[10, 20]).fleet(averaging, data)
    assert fleet.epoch_s.tolist() == [10.0, 40.0]


def test_epochs_of_numpy_take_time(linear_model: Model, clients: list[Any]) -> None:
    epochs: Any = np.int64(3)
    process = build_fed_avg(linear_model, keras.optimizers.SGD(0.05), epochs=epochs)
    fleet = Devices(SECONDS).fleet(process, clients)
    assert fleet.seconds(0) == 3 * 2


def test_log_normal_numbers_have_their_median_and_deviation() -> None:
    found = np.log(LogNormal(2.0, 0.5, seed=3).draw(20_000))
    assert np.median(found) == pytest.approx(np.log(2.0), abs=0.02)
    assert found.std() == pytest.approx(0.5, abs=0.01)
    again = LogNormal(2.0, 0.5, seed=3).draw(10)
    assert np.array_equal(np.log(again), found[:10])


def test_over_selection_takes_the_first_updates(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    history = run(
        averaging,
        clients,
        num_rounds=1,
        cohort_size=3,
        devices=Devices(SECONDS),
        schedule=Synchronous(over_selection=5 / 3),
    ).history
    moved = averaging.client_bytes
    assert moved is not None
    assert history[0].clients == (0, 1, 2)
    assert history[0].simulated_time == 6.0
    assert history[0].wasted_seconds == 12.0  # two clients worked for 6 seconds
    assert history[0].bytes_sent == 5 * moved.sent
    assert history[0].bytes_returned == 3 * moved.returned


def test_over_selection_asks_no_client_for_an_error_of_rounding() -> None:
    fleet = Devices(1.0, examples=1.0).fleet(LearningProcess(None, None), [[]] * 12)
    schedule = Synchronous(over_selection=1.1)

    def draw(index: int, size: int | None) -> list[int]:
        return UniformSampler().sample(index, 12, size)

    clock = open_clock(schedule, fleet, draw, 12, 10, seed=0)
    assert clock.advance(0).num_asked == 11


@pytest.mark.parametrize("empty", ["error", "skip"])
def test_deadlines_leave_late_clients_out(
    averaging: LearningProcess, clients: list[Any], empty: Any
) -> None:
    def train(deadline: float) -> Any:
        return run(
            averaging,
            clients,
            num_rounds=2,
            devices=Devices(SECONDS),
            schedule=Synchronous(deadline=deadline, empty=empty),
        )

    history = train(18.0).history
    assert history[0].clients == (0, 1, 2, 4)
    assert history[1].simulated_time == 36.0
    assert history[0].wasted_seconds == 18.0
    if empty == "error":
        with pytest.raises(errors.ConfigError, match="one of 5 clients in round 1"):
            train(1.0)
        return
    result = train(1.0)
    assert [record.clients for record in result.history] == [(), ()]
    assert result.history[1].simulated_time == 2.0
    assert result.history[1].wasted_seconds == 5.0
    start = averaging.initialize().weights.trainable
    assert weights_of(result) == [np.asarray(each).tobytes() for each in start]


def test_clients_that_drop_out_are_wasted_work(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    devices = Devices(SECONDS, drop_out=0.5, seed=1)
    schedule = Synchronous(empty="skip")
    history = run(
        averaging, clients, num_rounds=4, devices=devices, schedule=schedule
    ).history
    fleet, time = devices.fleet(averaging, clients), 0.0
    for record in history:
        shares = [fleet.find_drop(c, record.round_index) for c in range(5)]
        assert record.clients == tuple(c for c in range(5) if shares[c] is None)
        spent = [
            s * n * (1.0 if share is None else share)
            for s, n, share in zip(SECONDS, SIZES, shares, strict=True)
        ]
        time += max(spent)
        lost = sum(
            t for t, share in zip(spent, shares, strict=True) if share is not None
        )
        assert record.simulated_time == pytest.approx(time)
        assert record.wasted_seconds == pytest.approx(lost)
    assert any(len(record.clients) < 5 for record in history)


def test_clients_drop_out_independently_of_the_cohort(
    averaging: LearningProcess,
) -> None:
    fleet = Devices(1.0, examples=1.0, drop_out=0.1).fleet(averaging, [[]] * 20)
    sampler = PoissonSampler(0.1)
    cohorts = [sampler.sample(index, 20, None) for index in range(2000)]
    drops = [fleet.find_drop(0, i) is not None for i in range(2000) if 0 in cohorts[i]]
    assert len(drops) > 100
    assert 0.04 < np.mean(drops) < 0.2


def test_clients_take_part_in_their_hours(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    hours = [[2], [2, 3], [2], [3], []]
    devices = Devices([100.0] * 5, hours=hours, period=4)
    schedule = Synchronous(empty="skip")
    history = run(
        averaging, clients, num_rounds=3, devices=devices, schedule=schedule
    ).history
    assert [record.clients for record in history] == [(0, 1, 2)] * 3
    times = [2 * 3600 + 400.0 * n for n in (1, 2, 3)]
    assert [record.simulated_time for record in history] == times
    never = Devices(1.0, hours=[[]] * 5)
    with pytest.raises(errors.ConfigError, match="found none of 0 that began work"):
        run(averaging, clients, num_rounds=1, devices=never)


@pytest.mark.slow
def test_partial_work_does_as_many_epochs_as_fit(
    linear_model: Model, clients: list[Any]
) -> None:
    sgd = keras.optimizers.SGD(0.05)

    def build(epochs: int) -> LearningProcess:
        return build_fed_prox(linear_model, sgd, proximal=0.1, epochs=epochs)

    once, thrice = build(1), build(3)
    # An epoch takes 2, 6, 2, 20 and 18 seconds.
    result = run(
        thrice,
        clients,
        num_rounds=1,
        devices=Devices(SECONDS),
        schedule=Synchronous(deadline=19.0, late="partial"),
    )
    assert result.history[0].clients == (0, 1, 2, 4)
    assert result.history[0].simulated_time == 19.0
    assert result.history[0].wasted_seconds == 19.0
    start = once.initialize()
    moved, total = 0.0, 0
    for client, epochs in {0: 3, 1: 3, 2: 3, 4: 1}.items():
        process = thrice if epochs > 1 else once
        after, _ = process.next(start, [clients[client]])
        delta = after.weights.trainable[0] - start.weights.trainable[0]
        moved, total = moved + SIZES[client] * delta, total + SIZES[client]
    found = result.state.weights.trainable[0] - start.weights.trainable[0]
    np.testing.assert_allclose(found, moved / total, rtol=1e-5, atol=1e-7)


def test_a_run_with_devices_resumes_its_clock(
    averaging: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    arguments: Any = {
        "cohort_size": 2,
        "devices": Devices(LogNormal(100.0, 1.0), hours=[[0], [1], [0], [1], [0, 1]]),
        "schedule": Synchronous(over_selection=1.5),
    }
    whole = run(averaging, clients, num_rounds=6, **arguments)
    for num_rounds in (2, 3, 6):
        result = run(
            averaging,
            clients,
            num_rounds=num_rounds,
            storage_path=tmp_path,
            **arguments,
        )
    assert weights_of(result) == weights_of(whole)
    times = [record.simulated_time for record in whole.history]
    assert [record.simulated_time for record in result.history] == times
    assert [r.simulated_time for r in History.load(tmp_path)] == times
    verify_clock(History.load(tmp_path), averaging, clients, **arguments)
    arguments["schedule"] = Synchronous(over_selection=2)
    with pytest.raises(errors.ConfigError, match=r"`over_selection` of the `schedule`"):
        run(averaging, clients, num_rounds=7, storage_path=tmp_path, **arguments)


def test_histories_are_drawn_over_simulated_hours(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    devices = Devices([3600.0] * 5)
    history = run(averaging, clients, num_rounds=3, devices=devices).history
    (panel,) = history.plot("loss", x="simulated_time").axes
    assert list(panel.lines[0].get_xdata()) == [6.0, 12.0, 18.0]
    assert panel.get_xlabel() == "simulated hours"
    plain = run(averaging, clients, num_rounds=1).history
    with pytest.raises(errors.ConfigError, match="pass `devices`"):
        plain.plot("loss", x="simulated_time")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Devices(0.0), "`seconds_per_example` above 0"),
        (lambda: Devices(pd.Series([1.0, 2.0], ["a", "a"])), "2 rows of 1 clients"),  # pyright: ignore[reportArgumentType]
        (lambda: Devices(1.0, download=0), "`download` above 0"),
        (lambda: Devices(1.0, drop_out=1.0), "from 0 to below 1"),
        (lambda: LogNormal(1.0, -1.0), "`sigma` of at least 0"),
        (lambda: Synchronous(over_selection=0.9), "of at least 1"),
        (lambda: Synchronous(deadline=0), "`deadline` above 0"),
        (lambda: Synchronous(late="partial"), "Expected a `deadline`"),
        (lambda: Synchronous(empty="no"), r"\['error', 'skip'\]"),  # type: ignore[arg-type]
        (lambda: Buffered(3, 4), "at most `concurrency`, 3, found 4"),
        (lambda: Buffered(3, 1, staleness="slow"), "polynomial"),  # type: ignore[arg-type]
    ],
)
def test_numbers_out_of_range_are_refused(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": Devices({"b": 1.0})}, r"none for \['a'\]"),
        ({"devices": Devices([1.0, 2.0, 3.0])}, "for each of 2 clients .* 3 values"),
        ({"devices": Devices([1.0, np.nan])}, r"found \[nan\]"),
        ({"devices": Devices(1.0, upload=[1.0, 0.0])}, r"`upload` of devices, .* \[0"),
        ({"devices": Devices(1.0, upload=LogNormal(1.0, 1e6))}, "`upload` of devices"),
        ({"devices": Devices(cast("Any", None))}, "`seconds_per_example`.* found None"),
        ({"devices": Devices(1.0, hours=[[0], [24]])}, "hours"),
        ({"devices": Devices(1.0, hours=cast("Any", [0, 1]))}, "a list of hours"),
        ({"schedule": Synchronous()}, "Expected `devices` for a `schedule`"),
        ({"devices": 3}, r"`learning\.devices\.Devices` or None"),
        (
            {
                "devices": Devices(1.0),
                "schedule": Synchronous(over_selection=1.6),
                "cohort_size": 2,
            },
            "at least 4 clients in `data`, found 2",
        ),
        (
            {"devices": Devices(1.0), "schedule": Synchronous(over_selection=1.6)},
            "`cohort_size` for `over_selection`",
        ),
        ({"devices": Devices(1.0), "schedule": Buffered(3, 1)}, "at most 2"),
        (
            {"devices": Devices(1.0), "schedule": Buffered(2, 1), "cohort_size": 2},
            "no `cohort_size` for `Buffered`",
        ),
        (
            {"devices": Devices(1.0), "sampler": PowerOfChoiceSampler(2)},
            "draws without metrics of clients",
        ),
        (
            {"devices": Devices(1.0), "sampler": AvailabilitySampler([[0], [1]])},
            r"the hours as `Devices\(hours=\)`",
        ),
        (
            {
                "devices": Devices(1.0),
                "sampler": PoissonSampler(0.5),
                "schedule": Buffered(2, 1),
            },
            "no round that each could join with one probability",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(
    averaging: LearningProcess,
    clients: list[Any],
    arguments: dict[str, Any],
    message: str,
) -> None:
    data = dict(zip("ab", clients, strict=False))
    with pytest.raises(errors.ConfigError, match=message):
        run(averaging, data, num_rounds=1, **arguments)


@pytest.mark.slow
def test_processes_that_cannot_be_told_are_refused(
    linear_model: Model, averaging: LearningProcess, clients: list[Any]
) -> None:
    scaffold = build_scaffold(linear_model, 0.1, num_clients=5)
    private = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.1),
        aggregator=dp_mean(1.0, 1.0, 2, num_clients=5, delta=1e-3),
    )
    by_hand = LearningProcess(averaging.initialize, averaging.next)
    partial = Synchronous(deadline=9.0, late="partial")
    for process, schedule, message in (
        (scaffold, Buffered(3, 2), "control variates of SCAFFOLD"),
        (scaffold, partial, "clients keep nothing between rounds"),
        (private, Buffered(3, 2), "drawn by chance alone"),
        (private, Synchronous(deadline=9.0), "drawn by chance alone"),
        (by_hand, Buffered(3, 2), "one that was made by hand"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            run(
                process,
                clients,
                num_rounds=1,
                devices=Devices(1.0),
                schedule=schedule,
            )
    # Time alone changes no guarantee.
    history = run(private, clients, num_rounds=1, devices=Devices(1.0)).history
    assert history[0].training["epsilon"] > 0


def test_one_call_of_examples_that_are_not_known(
    averaging: LearningProcess,
) -> None:
    class Lazy:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise AssertionError(index)

    with pytest.raises(errors.ConfigError, match=r"Devices\(examples=\)"):
        Devices(1.0).fleet(averaging, Lazy())  # type: ignore[arg-type]
    assert isinstance(averaging.next, fl.framework.Computation)
