"""The command that runs peers: what it reads, compares, refuses and says. No peer."""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import rounds, workloads
from benchmarks.peers import __main__ as command
from benchmarks.peers import environments, variants
from benchmarks.peers.environments import Environment, EnvironmentFailure
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


def test_a_setting_far_slower_than_another_is_given_up(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_PATIENCE_S", 0.5)
    settings: dict[str, dict[str, int]] = {"fast": {}, "endless": {"ms": 100_000}}

    setting, process, tried = command.choose_fastest(
        list(settings), lambda name: start(**settings[name])
    )

    assert setting == "fast"
    assert "no answer within 0.5" in str(tried["endless"])
    assert process.limit_s == 60.0


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
    timed = {name: rounds.Timed(9.0, took, []) for name, took in seconds.items()}

    figures = command.summarise(8, "pfl", timed)

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


HERE = ".".join(map(str, sys.version_info[:2]))


def test_an_interpreter_of_the_first_version_there_is_serves() -> None:
    found = environments.find_python(("2.0", HERE, "2.1"), ())

    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    told = subprocess.run(
        [found, "-c", probe], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == HERE


def test_without_an_interpreter_the_versions_are_named() -> None:
    with pytest.raises(EnvironmentFailure, match=r"Python 2\.0 or 2\.1, found none"):
        environments.find_python(("2.0", "2.1"), ("/no/such/python",))


def test_an_environment_is_made_once_and_again_when_its_needs_change(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def note(given: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(given)
        if "venv" in given:
            pathlib.Path(given[-1]).mkdir(exist_ok=True)
            (pathlib.Path(given[-1]) / "pyvenv.cfg").touch()
        return subprocess.CompletedProcess(given, 0, HERE, "")

    monkeypatch.setattr(environments.subprocess, "run", note)
    monkeypatch.setenv("PATH", "")

    first = Environment("peer", (HERE,), ("one",), ("alone",))
    python = environments.prepare(first, tmp_path, ())
    again = environments.prepare(first, tmp_path, ())
    installs = [line[line.index("install") + 2 :] for line in ran if "install" in line]
    environments.prepare(Environment("peer", (HERE,), ("two",)), tmp_path, ())

    assert python == again == tmp_path / "peer" / "bin" / "python"
    assert installs == [["one"], ["--no-deps", "alone"]]
    assert ran[-1][-1] == "two"


def test_what_does_not_install_is_named_by_its_last_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(given: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "install" in given:
            return subprocess.CompletedProcess(given, 1, "", "noise\nERROR: gone\n\n")
        return subprocess.CompletedProcess(given, 0, HERE, "")

    monkeypatch.setattr(environments.subprocess, "run", fail)

    with pytest.raises(EnvironmentFailure, match=r"^ERROR: gone$"):
        environments.prepare(Environment("peer", (HERE,), ("x",)), tmp_path, ())


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "thesis.txt").write_text("years of work")

    with pytest.raises(EnvironmentFailure, match="choose another --cache"):
        environments.prepare(Environment("peer", (HERE,), ()), tmp_path, ())

    assert (tmp_path / "peer" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("text", "last"),
    [("a\nb\n", "b"), ("a\n \n", "a"), ("", "it said nothing")],
    ids=["last", "empty lines", "nothing"],
)
def test_last_line(text: str, last: str) -> None:
    assert environments.last_line(text) == last


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
