"""What pytest does before and after the tests; their fixtures are in `fixtures`."""

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
    """Load fixtures, and with them TensorFlow and Ray, where tests run.

    That is not in the process that only hands tests to others, which begin after it.
    Tests send SIGINT, also to processes that they start; a shell's `&` has it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_FED_GRAPH_CACHE", "off")  # tests count what is traced
    if not config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process run all that use the session's Ray, and file by file the rest.

    Ray, and pools of workers that each import TensorFlow, are started once then.
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
    """Collect garbage again, but never search what imports and collection made.

    Those are 570,000 objects that live as long as the tests do; searching them takes
    a third of a second each time. Graphs are garbage in cycles, and many; looking for
    it as often as Python does by itself takes a twelfth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Any:
    """Show what a process wrote to its standard error before it failed."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, subprocess.CalledProcessError):
        report.sections.append(("stderr of the process", str(error.stderr)))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Say how many tests used a real Ray."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports(
        "failed"
    )
    count = sum(
        "ray" in report.keywords and report.when == "call" for report in reports
    )
    terminalreporter.write_line(f"{count} tests used a real Ray")
