"""The programs of papers: a few rounds of each on made-up data, and their parts."""

import math
import pathlib

import federated_language as fl
import keras
import numpy as np
import pytest

from benchmarks.papers import (
    dp_fed_avg,
    fed_avg,
    fed_opt,
    flute,
    mnist,
    q_ffl,
    trials,
)
from tests.benchmarks.conftest import NUM_TRAINED
from tests.fixtures import ContextFactory


@pytest.fixture
def plays(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder with a play of twelve speakers."""
    speech = "Now is the winter of our discontent made glorious summer. " * 8
    names = [f"LORD {letter}" for letter in "ABCDEFGHIJKL"]
    text = "\n\n".join(f"{name}.\n{speech}" for name in names)
    (tmp_path / "play.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def _installed(local_contexts: ContextFactory) -> None:
    fl.framework.set_default_context(local_contexts(workers=2))


def test_files_are_read_plain_and_compressed(digits: pathlib.Path) -> None:
    train, test = mnist.load_mnist(digits)

    assert train.x.shape == (NUM_TRAINED, 784)
    assert (train.x.dtype, train.y.dtype) == (np.float32, np.int32)
    assert (train.x.min(), train.x.max()) == (0, 1)
    lines = test.x.reshape(-1, 28, 28).min(axis=2)
    np.testing.assert_array_equal(lines.argmax(axis=1), test.y)
    assert [len(batch["y"]) for batch in test.batch(64)] == [64, 36]


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`train-images-idx3-ubyte`.*--data"):
        mnist.load_mnist(tmp_path)


@pytest.mark.parametrize(
    "change",
    [(b"", -1), (b"\x89PNG", None)],
    ids=["cut short", "another format"],
)
def test_a_damaged_file_is_refused(
    digits: pathlib.Path, tmp_path: pathlib.Path, change: tuple[bytes, int | None]
) -> None:
    start, end = change
    for path in digits.iterdir():
        content = path.read_bytes()
        if path.name == "t10k-labels-idx1-ubyte":
            content = start + content[len(start) : end]
        (tmp_path / path.name).write_bytes(content)

    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte"):
        mnist.load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("accuracies", "rounds"),
    [
        ([0.5, 0.9, 0.8, 0.95, 1.0], 4.4),
        ([0.5, 0.97], 2.0),
        ([0.98], 1.0),
        ([0.5, 0.9], math.inf),
    ],
    ids=["between rounds", "exactly", "at once", "never"],
)
def test_rounds_to_a_target_follow_the_best_so_far(
    accuracies: list[float], rounds: float
) -> None:
    assert trials.count_rounds(accuracies, 0.97) == pytest.approx(rounds)


def test_tables_have_the_columns_of_all_rows() -> None:
    drawn = trials.draw_table([{"a": "1"}, {"a": "2", "b": "3"}])

    assert drawn.splitlines() == ["| a | b |", "| --- | --- |", "| 1 |  |", "| 2 | 3 |"]


def test_clients_own_the_examples_of_their_parts() -> None:
    x, parts = np.arange(12, dtype=np.float32).reshape(6, 2), [[4, 0], [1], [5, 2, 3]]
    owners = trials.find_owners([np.array(part) for part in parts])

    clients = trials.build_clients(owners, x, np.arange(6, dtype=np.int32))

    assert clients.ids == (0, 1, 2)
    found = [[int(row["y"]) for row in clients.read(client)] for client in range(3)]
    assert found == [sorted(part) for part in parts]
    np.testing.assert_array_equal(clients.read(1)[0]["x"], [2.0, 3.0])


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_server_step_is_that_of_algorithm_2(rule: str) -> None:
    generator = np.random.default_rng(0)
    deltas = generator.normal(size=(5, 3))
    optimizer = fed_opt.Adaptive(rule, 0.1, tau=0.01, beta_1=0.8, beta_2=0.7)
    variable = keras.Variable(np.zeros(3, np.float32))
    for delta in deltas:
        optimizer.apply([-delta.astype(np.float32)], [variable])

    x, m, v = np.zeros(3), np.zeros(3), np.zeros(3)
    for delta in deltas:
        m = 0.8 * m + 0.2 * delta
        v = {
            "adagrad": v + delta**2,
            "adam": 0.7 * v + 0.3 * delta**2,
            "yogi": v - 0.3 * delta**2 * np.sign(v - delta**2),
        }[rule]
        x += 0.1 * m / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(variable.numpy(), x, rtol=1e-4)


def test_speakers_say_what_stands_below_their_names() -> None:
    text = """THE TRAGEDY

SCENE I. A heath.

[Thunder.]

First Witch:
When shall we three
meet again?

[Aside]

SECOND WITCH.
When the hurlyburly's done.

FIRST WITCH.
Where the place?
"""

    assert fed_opt.read_speakers(text) == {
        "FIRST WITCH": "When shall we three\nmeet again?\nWhere the place?\n",
        "SECOND WITCH": "When the hurlyburly's done.\n",
    }


def test_windows_are_followed_by_the_next_characters(plays: pathlib.Path) -> None:
    clients = fed_opt.load_clients(plays)

    assert len(clients) == 12
    first, second, *_ = clients.read(clients.ids[0])
    assert (first["x"][:6] + 32).astype(np.uint8).tobytes() == b"Now is"
    np.testing.assert_array_equal(first["y"][:-1], first["x"][1:])
    assert first["y"][-1] == second["x"][0]


def test_a_folder_without_plays_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"such as `HAMLET\.`"):
        fed_opt.load_clients(tmp_path)


@pytest.mark.usefixtures("_installed")
def test_flute_has_a_row_below_those_of_its_readme(digits: pathlib.Path) -> None:
    options = trials.Options(digits, is_quick=True)

    *published, ours = flute.reproduce(options)

    assert [row["seconds"] for row in published] == ["200", "1,814"]
    assert 0 < float(ours["accuracy"].split()[0]) < 100
    assert float(ours["seconds"]) > 0


@pytest.mark.usefixtures("_installed")
def test_fed_avg_has_a_row_for_each_cell_asked_for(
    digits: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = trials.Options(digits, is_quick=True, only="iid/0.1/", runs=tmp_path)

    (row,) = fed_avg.reproduce(options)

    assert (row["division"], row["C"], row["paper"]) == ("iid", "0.1", "87")
    (folder,) = tmp_path.iterdir()
    assert folder.name == "fed_avg-iid-0.1-0.05-quick"


@pytest.mark.parametrize(("division", "most_labels"), [("iid", 10), ("shards", 3)])
def test_fed_avg_divides_all_images(division: str, most_labels: int) -> None:
    labels = np.repeat(np.arange(10), 200)

    parts = fed_avg.divide(labels, division)

    assert [len(part) for part in parts] == [20] * 100
    assert sorted(np.concatenate(parts)) == list(range(2000))
    numbers = [len(np.unique(labels[part])) for part in parts]
    assert min(numbers) <= max(numbers) <= most_labels
    assert (np.median(numbers) > 4) == (division == "iid")


@pytest.mark.usefixtures("_installed")
def test_q_ffl_has_the_spread_over_devices() -> None:
    rows = q_ffl.reproduce(trials.Options(is_quick=True, only="1.0"))

    (row,) = rows
    mean, worst, best = (
        float(row[name].split()[0]) for name in ("mean", "worst tenth", "best tenth")
    )
    assert worst < mean < best


@pytest.mark.usefixtures("_installed")
def test_dp_fed_avg_has_epsilon(digits: pathlib.Path) -> None:
    (row,) = dp_fed_avg.reproduce(trials.Options(digits, is_quick=True, only="/1.0"))

    assert 0 < float(row["epsilon"]) < 10
    assert 0 < float(row["accuracy"].split()[0]) < 100


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_fed_opt_has_a_row_for_a_method(plays: pathlib.Path) -> None:
    (row,) = fed_opt.reproduce(trials.Options(plays, is_quick=True, only="Yogi"))

    assert row["paper"] == "among the best"
    assert 0 <= float(row["accuracy"].split()[0]) <= 100
