"""What every test shares: one thread, a fixed seed, the golden files, one pool of workers; marks, and CPU seconds."""

# ruff: noqa: E402 (what is imported comes after what must be set before)

from __future__ import annotations

import difflib
import gc
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

# MKL picks kernels by the machine, and on some the last bit then depends on where operands lie in memory. Tests that
# compare bit by bit need one kernel (Intel: "Conditional Numerical Reproducibility"). Set before torch loads MKL.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Processes that a test starts share two cores with others: threads of OpenMP, and Inductor's own, would only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AUTOTP_VERIFY", "1")  # programs are checked between passes

gc.disable()  # a quarter of what importing takes otherwise; `collect_rarely` begins it again

import torch

from benchmarks.results import WRITTEN
from tests.helpers.house.limits import LIMITS
from tests.helpers.house.slow import NOT_QUICK, NOT_QUICK_FILE, NOT_QUICK_HEAD, SAMPLE, SLOW
from tests.helpers.processes.cpu import collect_rarely, cpu_seconds
from tests.helpers.processes.pool import Pool
from tests.helpers.sharing.capture_files import FOLDER
from tests.helpers.sharing.shared_captures import shared_captures

GOLDEN = Path(__file__).parent / "golden"
LIMIT = LIMITS["CPU seconds of a test without a line in `tests/slow.txt`"]
QUICK = LIMITS["CPU milliseconds of a test of `make quick`"] / 1000
BEGAN = pytest.StashKey[float]()
SPENT = pytest.StashKey["Spent"]()
POOLS: list[Pool] = []  # one, once a test has wanted it
CAPTURES = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="run the golden tests alone and rewrite tests/golden")
    parser.addoption("--go-on", type=Path, metavar="FILE", help="leave out what passed on this code by FILE; add to it")
    parser.addoption("--update-quick", action="store_true", help=f"rewrite {NOT_QUICK_FILE.name} by what tests take")


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER not in os.environ:  # its processes have it from the one that begins
        config.stash[CAPTURES] = tempfile.TemporaryDirectory()
        os.environ[FOLDER] = config.stash[CAPTURES].name
    if config.getoption("--go-on") and not hasattr(config, "workerinput"):  # under xdist reports reach one process
        config.pluginmanager.register(Passed.read(config.getoption("--go-on")))
    config.stash[SPENT] = Spent()
    config.pluginmanager.register(config.stash[SPENT])


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"pool", "interpreter"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
        if item.nodeid in SLOW:
            item.add_marker("slow")
        if item.nodeid in SAMPLE:
            item.add_marker("sample")
        if item.nodeid not in NOT_QUICK and not any(map(item.get_closest_marker, ("ranks", "zoo", "slow"))):
            item.add_marker("quick")
        if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    passed = Passed.read(config.getoption("--go-on"))
    if passed.tests:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed.tests])
        items[:] = [item for item in items if item.nodeid not in passed.tests]
    if config.getoption("--update-golden"):
        others = [item for item in items if "golden" not in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    collect_rarely()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # what libraries report as leaked otherwise
    if CAPTURES in config.stash:
        del os.environ[FOLDER]
        config.stash[CAPTURES].cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The call alone: what fixtures start and make is shared by several tests."""
    item.stash[BEGAN] = cpu_seconds()
    try:
        yield
    finally:
        slow = item.get_closest_marker("slow") is not None
        item.user_properties.append(("cpu", (cpu_seconds() - item.stash[BEGAN], slow)))


class Passed:
    """Tests that passed on this code, which a later run leaves out: a long run goes on where it stopped.

    The commit is the last that changed anything but results and their tables, which measuring commits in between.
    """

    def __init__(self, file: Path | None, commit: str, tests: set[str]) -> None:
        self.file, self.commit, self.tests = file, commit, tests

    @classmethod
    def read(cls, file: Path | None) -> Passed:
        if file is None:
            return cls(None, "", set())
        words = ["git", "log", "-1", "--format=%H", "--", ".", *WRITTEN]
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return cls(file, commit, set(record.get("passed", ())) if record.get("commit") == commit else set())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.file is not None and report.when == "call" and report.passed:
            self.tests.add(report.nodeid)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"commit": self.commit, "passed": sorted(self.tests)}, indent=1)
            self.file.write_text(text + "\n", encoding="utf-8")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.tests:  # all have passed before
            session.exitstatus = pytest.ExitCode.OK


class Spent:
    """CPU seconds by test, and whether it is marked `slow`.

    From the reports: under xdist they reach the process that prints the summary.
    """

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu" and report.when == "call":
                self.tests[report.nodeid] = cast("tuple[float, bool]", value)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    spent = sorted(config.stash[SPENT].tests.items(), key=lambda entry: -entry[1][0])
    if len(spent) > 1:
        terminalreporter.section("slowest by CPU seconds, own and descendants'")
        for name, (seconds, _) in spent[:10]:
            terminalreporter.line(f"{seconds:7.1f}  {name}")
    if config.getoption("--update-quick"):
        # What did not run stays: captures are shared, and without those who paid for them others pay.
        names = {name for name, (seconds, _) in spent if seconds > QUICK}
        names |= NOT_QUICK - config.stash[SPENT].tests.keys()
        text = NOT_QUICK_HEAD + "".join(f"{name}\n" for name in sorted(names))
        NOT_QUICK_FILE.write_text(text, encoding="utf-8")
    faults = [name for name, (seconds, slow) in spent if seconds > LIMIT and not slow]
    if faults:
        terminalreporter.section(f"over {LIMIT:.0f} CPU seconds without the mark `slow` (tests/slow.txt)", yellow=True)
        for name in faults:
            terminalreporter.line(name, yellow=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def sharing() -> Iterator[None]:
    """Equal captures are made once, also for a module's own fixtures; tests of capture itself have none of this."""
    with shared_captures():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text equals tests/golden/name.txt, or becomes it under --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if kept != text:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"golden/{name}.txt", "now", lineterm="")
            pytest.fail("\n".join([*lines, "If the change is meant: make golden, and read the diff."]), pytrace=False)

    return check


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The worker processes, started by the first test of a file that wants them."""
    workers = Pool()
    POOLS.append(workers)
    yield workers
    workers.close()


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Iterator[None]:
    """New workers for each file: groups that one file's tests left on some ranks alone do not meet another's."""
    yield
    for workers in POOLS:
        workers.close()
