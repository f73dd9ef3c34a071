"""Plan well-known configurations on the meta device; writes results/real_sizes.json and its part of docs/models.md.

python -m benchmarks.lists.real_sizes --folder FOLDER            # those that have no result as new as the code
python -m benchmarks.lists.real_sizes --folder FOLDER --only NAME ...
python -m benchmarks.lists.real_sizes --render                   # the page from the results that are there

`python -m benchmarks.lists.libraries --install FOLDER` installs the packages. Each configuration of real_sizes.toml is
captured once and planned at tp 2, 4 and 8, in a process of its own; compared with its capture in another, and exported.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.helpers import isolate
from benchmarks.helpers.command import made, stamped
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.lists.page import PAGE, load, render
from benchmarks.helpers.lists.real import compare, examine, export, reals
from benchmarks.helpers.lists.real_page import asked, compared, comparison, ratio
from benchmarks.results import fresh

COMMAND, WARM = "benchmarks.lists.real_sizes", "benchmarks.helpers.lists.real"
RESULTS = Path(__file__).parents[1] / "results" / "real_sizes.json"
LIMIT = 600.0  # seconds for one configuration at all degrees


def line(record: Record) -> str:
    """One result, for the terminal."""
    if "failed" in record:
        return f"FAILED {record['failed']}"
    parts = [f"{record['weights'] / 1e9:.2f}e9 capture {record['capture']:.0f} s"]
    for tp, result in record.get("tp", {}).items():
        shares = f"{result['parameters']:.3f} {result['flops']:.3f}" if "flops" in result else result.get("failed")
        parts.append(f"tp={tp} {result['seconds']:.0f} s {shares}")
    if (added := comparison(record)) is not None:
        parts.append(f"comparison {added:.0f} s{'' if compared(record) else ', not compared'}")
    if (times := ratio(record)) is not None:
        parts.append(f"{times:.2f} of torch.export's {record['export']:.1f} s (asked {asked(record)})")
    return "  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="", help="where the packages of other libraries are installed")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these configurations, again")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one configuration")
    parser.add_argument("--render", action="store_true", help="write docs/models.md from the results that are there")
    given = parser.parse_args(arguments)
    results, listed = load(RESULTS.name), reals()
    unknown = set(given.only) - {real.name for real in listed}
    if unknown:
        raise SystemExit(f"not in benchmarks/real_sizes.toml: {', '.join(sorted(unknown))}")
    known = fresh(results["models"], "real-sizes")
    chosen = [r for r in listed if r.name in given.only or (not given.only and r.name not in known)]
    for real in [] if given.render else chosen:
        record, why = isolate.run(examine, real, given.folder, limit=given.limit, preload=WARM)
        record |= {"failed": why} if why and "capture" not in record else {}
        if "capture" in record:
            for function in (compare, export):
                record |= isolate.run(function, real, given.folder, limit=given.limit, preload=WARM)[0]
        results = load(RESULTS.name)  # another process may have written meanwhile
        text = json.dumps(stamped({**record, "load": round(os.getloadavg()[0], 1)}))
        folder = f"{given.folder.rstrip('/')}/"
        results["models"][real.name] = json.loads(text.replace(folder, "") if given.folder else text)
        order = [r.name for r in listed if r.name in results["models"]]
        results["models"] = {name: results["models"][name] for name in order}
        results["listed"] = len(listed)
        results["made"] = {**made(COMMAND, []), "command": f"python -m {COMMAND}"}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{real.name:34} {line(results['models'][real.name])}", flush=True)
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
