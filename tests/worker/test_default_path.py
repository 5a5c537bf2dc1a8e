"""The documented executors run every round, with the settings that nobody changed."""

import collections
import os
import pathlib

import pytest

from tests.fixtures import run_script

ROOT = pathlib.Path(__file__).parents[2]
NUM_SUBROUNDS = 4
"""Two rounds of two subrounds."""

ROUND = """
import json, sys
import federated_language as fl
import numpy as np
import ray_fed
from ray_fed import tensorflow as rtf
from tests import graph_calls

backend = sys.argv[1]
if backend == "local":
    graph_calls.tell_of_subrounds()
    graph_calls.tell_of_graphs()

@rtf.computation(np.float32)
def half(x):
    return x / 2

@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean_of_halves(values):
    return fl.federated_mean(fl.federated_map(half, values))

environment = None
if backend == "ray":
    hook = "tests.graph_calls.in_ray_process"
    environment = {"worker_process_setup_hook": hook}
config = ray_fed.Config(
    backend=backend, workers=1, subrounds=2, runtime_env=environment
)
with ray_fed.init("local" if backend == "ray" else None, config=config) as context:
    results = [float(mean_of_halves(list(map(float, range(40))))) for _ in range(2)]
    report = context.last_report
    print(json.dumps([results, report.kernel_leaves]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["local", pytest.param("ray", marks=pytest.mark.ray)]
)
def test_eager_executors_run_every_graph_and_strategies_every_subround(
    backend: str, tmp_path: pathlib.Path
) -> None:
    calls = tmp_path / "calls"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    results, kernel_leaves = run_script(
        "-c",
        ROUND,
        backend,
        timeout_s=110,
        GRAPH_CALLS_FILE=str(calls),
        PYTHONPATH=os.pathsep.join(paths),
    )

    told = collections.Counter(calls.read_text().splitlines())
    assert results == [9.75, 9.75]
    assert kernel_leaves > 0
    assert told["graph outside"] == 0
    assert told["graph inside"] >= NUM_SUBROUNDS
    # A subround is driven on its worker; on Ray, also in the task that leased it.
    assert told["subround"] == NUM_SUBROUNDS * (2 if backend == "ray" else 1)
