"""Hooks of pytest for all tests. The module `fixtures` has the fixtures."""

import functools
import gc
import os
import pathlib
import re
import signal
import subprocess
from typing import Any

import hypothesis
import pytest
from typing_extensions import override

gc.disable()  # until pytest_collection_finish below

hypothesis.settings.register_profile("ray_fed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ray_fed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, and with them TensorFlow and Ray, in processes that run tests.

    The main process of pytest-xdist runs no tests, so it does not load the fixtures.
    """
    # Some tests send SIGINT. A shell that starts pytest with `&` ignores this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_FED_GRAPH_CACHE", "off")  # tests count traces
    if not config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests that use the session's Ray in one process, the others by file.

    So Ray and the pools of workers, which import TensorFlow, start only once.
    """
    from xdist.scheduler import LoadFileScheduling

    class RayInOneProcess(LoadFileScheduling):
        @override
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if _uses_ray(config.rootpath / file) else file

    return RayInOneProcess(config, log)


@functools.cache
def _uses_ray(file: pathlib.Path) -> bool:
    fixtures = r"\bray_(cluster|contexts|executors|memory)\b"
    return re.search(fixtures, file.read_text(encoding="utf-8")) is not None


def pytest_collection_finish() -> None:
    """Turn garbage collection on again, without the objects that exist now.

    Imports and the collection of tests make 570,000 objects that live as long as the
    tests. A search of these objects takes a third of a second. TensorFlow's graphs are
    reference cycles, and Python's usual thresholds would take a twelfth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Any:
    """Add the standard error of a failed subprocess to the report of its test."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, subprocess.CalledProcessError):
        report.sections.append(("stderr of the process", str(error.stderr)))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Print the number of tests that used a real Ray."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports(
        "failed"
    )
    count = sum(
        "ray" in report.keywords and report.when == "call" for report in reports
    )
    terminalreporter.write_line(f"{count} tests used a real Ray")
