"""A pytest plugin of `.ci/run`: no test twice, no skip that nobody expects, an end in time.

    PYTHONPATH=.ci pytest -p remaining --passed LOG --may-skip REGEX --seconds N

Leaves out the tests that LOG lists as passed (`-rp`). A skip whose reason matches no REGEX fails
the run. After N seconds no further test begins; the summary says how many were left out.
"""

import re
import time
from pathlib import Path

import pytest


def passed_in(log: str) -> set[str]:
    """Returns the ids of the tests that a log of pytest with `-rp` lists as passed."""
    return set(re.findall(r"^PASSED (.+)$", log, re.MULTILINE))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("remaining tests")
    group.addoption("--passed", metavar="LOG", help="leaves out the tests that passed there")
    group.addoption("--may-skip", action="append", default=[], metavar="REGEX", help="of a reason")
    group.addoption("--seconds", type=float, metavar="N", help="after which no test begins")


_START = time.monotonic()
_LATE = "no time was left"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("seconds")
    if limit is not None and time.monotonic() - _START > limit:
        pytest.skip(_LATE)


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist report to the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config.getoption("may_skip")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    log = config.getoption("passed")
    if log is None:
        return
    passed = passed_in(Path(log).read_text(encoding="utf-8"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class Skips:
    """Collects the skips of a run; fails it for one that is not expected.

    Attributes:
        expected: patterns of the reasons of skips that are expected.
        unexpected: the other skips, with their reasons.
        late: tests for which no time was left.
    """

    def __init__(self, expected: list[str]):
        self.expected = expected
        self.unexpected: list[str] = []
        self.late: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if reason.endswith(_LATE):
            self.late.append(report.nodeid)
            return
        if not any(re.search(pattern, reason) for pattern in self.expected):
            self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.late:
            terminalreporter.section(f"{len(self.late)} tests were left out: {_LATE}", yellow=True)
            for line in self.late:
                terminalreporter.line(line)
        if self.unexpected:
            terminalreporter.section("skipped, although nothing says that they may be", red=True)
            for line in self.unexpected:
                terminalreporter.line(line)
