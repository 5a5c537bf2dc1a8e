"""Sweeps: trials as single runs, tables, figures, storage and what is refused."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false

import argparse
import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning import History, RoundRecord, SweepResult, Trial
from ray_fed.tensorflow.graphs import kept_graphs
from ray_fed.tensorflow.kernels import server_kernels
from ray_fed.values.lru_cache import LruCache
from tests.learning.counting import CLIENTS, build_tally

RATES, SEEDS = [0.05, 0.2], [0, 3]


def make_clients() -> list[Any]:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4, 2, 5, 3)).astype(np.float32)
    return [[{"x": x, "y": x[:, 0] * 2} for x in client] for client in rows]


def train(
    rate: float,
    seed: int,
    storage_path: str | None,
    server_rate: float = 1.0,
    states: list[Any] | None = None,
) -> learning.TrainingResult:
    layers = [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = learning.Model.from_keras(keras.Sequential(layers), loss="mse")
    process = learning.build_fed_avg(
        model, keras.optimizers.SGD(rate), keras.optimizers.SGD(server_rate)
    )
    result = learning.run(
        process,
        make_clients(),
        num_rounds=3,
        cohort_size=3,
        seed=seed,
        storage_path=storage_path,
    )
    if states is not None:
        states.append(result.state)
    return result


def weights_of(states: list[Any]) -> list[bytes]:
    return [b"".join(w.tobytes() for w in s.weights.trainable) for s in states]


@pytest.mark.slow
def test_trials_have_the_bits_of_single_runs() -> None:
    states: list[Any] = []
    singles: list[Any] = []
    pairs = [(rate, seed) for rate in RATES for seed in SEEDS]

    learning.sweep(
        lambda rate, seed, storage_path: train(rate, seed, storage_path, states=states),
        {"rate": RATES},
        seeds=SEEDS,
    )

    for rate, seed in pairs[:1] + pairs[-1:]:
        config = ray_fed.Config.load(backend="local", workers=1)
        with ray_fed.init(config=config) as context:
            keras.utils.set_random_seed(seed)
            # Draws of a trial, here of dropout, depend on its seed.
            context.resume_at(seed * 10**5)
            train(rate, seed, None, states=singles)
    found, wanted = weights_of(states), weights_of(singles)
    assert found[:1] + found[-1:] == wanted
    assert len({*found}) == len(pairs)


@pytest.mark.slow
def test_rates_of_clients_and_server_share_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_FED_GRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_graphs, "_memory", LruCache[str, bytes](64))
    monkeypatch.setattr(server_kernels, "_shared", LruCache[bytes, Any](64))
    traces: list[int] = []
    find_gradients = learning.Model.find_gradients

    def counted(self: learning.Model, *args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return find_gradients(self, *args, **kwargs)

    monkeypatch.setattr(learning.Model, "find_gradients", counted)
    counts: list[int] = []

    def run_one(rate: float, seed: int, storage_path: Any) -> Any:
        result = train(rate, seed, storage_path, server_rate=10 * rate)
        counts.append(len(traces))
        return result

    learning.sweep(run_one, {"rate": RATES}, seeds=SEEDS)
    learning.sweep(run_one, {"rate": [0.3]})

    assert len(counts) == 5
    assert {*counts} == {counts[0]}
    assert counts[0] > 0


ROUNDS = 4


class Runs:
    """A `run_one` without a federation that counts its calls."""

    def __init__(self, on_round: Callable[[RoundRecord], None] | None = None) -> None:
        self.calls: list[tuple[float, int]] = []
        self.on_trial_round = on_round

    def build(self, num_rounds: int = ROUNDS, on_signal: Any = "raise") -> Any:
        def run_one(rate: float, seed: int, storage_path: str | None) -> Any:
            self.calls.append((rate, seed))
            return learning.run(
                build_tally(),
                CLIENTS,
                num_rounds=num_rounds,
                cohort_size=2,
                seed=seed,
                storage_path=storage_path,
                checkpoint_every=1,
                callbacks=[self],
                on_signal=on_signal,
            )

        return run_one

    def on_round(self, record: RoundRecord) -> None:
        if self.on_trial_round is not None:
            self.on_trial_round(record)


def losses_of(result: SweepResult) -> list[list[float | None]]:
    return [trial.history.values("loss") for trial in result.trials]


@pytest.mark.parametrize("on_signal", ["raise", "return"])
def test_signal_ends_the_sweep_and_the_same_call_resumes_it(
    tmp_path: Path, on_signal: str
) -> None:
    parameters, place = {"rate": [0.1, 0.2]}, tmp_path / "sweep"
    whole = learning.sweep(Runs().build(), parameters, seeds=SEEDS)

    def interrupt(record: RoundRecord) -> None:
        if record.round == 2 and len(runs.calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    runs = Runs(interrupt)

    def call(runs: Runs) -> SweepResult:
        return learning.sweep(
            runs.build(on_signal=on_signal),
            parameters,
            seeds=SEEDS,
            storage_path=place,
        )

    if on_signal == "raise":
        with pytest.raises(KeyboardInterrupt):
            call(runs)
    else:
        stopped = call(runs)
        assert (stopped.reason, len(stopped.trials)) == ("interrupted", 1)
    assert runs.calls == [(0.1, 0), (0.1, 3)]
    rounds: list[int] = []
    again = Runs(lambda record: rounds.append(record.round))
    resumed = call(again)

    # A function with another callback is another one, but no round is run again.
    assert again.calls == [(0.1, 0), (0.1, 3), (0.2, 0), (0.2, 3)]
    assert rounds[0] > 1  # it goes on
    assert losses_of(resumed) == losses_of(whole)
    assert [trial.reason for trial in resumed.trials] == ["finished"] * 4


def test_more_values_and_changed_functions_run_what_is_missing(tmp_path: Path) -> None:
    runs = Runs()
    first = learning.sweep(runs.build(), {"rate": [0.1]}, storage_path=tmp_path)
    runs.calls.clear()

    learning.sweep(runs.build(), {"rate": [0.2, 0.1]}, storage_path=tmp_path)
    more = learning.sweep(
        runs.build(num_rounds=6), {"rate": [0.1]}, storage_path=tmp_path
    )

    assert runs.calls == [(0.2, 0), (0.1, 0)]
    assert losses_of(more)[0][:ROUNDS] == losses_of(first)[0]
    assert len(more.trials[0].history) == 6


def test_text_is_another_value_than_its_number(tmp_path: Path) -> None:
    runs = Runs()
    for rate in ("0.1", 0.1):
        learning.sweep(runs.build(), {"rate": [rate]}, storage_path=tmp_path)
        (place,) = tmp_path.glob("rate*")
        calls, runs.calls = runs.calls, []
        assert calls == [(rate, 0)]
    assert place.name == "rate=0.1,seed=0"


RATE = {"rate": [0.1]}


def build_with(setting: Any) -> Any:
    def run_one(seed: int, storage_path: str | None) -> Any:
        arguments: Any = {"num_rounds": 1, "storage_path": storage_path}
        return learning.run(build_tally(), CLIENTS, seed=seed, **arguments), setting

    def first(seed: int, storage_path: str | None) -> Any:
        def inside() -> Any:
            return RATE and run_one(seed, storage_path)[0]

        return inside()

    return first


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ({"rate": [0.1]}, {"rate": [0.2]}),
        (np.ones(3), np.zeros(3)),
        (argparse.Namespace(rate=1), argparse.Namespace(rate=2)),
        (keras.optimizers.SGD(0.1), None),
    ],
)
def test_changed_values_call_a_trial_again(
    tmp_path: Path,
    setting: Any,
    other: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "ray_fed.learning.sweeps")

    def count_calls(setting: Any) -> int:
        caplog.clear()
        learning.sweep(build_with(setting), {}, storage_path=tmp_path)
        return len(caplog.records)

    assert count_calls(setting) == 1
    assert count_calls(copy.deepcopy(setting)) == int(other is None)
    assert count_calls(other) == 1
    assert count_calls(other) == 0
    monkeypatch.setitem(RATE, "rate", [0.2])  # in a function inside
    assert count_calls(other) == 1


def test_failed_trials_are_told_and_run_again(tmp_path: Path) -> None:
    broken = [0.2]

    def run_one(rate: float, seed: int, storage_path: str | None) -> Any:
        if rate in broken:
            raise ValueError("too fast")
        return Runs().build()(rate, seed, storage_path)

    parameters = {"rate": [0.2, 0.1]}
    with pytest.raises(ValueError, match="too fast") as raised:
        learning.sweep(run_one, parameters)
    assert raised.value.__notes__ == ["In the trial rate=0.2, seed=0 of the sweep."]

    logged = learning.sweep(run_one, parameters, storage_path=tmp_path, on_error="log")
    broken.clear()
    again = learning.sweep(run_one, parameters, storage_path=tmp_path, on_error="log")

    assert [trial.error for trial in logged.trials] == ["too fast", None]
    assert [trial.reason for trial in again.trials] == ["finished", "finished"]
    frame = logged.to_pandas()
    assert list(frame["reason"]) == ["failed", "finished"]
    assert np.isnan(frame["training.loss"][0])
    assert logged.summary()["training.loss", "count"].tolist() == [0, 1]


def make_result() -> SweepResult:
    """Return trials of which the last has a round less."""
    generator = np.random.default_rng(2)
    trials: list[Trial] = []
    for rate in (0.3, 0.1):
        for seed in range(3):
            losses = generator.normal(size=4 - (rate == 0.1 and seed == 2))
            records = [
                RoundRecord(index, (0,), {"loss": loss}, None, 0.5)
                for index, loss in enumerate(losses)
            ]
            trials.append(Trial({"rate": rate}, seed, History(records), "finished"))
    return SweepResult(trials, ["rate"])


def test_tables_are_those_of_numpy() -> None:
    result = make_result()

    frame, summary = result.to_pandas(), result.summary("loss")

    assert frame["rate"].tolist() == [0.3] * 3 + [0.1] * 3
    assert frame["seed"].tolist() == [0, 1, 2] * 2
    assert frame["rounds"].tolist() == [4, 4, 4, 4, 4, 3]
    assert frame["seconds"].tolist() == [2.0] * 5 + [1.5]
    last = np.array([trial.history.values("loss")[-1] for trial in result.trials])
    assert frame["training.loss"].tolist() == last.tolist()
    groups = last.reshape(2, 3)
    assert summary.index.tolist() == [0.3, 0.1]
    found = summary["training.loss"]
    np.testing.assert_allclose(found["mean"], groups.mean(axis=1))
    np.testing.assert_allclose(found["std"], groups.std(axis=1, ddof=1))
    assert found["count"].tolist() == [3, 3]
    assert "<td" in result._repr_html_()
    assert repr(result) == "<sweep over rate, seed: 6 trials, finished>"


def test_plot_has_means_and_bands_over_seeds() -> None:
    result = make_result()

    figure = result.plot("loss")

    (panel,) = figure.axes
    assert panel.get_ylabel() == "training.loss"
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["rate=0.3", "rate=0.1"]
    for index, rounds in enumerate((4, 3)):
        curves: Any = [
            trial.history.values("loss")[:rounds]
            for trial in result.trials[3 * index : 3 * index + 3]
        ]
        mean, width = np.mean(curves, axis=0), np.std(curves, axis=0, ddof=1)
        line, band = panel.lines[index], panel.collections[index]
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, rounds + 1))
        np.testing.assert_allclose(line.get_ydata(), mean)
        corners = band.get_paths()[0].vertices
        np.testing.assert_allclose(corners[:, 1].max(), (mean + width).max())
        np.testing.assert_allclose(corners[:, 1].min(), (mean - width).min())


def test_seeds_alone_have_one_row_and_one_line() -> None:
    result = learning.sweep(
        lambda seed, storage_path: Runs().build()(0.1, seed, storage_path),
        {},
        seeds=SEEDS,
    )

    assert len(result.summary()) == 1
    assert len(result.plot("loss").axes[0].lines) == 1


RUN_ONE = Runs().build()
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no mapping": (lambda: learning.sweep(RUN_ONE, [0.1]), "mapping from names"),  # pyright: ignore[reportArgumentType]
    "unknown name": (lambda: learning.sweep(RUN_ONE, {"lr": [0.1]}), "with `lr`, `se"),
    "missing name": (lambda: learning.sweep(RUN_ONE, {}), "missing.* 'rate'"),
    "a name that trials have": (
        lambda: learning.sweep(RUN_ONE, {"seed": [1]}),
        "other than seed, rounds",
    ),
    "no value": (lambda: learning.sweep(RUN_ONE, {"rate": []}), "of `rate`, found an"),
    "one value": (lambda: learning.sweep(RUN_ONE, {"rate": 0.1}), "in a list"),  # pyright: ignore[reportArgumentType]
    "a value twice": (
        lambda: learning.sweep(RUN_ONE, {"rate": [1, 0.5, 1.0]}),
        "each value of `rate` once",
    ),
    "an object": (
        lambda: learning.sweep(RUN_ONE, {"rate": [keras.optimizers.SGD()]}),
        "make the object in `run_one`",
    ),
    "no seed": (
        lambda: learning.sweep(RUN_ONE, {"rate": [0.1]}, seeds=[]),
        "`seeds`, found an empty",
    ),
    "a seed twice": (
        lambda: learning.sweep(RUN_ONE, {"rate": [0.1]}, seeds=[1, 1]),
        "each value of `seeds` once",
    ),
    "a seed below zero": (
        lambda: learning.sweep(RUN_ONE, {"rate": [0.1]}, seeds=[-1]),
        "from 0 to 4294967295",
    ),
    "no function": (lambda: learning.sweep(3, {"rate": [0.1]}), "a function of `ra"),  # pyright: ignore[reportArgumentType]
    "on_error": (
        lambda: learning.sweep(RUN_ONE, {"rate": [0.1]}, on_error="skip"),  # pyright: ignore[reportArgumentType]
        "one of .'raise', 'log'",
    ),
}


@pytest.mark.parametrize(("call", "match"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_told_before_the_first_trial(
    call: Callable[[], Any], match: str
) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        call()


def test_storage_of_something_else_is_refused(tmp_path: Path) -> None:
    run_one = Runs().build()
    run_one(0.1, 0, str(tmp_path / "run"))
    learning.sweep(run_one, {"rate": [0.1]}, storage_path=tmp_path / "sweep")

    def run_other(lr: float, seed: int, storage_path: str | None) -> Any:
        return run_one(lr, seed, storage_path)

    def run_unsaved(rate: float, seed: int, storage_path: str | None) -> Any:
        return run_one(rate, seed, None)

    def run_nothing(rate: float, seed: int, storage_path: str | None) -> Any:
        return seed

    calls: list[tuple[Any, str, str, type[Exception], str]] = [
        (run_one, "rate", "run", errors.ConfigError, "found a run of"),
        (run_other, "lr", "sweep", errors.ConfigError, r"over \['rate'\].* \['lr'\]"),
        (run_unsaved, "rate", "unsaved", errors.ConfigError, "found no round there"),
        (run_nothing, "rate", "none", errors.ValueMismatchError, "a `TrainingResult`"),
    ]
    for function, name, folder, kind, match in calls:
        with pytest.raises(kind, match=match):
            learning.sweep(function, {name: [0.1]}, storage_path=tmp_path / folder)
