"""The command that runs peers: what it reads, compares, refuses and says. No peer."""

import json
import os
import pathlib
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import rounds, workloads
from benchmarks.peers import __main__ as command
from benchmarks.peers import variants
from benchmarks.peers.processes import PeerFailure, PeerProcess

SERVES = """
    import json, subprocess, sys, time
    settings = json.loads(sys.argv[1])["settings"]
    from benchmarks.peers.turns import Task

    class Peer:
        def reset(self):
            self.value = 1.0

        def run_round(self):
            print("chatter on the standard output")
            if settings.get("fails"):
                raise ValueError("no such thing")
            time.sleep(settings.get("ms", 0) / 1000)
            self.value += 1

        def weights(self):
            if settings.get("forks"):
                return [subprocess.Popen(["sleep", "1000"]).pid]
            return [self.value, [self.value, 0.0]]

    Task().serve(Peer(), "numpy")
"""
"""A peer of numpy alone."""


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., PeerProcess]]:
    """Return what starts a peer with settings; all are closed at the end."""
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(SERVES))
    started: list[PeerProcess] = []

    def start_one(limit_s: float = 60.0, **settings: int) -> PeerProcess:
        told = {"workload": "tiny", "folder": str(tmp_path), "settings": settings}
        folder = tmp_path / f"process_{len(started)}"
        process = PeerProcess(
            [sys.executable, str(script), json.dumps(told)], settings, folder, limit_s
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.close()


def test_each_round_begins_with_the_first_weights(start: Any) -> None:
    process = start()

    seconds, _ = process.turn(2)

    assert all(took >= 0 for took in seconds)
    assert process.version == np.__version__
    first, second = process.weights()
    assert first == 2.0
    np.testing.assert_array_equal(second, [2.0, 0.0])


def test_a_peer_stands_still_between_its_turns(start: Any) -> None:
    process = start()

    process.turn(1)

    told = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert told is not None
    assert told.si_status == signal.SIGSTOP


def test_a_peer_that_raises_is_named_with_its_last_line(start: Any) -> None:
    process = start(fails=1)

    with pytest.raises(PeerFailure, match=r"^ValueError: no such thing$"):
        process.turn(1)


def test_a_peer_that_hangs_is_ended(start: Any) -> None:
    process = start(ms=100_000)
    process.limit_s = 0.2

    with pytest.raises(PeerFailure, match=r"no answer within 0\.2 s"):
        process.turn(1)

    assert not pathlib.Path(f"/proc/{process.pid}").exists()


def test_what_a_peer_started_ends_with_it(start: Any) -> None:
    process = start(forks=1)
    (child,) = process.weights()
    handle = os.pidfd_open(int(child))

    process.close()

    ended, _, _ = select.select([handle], [], [], 30)
    os.close(handle)
    assert ended


def test_the_fastest_setting_takes_part_and_the_others_end(start: Any) -> None:
    settings: dict[str, dict[str, int]] = {
        "slow": {"ms": 200},
        "broken": {"fails": 1},
        "fast": {},
        "slower": {"ms": 300},
    }
    started: dict[str, PeerProcess] = {}

    def start_setting(name: str) -> PeerProcess:
        started[name] = start(**settings[name])
        return started[name]

    setting, process, tried = command.choose_fastest(list(settings), start_setting)

    assert (setting, process) == ("fast", started["fast"])
    assert process.turn(1)[0][0] < 0.2
    assert tried["broken"] == "ValueError: no such thing"
    assert 0.2 <= float(tried["slow"]) < float(tried["slower"])
    for name in ("slow", "broken", "slower"):
        assert not pathlib.Path(f"/proc/{started[name].pid}").exists()


def test_a_peer_that_no_setting_runs_fails_with_its_last_line(start: Any) -> None:
    with pytest.raises(PeerFailure, match=r"^ValueError: no such thing$"):
        command.choose_fastest(["a", "b"], lambda _: start(fails=1))


def test_a_peer_reads_the_data_and_weights_of_the_workload(
    tmp_path: pathlib.Path,
) -> None:
    command.write_task("mlp", 3, tmp_path)

    workload = workloads.WORKLOADS["mlp"]
    x, y = np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy")
    assert x.shape == (3, 5, 20, 784)
    for index in range(3):
        expected_x, expected_y = workload.client(index)
        np.testing.assert_array_equal(x[index], expected_x)
        np.testing.assert_array_equal(y[index], expected_y)
    with np.load(tmp_path / "initial.npz") as held:
        weights = [held[name] for name in held.files]
    for found, expected in zip(weights, workload.initial(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_figures_are_medians_and_ratios_to_the_peer() -> None:
    seconds = {"pfl": [9.0, 4.0, 1.0], "local": [1.0], "ray": [2.0]}
    timed = {name: rounds.Timed(took, []) for name, took in seconds.items()}

    figures = command.summarize(8, "pfl", timed)

    assert figures["clients_per_s"] == {"pfl": 2.0, "local": 8.0, "ray": 4.0}
    assert figures["times_the_peer"] == {"local": 4.0, "ray": 2.0}


@pytest.mark.parametrize(
    ("found", "same"),
    [
        ([np.full(3, 1.0)], True),
        ([np.full(3, 1.00001)], True),
        ([np.full(3, 1.01)], False),
        ([np.full((1, 3), 1.0)], False),
        ([], False),
        ([np.full(3, np.nan)], False),
    ],
    ids=["same", "rounding", "other values", "other shape", "fewer", "no number"],
)
def test_weights_agree_up_to_rounding(found: Any, same: bool) -> None:
    assert rounds.agree(found, [np.ones(3)]) == same


def test_every_peer_has_a_module_and_settings_of_one_shape() -> None:
    root = pathlib.Path(command.__file__).parents[2]

    for peer in variants.PEERS.values():
        assert (root / f"{peer.module.replace('.', '/')}.py").is_file()
        assert len({frozenset(settings) for settings in peer.settings.values()}) == 1


def test_an_unknown_peer_is_refused_with_the_names_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--peers", "fedml"])

    assert "'tff_on_worker'" in capsys.readouterr().err
