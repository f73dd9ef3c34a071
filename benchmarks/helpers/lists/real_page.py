"""The part of docs/models.md on configurations of real size, from real_sizes.json and its causes in benchmarks/."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .library_page import lines

CAUSES = Path(__file__).resolve().parents[2] / "real_sizes_causes.toml"
SECONDS = 60.0  # of CPU that capture and a plan may take
COMPARED = 20.0  # that the comparison may add
REPEATED = 0.75  # of the operators in blocks that occur often: a model of repeated blocks
DEGREES = "2", "4", "8"
HEADINGS = "configuration|parameters, 1e9|capture|plan|comparison|of torch.export|parameters|flops|whole"
Record = Mapping[str, Any]

HEAD = """\
### Real sizes

Well-known configurations, on the meta device, in bfloat16 (DLRM in float32), planned for `h100`:
[benchmarks/real_sizes.toml](../benchmarks/real_sizes.toml) says how each of {listed} is built and called, of which
{count} were run. The triangle attention, ESMFold's trunk, GraphGPS, Graphormer, the two towers and DLRM are [modules
as users write them](../benchmarks/helpers/lists/real_modules.py); the others are their libraries' own. Each was
captured once and planned at three degrees with `check_capture=False`, and in another process captured and compared, as
by default.

{made} CPU seconds, of one process each, on a loaded machine (load averages of {least:.0f} to {most:.0f} on two
cores): an idle one takes less.

- **capture, plan**: CPU seconds of the capture, and of the slowest of the three plans. {within} of {count} take at most
  {seconds:.0f} s for both.
- **comparison**: CPU seconds that it adds to a capture; in brackets where they end without one, as no smaller model of
  its classes could be made and its weights take over 1 GB, or as its calls take too long. {compared} of {count} were
  compared. Of all, {again} take at most as long again as capture and plan, and at most {most_compared:.0f} s.
- **of torch.export**: both seconds over those of `torch.export` of the same model with every size free; a dash where
  that was not run.
- **parameters, flops**: the share of the fullest rank, in percent, at tp=2, 4 and 8. Perfect are 50, 25 and 12.5.
  A dash is a plan that was not ready within the limit of seconds for a configuration.
- **whole**: the largest weight that every rank has whole at tp=8. Where no reason is given, it fits in the 3% of
  parameters that a plan may hold beyond the fewest, and whole is the cheaper.
"""


def real_sizes(results: Mapping[str, Any], made: str, causes: Mapping[str, str] | None = None) -> Iterator[str]:
    """The section; nothing where there are no results.

    Args:
        results: of `python -m benchmarks.lists.real_sizes`. made: with what they were made, in words.
        causes: why something stays whole, by configuration; default those in the file.
    """
    models = results["models"]
    if not models:
        return
    causes = tomllib.loads(CAUSES.read_text()) if causes is None else causes
    loads = [m["load"] for m in models.values()]
    within = sum(seconds(m) <= SECONDS for m in models.values())
    again = sum(added <= min(seconds(m), COMPARED) for m in models.values() if (added := comparison(m)) is not None)
    numbers = {"compared": sum(map(compared, models.values())), "again": again, "most_compared": COMPARED}
    numbers |= {"within": within, "count": len(models), "seconds": SECONDS, "listed": results["listed"]}
    yield HEAD.format(made=made, least=min(loads), most=max(loads), **numbers)
    yield lines([*HEADINGS.split("|")], [_row(name, m, causes) for name, m in models.items()])


def seconds(record: Record) -> float:
    """CPU seconds of the capture and the slowest plan; infinite where something failed."""
    plans = [record.get("tp", {}).get(tp, {}) for tp in DEGREES]
    if "capture" not in record or not all("flops" in plan for plan in plans):
        return float("inf")
    return record["capture"] + max(plan["seconds"] for plan in plans)


def ratio(record: Record) -> float | None:
    """Those seconds over the seconds of `torch.export`; None where that is not known."""
    return seconds(record) / record["export"] if record.get("export") else None


def compared(record: Record) -> bool:
    """Return whether the capture was compared with the model, or a stand-in."""
    return any("was compared with" in note for note in record.get("compared_on", ()))


def comparison(record: Record) -> float | None:
    """CPU seconds that the comparison adds to a capture, or what it took to end without one; None where not tried."""
    return max(record["compared"] - record["capture"], 0.0) if "compared" in record else None


def asked(record: Record) -> float:
    """The ratio that is asked: of a model that is mostly repeated blocks a smaller one."""
    return 1.0 if record["repeated"] >= REPEATED else 2.5


def _row(name: str, record: Record, causes: Mapping[str, str]) -> list[str]:
    if "capture" not in record:
        return [name, *["-"] * 7, f"{record['failed']} {causes.get(name, '')}".strip()]
    plans = [record.get("tp", {}).get(tp, {}) for tp in DEGREES]
    slowest = max((f"{plan['seconds']:.0f}" for plan in plans if "seconds" in plan), key=int, default="-")
    shares = [" ".join(_share(plan, kind) for plan in plans) for kind in ("parameters", "flops")]
    times, added = ratio(record), comparison(record)
    shown = "-" if added is None else f"{added:.0f}" if compared(record) else f"({added:.0f})"
    first = f"{record['weights'] / 1e9:.2f}", f"{record['capture']:.0f}", slowest
    first += shown, f"{times:.2f}" if times else "-"
    return [name, *first, *shares, _whole(plans[-1], causes.get(name, ""))]


def _share(plan: Record, kind: str) -> str:
    return f"{100 * plan[kind]:.1f}" if kind in plan else "-"


def _whole(plan: Record, cause: str) -> str:
    """The largest whole weights at the highest degree, and the cause that was found."""
    if "failed" in plan:
        return plan["failed"]
    weights = ", ".join(plan.get("whole", ())[:1])
    return f"{weights}: {cause}" if cause else weights or "-"
