"""A table of what was measured on a device: a rewrite is used where it gives the same numbers in less time there.

Both ways of an `Alternative` run on the same random operands, forward and backward. They are compared in value, then
timed in turns, warm. The seconds stand in a file of the user's cache folder, by rewrite, shape class, type and device.
All ranks take one verdict, that of rank 0, and a failure on any.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotp import compat, kernels
from autotp.comm.ranks import Ranks, broadcast, from_all
from autotp.errors import AutoTPError
from autotp.ir.files import read_json
from autotp.kernels.common import triton
from autotp.log import log
from autotp.passes.optimise import Alternative, Value, Verdict
from autotp.proof.differences import relative

Outputs = tuple[Tensor, ...]
Way = Callable[[], Outputs]  # a call without a rewrite, or with it
Clock = Callable[[Callable[[], object]], float]
GAIN = 1.02  # how much faster it must be: a lead of less may be noise
TIMED_SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.2, 5, 50  # of both ways together
COMPILE_SECONDS = 120.0  # of the first call, in which a kernel is compiled
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest value of a result
OTHER_TOLERANCE = 1e-10  # in float64
FORMAT = 2  # of the file
MAX_BYTES = 1 << 22  # of the file
OFF = ("0", "off", "false", "no")
FOLDER = "AUTOTP_CACHE"  # names the folder of the file; "0" keeps none


class Line(NamedTuple):
    """A line of the table: seconds of a call without a rewrite and with it; `fault`: why it must not be used."""

    without: float = 0.0
    with_it: float = 0.0
    fault: str = ""

    @property
    def verdict(self) -> Verdict:
        """Verdict whether it is used."""
        ratio = self.without / max(self.with_it, 1e-12)
        return Verdict(not self.fault and ratio >= GAIN, self.fault or f"{ratio:.2f} of torch's speed")


watcher: ContextVar[Callable[[Alternative, Line, torch.device], None] | None] = ContextVar("watcher", default=None)


@dataclass
class Measures:
    """The judge of a rank's program, which reads the table and extends it.

    Attributes:
        ranks: those that take one verdict.
        device: where both ways run.
        training: whether the backward is measured too.
        path: of the table; None keeps it in this process alone.
        compile: of a function, for what runs through `torch.compile`; None runs it as it is.
        lines: of the table that were asked for.
    """

    ranks: Ranks
    device: torch.device
    training: bool
    path: Path | None
    compile: Callable[[Any], Any] | None = None
    lines: dict[str, Line] = field(default_factory=dict)

    def __call__(self, alternative: Alternative) -> Verdict:
        """Read its line of the table, or measure it. A collective call."""
        kinds = ["trained" * self.training, "compiled" * (self.compile is not None), self._link * alternative.sends]
        key = ", ".join([alternative.key, *filter(None, kinds), device_key(self.device)])
        if key not in self.lines:
            self.lines[key] = self._line(key, alternative)
        line = self.lines[key]
        log.info("%s on %s: %s", alternative.name, self.device, line.verdict.reason)
        if (see := watcher.get()) is not None:
            see(alternative, line, self.device)
        return line.verdict

    def _line(self, key: str, alternative: Alternative) -> Line:
        first = self.ranks.rank == 0
        line = broadcast(self.ranks, read_table(self.path).get(key) if first else None)
        if line is None:
            everyone = self._everyone(self.measure(alternative), alternative.name)
            line = next((x for x in everyone if x.fault), everyone[0])
            if first and self.path is not None:
                write_line(self.path, key, line)
        return line

    @property
    def _link(self) -> str:
        """Link by which the ranks send, which times of conversions depend on beside the device."""
        if self.ranks.group is None:
            return "sent nowhere"
        here = os.environ.get("LOCAL_WORLD_SIZE", "all")
        return f"{dist.get_backend(self.ranks.group)}, {self.ranks.tp} ranks, {here} on a host"

    def _everyone(self, mine: Any, name: str) -> list[Any]:
        return from_all(self.ranks, mine, f"the speed of {name}")

    def measure(self, alternative: Alternative) -> Line:
        """Time both ways; what fails or gives other numbers is a fault, never an error. Collective where they send."""
        forked = [self.device] if self.device.type == "cuda" else []
        with compat.without_modes(), torch.random.fork_rng(forked):
            ways, fault = self._prepared(alternative)
            faults = self._everyone(fault, alternative.name) if alternative.sends else [fault]
            if any(faults):
                return Line(fault=fault or "failed on another rank")
            return self._timed(*ways, sends=alternative.sends)

    def _prepared(self, alternative: Alternative) -> tuple[list[Way], str]:
        """Make calls of both ways, and run each once; return these, and what is wrong with them."""
        try:
            torch.manual_seed(0)
            operands = [self._draw(x, alternative.operands) for x in alternative.operands]
            ways = [self._way(f, operands) for f in (alternative.plain, alternative.ours)]
            expected, began = ways[0](), time.monotonic()
            fault = differs(ways[1](), expected)
            took = time.monotonic() - began
            return ways, fault or (f"its first call took {took:.0f} s" if took > COMPILE_SECONDS else "")
        except Exception as error:  # of Triton, of Inductor, of the device: training goes on without it
            log.warning("%s cannot be used on %s", alternative.name, self.device, exc_info=True)
            return [], f"failed: {type(error).__name__}"

    def _way(self, function: fx.GraphModule, operands: list[Any]) -> Way:
        """Make a call that returns results, and in training the operands' gradients from random ones of the results."""
        run = function if self.compile is None else self.compile(function)
        graded = [x for x in operands if isinstance(x, Tensor) and x.requires_grad]
        grads = []

        def call() -> Outputs:
            with torch.set_grad_enabled(bool(graded)):
                results = run(*operands)
            sums = [x for x in results if x.requires_grad]
            if not sums:
                return tuple(results)
            if not grads:
                draw = torch.Generator(self.device).manual_seed(1)  # another: along operands a norm's gradient is 0
                grads.extend(torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=draw) for x in sums)
            gradients = torch.autograd.grad(sums, graded, grads, allow_unused=True)
            return tuple(map(_detached, (*results, *gradients)))

        return call

    def _timed(self, plain: Way, ours: Way, *, sends: bool) -> Line:
        """Return medians of rounds in which both run, without the rewrite and with it."""
        clock = clock_of(self.device)
        once = clock(plain) + clock(ours)
        if sends:  # as many rounds on every rank
            once = max(self._everyone(once, "a round"))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(TIMED_SECONDS / max(once, 1e-9))))
        times = [(clock(plain), clock(ours)) for _ in range(rounds)]
        return Line(*map(statistics.median, zip(*times, strict=True)))

    def _draw(self, value: Value, among: tuple[Value, ...]) -> Any:
        """Draw a random operand. Integers are below every length of the others, so that they may be indices."""
        if value.shape is None:
            return value.number
        if value.dtype.is_floating_point or value.dtype.is_complex:
            operand = torch.randn(value.shape, dtype=value.dtype, device=self.device)
            return operand.requires_grad_(self.training)
        if value.dtype == torch.bool:
            return torch.rand(value.shape, device=self.device) < 0.5
        lengths = [n for x in among if x.dtype.is_floating_point for n in x.shape or () if n > 1]
        return torch.randint(min(lengths, default=2), value.shape, dtype=value.dtype, device=self.device)


