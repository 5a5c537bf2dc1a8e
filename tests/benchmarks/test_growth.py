"""The benchmark of growth, in its short form."""

import pytest

from tests.fixtures import run_python


@pytest.mark.faults
@pytest.mark.timeout(570)
def test_benchmark_prints_a_table_of_two_nodes() -> None:
    command = "-m benchmarks.growth --part nodes --quick"

    printed = run_python(*command.split(), timeout_s=560, RAY_USAGE_STATS_ENABLED="0")

    names, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
    ]
    (figures,) = [dict(zip(names, row, strict=True)) for row in rows]
    assert (figures["nodes"], figures["workers"], figures["subrounds"]) == ("2",) * 3
    assert figures["coordinators"] == "2"
    numbers = {name: float(cell.replace(",", "")) for name, cell in figures.items()}
    assert 0 < numbers["first_s"] <= numbers["all_s"]
    assert numbers["driver_s"] > 0 < numbers["round_s"]
    assert numbers["broadcast"] >= 4 * (24 * 5 + 5)
    assert numbers["returned"] > 0
    assert all(
        0 < numbers[f"{process}_pss"] <= numbers[f"{process}_rss"]
        for process in ("driver", "worker", "coordinator", "gcs")
    )
