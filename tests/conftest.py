"""What holds for every test: three outcomes, nothing left running, asyncio, repeatable random data."""

import contextlib
import logging
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.not_run import PREFIX

LEFTOVER_GRACE_S = 2.0  #: a test waits for what it stops; this is for a process that is just about to be gone
RUN_ID_VARIABLE = "MINI_ENGINE_TEST_RUN"  #: inherited by every process that a test starts, orphans included

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("ci"), derandomize=False, max_examples=2000, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.option.markexpr == "soak" else "ci")
    # A shell starts `command &` with SIGINT ignored, and Python, and all that a test starts, would go on ignoring it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before torch is imported: tiny tensors gain nothing from a second thread, and lose a hundredfold when the other core is busy.
    # The engine sets its own number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# ── three outcomes ──────────────────────────────────────────────────────────────────────────────────────


def _only_declared_skips(report: Any) -> Any:
    """A skip that not_run() did not make, and an xfail, is a failure: a check must not look passed when it did not run."""
    xfail = getattr(report, "wasxfail", None)
    if report.skipped or xfail is not None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if xfail is not None:
            report.outcome, report.longrepr = "failed", f"xfail is not allowed ({xfail}): mend it, or remove the test"
            del report.wasxfail
        elif reason.startswith(PREFIX):
            report.not_run = reason.removeprefix(PREFIX)
        else:
            report.outcome, report.longrepr = "failed", f"skipped ({reason}): only tests/not_run.py::not_run may leave a check out"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _only_declared_skips((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _only_declared_skips((yield))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    not_run = Counter(report.not_run for report in terminalreporter.stats.get("skipped", []))
    if not_run:
        terminalreporter.section("not run")
    for reason, count in not_run.items():
        terminalreporter.line(f"{PREFIX}{reason} ({count} test{'s' * (count > 1)})")


# ── nothing left running ────────────────────────────────────────────────────────────────────────────────


def _started_by(run_id: str) -> Iterator[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        try:
            ours = process in children or (process.environ().get(RUN_ID_VARIABLE) == run_id and process.pid != os.getpid())
            # a zombie has ended; multiprocessing's own helper ends with us
            if ours and process.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                yield process
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Set up first, hence torn down last: what still runs then was leaked by a test. It is named, ended, and the run fails."""
    run_id = uuid.uuid4().hex
    os.environ[RUN_ID_VARIABLE] = run_id
    yield
    psutil.wait_procs(list(_started_by(run_id)), timeout=LEFTOVER_GRACE_S)
    processes = {}
    for process in _started_by(run_id):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            processes[process.pid] = " ".join(process.cmdline())
            process.kill()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("core-")]
    if processes or threads:
        pytest.fail(f"left running by a test: processes {processes}, threads {threads}", pytrace=False)


# ── shared fixtures ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets up our logger for good, and caplog would hear nothing in the tests after it."""
    logger = logging.getLogger("mini_engine")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """`@pytest.mark.anyio` tests run on asyncio."""
    return "asyncio"