def clock_of(device: torch.device) -> Clock:
    """Make what measures the seconds of one call on a device."""

    def clock(call: Callable[[], object]) -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    return clock


def differs(results: Outputs, expected: Outputs) -> str:
    """Say how far results differ, where that is more than rounding; "" where it is not."""
    if list(map(_form, results)) != list(map(_form, expected)):
        return "differs in shape or type"
    for a, b in zip(results, expected, strict=True):
        error = relative(a, b)
        if error > TOLERANCES.get(a.dtype, OTHER_TOLERANCE):
            return f"differs by {error:.1e} of the largest value"
    return ""


def _form(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _detached(x: Tensor | None) -> Tensor:
    """Take a tensor off its graph; 0 for no gradient."""
    return torch.zeros(()) if x is None else x.detach()


# ---- the file ----------------------------------------------------------------------------------------------------


@functools.cache
def device_key(device: torch.device) -> str:
    """Describe a device by all that its timings depend on: name, driver, torch, Triton, and the kernels' sources."""
    name = device.type
    if device.type == "cuda":
        driver = Path("/sys/module/nvidia/version")  # where Linux shows it
        installed = driver.read_text(encoding="ascii").strip() if driver.exists() else "unknown"
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, driver {installed}"
    sources = b"".join(p.read_bytes() for p in sorted(Path(kernels.__file__).parent.glob("*.py")))
    versions = f"torch {torch.__version__}, triton {getattr(triton, '__version__', None)}"
    return f"{name}, {versions}, kernels {hashlib.sha256(sources).hexdigest()[:16]}"


def path_of() -> Path | None:
    """Return the table's file in the folder that `AUTOTP_CACHE` names, by default the user's; None where it is off."""
    folder = os.environ.get(FOLDER, "").strip()
    if folder.lower() in OFF:
        return None
    if folder.lower() in ("", "1", "on", "true", "yes"):
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autotp")
    return Path(folder).expanduser() / "measured.json"


@functools.cache
def warn_of_cache(folder: str) -> None:
    """Log once that the variable which named a cache of captures and plans is not followed for them."""
    if folder.strip().lower() not in ("", *OFF):
        log.warning(
            "AUTOTP_CACHE=%s keeps no captures and plans, only what kernels measured. For a start without planning "
            "save the plan, plan.save(path), and give it again: autotp.compile(model, plan=autotp.Plan.load(path)).",
            folder,
        )


def read_table(path: Path | None) -> dict[str, Line]:
    """Read the lines of a file; none, with a warning in the log, where it is broken."""
    if path is None or not path.exists():
        return {}
    try:
        data = read_json(path, MAX_BYTES, error=AutoTPError)
        lines = data["lines"] if data["format"] == FORMAT else {}
        return {key: Line(float(x), float(y), str(fault)) for key, (x, y, fault) in lines.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AutoTPError) as error:
        log.warning("%s is not read (%s: %s)", path, type(error).__name__, error)
        return {}


def write_line(path: Path, key: str, line: Line) -> None:
    """Keep a line for later processes; a file that cannot be written is a warning in the log.

    Args:
        path: of the table. key, line: what was measured.
    """
    lines = read_table(path) | {key: line}  # now: other processes write too
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "lines": lines}, file, indent=1)
            os.replace(draft, path)
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be written (%s): what was measured is measured again next time", path, error)
