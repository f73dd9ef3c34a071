"""`python -m tests.composition`: run compositions on ranks, keep what came of each, and write docs/composition.md."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from tests.helpers.sharing.capture_files import FOLDER
from tests.helpers.sharing.shared_captures import shared_captures

from .cells import Names, outcomes
from .features import BY_NAME, meaning, pairs, triples
from .page import PAGE, key, page, record, results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="features: compositions that have all of these")
    parser.add_argument("--without", nargs="*", default=[], help="features: compositions that have none of these")
    parser.add_argument("--size", type=int, nargs="*", default=[1, 2, 3], help="how many features a composition has")
    parser.add_argument("--kinds", nargs="*", help="compositions that were last so: equal, refused, failed, missing")
    parser.add_argument("--pools", type=int, default=1, help="how many compositions run at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="after these no further composition begins")
    parser.add_argument("--render", action="store_true", help="write the page from the results that are there")
    asked = parser.parse_args()
    known = results()
    if unknown := {*asked.only, *asked.without} - BY_NAME.keys():
        parser.error(f"no features: {', '.join(unknown)}")
    if asked.render:
        PAGE.write_text(page(known), encoding="utf-8")
        return 0
    wanted = [
        n for n in [*pairs(), *triples()] if not meaning(n) and set(asked.only) <= set(n) and len(n) in asked.size
    ]
    wanted = [n for n in wanted if not set(asked.without) & set(n)]
    if asked.kinds:
        wanted = [n for n in wanted if known["cells"].get(key(n), {"kind": "missing"})["kind"] in asked.kinds]
    lock, end = Lock(), time.monotonic() + 60 * asked.minutes

    def some(names_of: list[Names]) -> None:
        for names, found in outcomes(names_of, end):
            with lock:
                record(names, found)
                print(f"{key(names)}: {found['kind']} {found['said']} {found['seconds']} s", flush=True)

    with tempfile.TemporaryDirectory() as captures, shared_captures():
        os.environ[FOLDER] = captures
        with ThreadPoolExecutor(asked.pools) as threads:
            list(threads.map(some, [wanted[i :: asked.pools] for i in range(asked.pools)]))
    cells = results()["cells"]
    spent = [cells[key(n)]["seconds"] for n in wanted if key(n) in cells]
    print(f"{len(spent)} compositions took {sum(spent) / 60:.1f} CPU minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
