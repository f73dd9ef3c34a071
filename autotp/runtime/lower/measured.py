"""What claims to be faster, measured: it is used where it gives the same numbers in less time on this very device.

Both ways of an `Alternative` run on the same random operands, forward and backward. They are compared in value, then
timed in turns, warm. All ranks take one verdict, that of the rank which gains least, and keep it in a file
(`autotp.runtime.lower.verdicts`).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotp import compat
from autotp.comm.ranks import Ranks, from_all
from autotp.log import log
from autotp.passes.optimise import Alternative, Verdict
from autotp.passes.optimise.alternatives import Value

from .verdicts import Speed, Verdicts

Outputs = tuple[Tensor, ...]
Clock = Callable[[Callable[[], object]], float]
GAIN = 1.02  # how much faster it must be: a lead of less may be noise
LIMIT, LEAST, MOST = 0.2, 5, 50  # seconds for both ways together, and rounds
PATIENCE = 120.0  # seconds for the first call, in which a kernel is compiled
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest value of a result
EXACT = 1e-10  # in float64


def clock_of(device: torch.device) -> Clock:
    """What measures the seconds of one call on a device."""
    if device.type != "cuda":

        def on_cpu(call: Callable[[], object]) -> float:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        return on_cpu

    def on_device(call: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    return on_device


class Watcher(NamedTuple):
    """Who follows the measuring: `verdict` is called with each, and `ahead` with how many more are to come."""

    verdict: Callable[[Alternative, Verdict, torch.device], None]
    ahead: Callable[[int], None] = lambda count: None


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within this context every verdict is told, as soon as it is there."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@dataclass
class Measures:
    """The judge of a rank's program.

    Attributes:
        ranks: those that take one verdict; None in one plain process.
        device: where both ways run.
        training: whether the backward is measured too.
        verdicts: what was measured before.
        compile: of a function, for what runs through `torch.compile`; None runs it as it is.
        clock: seconds of a call; by default of the device.
    """

    ranks: Ranks | None
    device: torch.device
    training: bool
    verdicts: Verdicts
    compile: Callable[[Any], Any] | None = None
    clock: Clock | None = None
    speeds: dict[str, Speed] = field(default_factory=dict)

    def __call__(self, alternative: Alternative) -> Verdict:
        """Measure where some rank has not yet, and agree. A collective call."""
        parts = [alternative.key, "trained" * self.training, "compiled" * (self.compile is not None)]
        parts += [self._link] if alternative.sends else []
        key = " ".join(filter(None, parts))
        speed = self.speeds.get(key) or self.verdicts.read(key)
        if any(x is None for x in self._everyone(speed, alternative.name)):
            speed = self.measure(alternative)
            self.verdicts.write(key, speed)
        assert speed is not None
        self.speeds[key] = speed
        worst = min(self._everyone(speed, alternative.name), key=lambda x: (not x.fault, x.ratio))
        verdict = Verdict(not worst.fault and worst.ratio >= GAIN, worst.text)
        log.info("%s on %s: %s", alternative.name, self.device, verdict.why)
        if (watcher := _watcher.get()) is not None:
            watcher.verdict(alternative, verdict, self.device)
        return verdict

    def ahead(self, count: int) -> None:
        """So many are about to come."""
        if (watcher := _watcher.get()) is not None:
            watcher.ahead(count)

    @property
    def _link(self) -> str:
        """How the ranks send: what times of conversions depend on beside the device."""
        if self.ranks is None:
            return "nothing"
        hosts = len(set(from_all(self.ranks, socket.gethostname(), "where the ranks are")))
        return f"{dist.get_backend(self.ranks.group)}, {self.ranks.tp} ranks on {hosts} hosts"

    def _everyone(self, mine: Any, name: str) -> list[Any]:
        return [mine] if self.ranks is None else from_all(self.ranks, mine, f"the speed of {name}")

    def measure(self, alternative: Alternative) -> Speed:
        """What fails or gives other numbers is a fault, never an error. A collective call where both ways send."""
        forked = [self.device] if self.device.type == "cuda" else []
        with compat.without_modes(), torch.random.fork_rng(forked):
            ways, fault = self._prepared(alternative)
            faults = self._everyone(fault, alternative.name) if alternative.sends else [fault]
            if any(faults):
                return Speed(0.0, fault or "failed on another rank")
            return Speed(self._ratio(*ways, sends=alternative.sends))

    def _prepared(self, alternative: Alternative) -> tuple[list[Callable[[], Outputs]], str]:
        """Calls of both ways, which ran once; and what is wrong with them."""
        try:
            torch.manual_seed(0)
            operands = [self._draw(x, alternative.operands) for x in alternative.operands]
            ways = [self._way(f, operands) for f in (alternative.plain, alternative.other)]
            expected, began = ways[0](), time.monotonic()
            fault = differs(ways[1](), expected)
            took = time.monotonic() - began
            return ways, fault or (f"its first call took {took:.0f} s" if took > PATIENCE else "")
        except Exception as error:  # of Triton, of Inductor, of the device: training goes on without it
            log.warning("%s cannot be used on %s", alternative.name, self.device, exc_info=True)
            return [], f"failed: {type(error).__name__}"

    def _way(self, function: fx.GraphModule, operands: list[Any]) -> Callable[[], Outputs]:
        """A call: results, and in training the gradients of operands from random gradients of the results."""
        run = function if self.compile is None else self.compile(function)
        graded = [x for x in operands if self.training and isinstance(x, Tensor) and x.requires_grad]
        grads: list[Tensor] = []

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

    def _ratio(self, plain: Callable[[], Outputs], other: Callable[[], Outputs], *, sends: bool) -> float:
        """How many times as long the plain way takes: medians of rounds in which both run."""
        clock = self.clock or clock_of(self.device)
        once = clock(plain) + clock(other)
        if sends:  # as many rounds on every rank
            once = max(self._everyone(once, "a round"))
        rounds = max(LEAST, min(MOST, int(LIMIT / max(once, 1e-9))))
        times = [(clock(plain), clock(other)) for _ in range(rounds)]
        theirs, ours = map(statistics.median, zip(*times, strict=True))
        return theirs / max(ours, 1e-12)

    def _draw(self, value: Value, among: tuple[Value, ...]) -> Any:
        """A random operand. Whole numbers are below every length of the others, so that they may be indices."""
        if value.shape is None:
            return value.number
        if value.dtype.is_floating_point or value.dtype.is_complex:
            operand = torch.randn(value.shape, dtype=value.dtype, device=self.device)
            return operand.requires_grad_(value.graded)
        if value.dtype == torch.bool:
            return torch.rand(value.shape, device=self.device) < 0.5
        lengths = [n for x in among if x.dtype.is_floating_point for n in x.shape or () if n > 1]
        return torch.randint(min(lengths, default=2), value.shape, dtype=value.dtype, device=self.device)


def differs(results: Outputs, expected: Outputs) -> str:
    """How far results are apart, where that is more than rounding; "" where it is not."""
    if list(map(_form, results)) != list(map(_form, expected)):
        return "differs in shape or type"
    for a, b in zip(results, expected, strict=True):
        apart = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30) if a.numel() else 0.0
        if not float(apart) <= CLOSE.get(a.dtype, EXACT):  # nan too
            return f"differs by {float(apart):.1e} of the largest value"
    return ""


def _form(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _detached(x: Tensor | None) -> Tensor:
    """Without its graph; 0 for no gradient."""
    return torch.zeros(()) if x is None else x.detach()
