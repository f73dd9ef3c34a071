"""`autotp doctor`: facts of this machine, the parts that autotp would use, and those that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotp.cost import Cluster
from autotp.plans.show.terminal import Line, Sheet, Table

from .command import FINE, NO
from .screen import Screen

DEFAULT = "h100"  # what autotp.plan prices for where nothing says otherwise


def doctor(screen: Screen) -> int:
    """Say what this machine has, and what is missing.

    Devices, links and versions, and what autotp would use of them.
    """
    with screen.working("looking around"):
        from .facts import gather  # noqa: PLC0415  it needs torch

        facts = gather()
    facts |= {"uses": uses(facts), "missing": list(missing(facts))}
    screen.result(_page(facts), lambda: facts)
    required = [m for m in facts["missing"] if m["required"]]
    return NO if required else FINE


def uses(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the devices and ranks that `autotp.compile` and the commands would take on this machine.

    Args:
        facts: as `gather` gives them.
    """
    *cuda, processor = facts["devices"]
    devices, ranks = cuda or [processor], len(cuda) or max(1, processor["cores"] or 1)
    backend = "nccl" if cuda else "gloo"
    presets = [d["preset"] or "" for d in devices]
    names = presets if len({*presets}) > 1 else presets[:1]
    here = ",".join(names) if all(names) else None
    return {
        "device": devices[0]["name"],
        "backend": backend if backend in facts["links"]["backends"] else None,
        "ranks": ranks,
        "launch": f"torchrun --nproc-per-node {ranks} your_script.py",
        "cluster": DEFAULT,
        "here": here,
        "ratio": Cluster.resolve(here).ratio("bfloat16") if here else (),
    }


def missing(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each missing part, and its use; `required` where autotp does not work without it.

    Args:
        facts: as `gather` gives them, with `uses`.
    """

    def lack(what: str, use: str, required: bool = False) -> dict[str, Any]:
        return {"what": what, "why": use, "required": required}

    # Only what `gather` looks up: of jinja2 and safetensors it asks no version, and they would be said to be missing.
    versions, links = facts["versions"], facts["links"]
    for package, least in facts["needs"].items():
        have = versions.get(package)
        if package in versions and (have is None or _older(have, least)):
            yield lack(f"{package}>={least}".removesuffix(">="), f"autotp needs it; here is {have or 'none'}", True)
    # A library of the user's: models of his own are compiled without it.
    if versions["transformers"] is None:
        yield lack("transformers", "a config.json is no model without it; package.module:factory works")
    # Each kind of ranks has its own collectives. A build for processors has no NCCL, and where there are no CUDA
    # devices nothing asks for it; nor does a machine with devices ask for gloo.
    *cuda, _ = facts["devices"]
    if not cuda:
        yield lack("a CUDA device", "ranks run as gloo processes on the processor: right, but slow")
    elif "nccl" not in links["backends"]:
        yield lack("NCCL", "this build of torch has no collectives for CUDA devices", True)
    if not cuda and "gloo" not in links["backends"]:
        yield lack("gloo", "this build of torch has no collectives for the processor", True)
    # On a processor the kernels are not used, so nothing is lost without Triton.
    if cuda and versions.get("triton") is None:
        yield lack("triton", "autotp's kernels run as plain PyTorch without it")
    if len(cuda) == 1:
        yield lack("a second CUDA device", "one rank holds the whole model; plan and verify need no devices")
    # One device has no pairs: 0 of 0 is no lack.
    if links["peers"] < links["pairs"]:
        yield lack("peer access", f"{links['pairs'] - links['peers']} of {links['pairs']} pairs go through the host")
    if uses(facts)["here"] is None:
        yield lack("a preset for this device", "autotp calibrate --out cluster.json measures one")


def _older(have: str, least: str) -> bool:
    """Return whether a version is less than another, by the numbers before the first letter."""

    def numbers(text: str) -> list[int]:
        parts = text.split("+")[0].split(".")
        return [int(p) for p in parts if p.isdecimal()]

    return bool(least) and numbers(have) < numbers(least)


def _page(facts: dict[str, Any]) -> Sheet:
    """Return the facts for people, a table for each question."""
    lacking = []
    for m in facts["missing"]:
        lacking.append((f"required: {m['what']}" if m["required"] else m["what"], m["why"]))
    versions = [(k, v or "not installed") for k, v in facts["versions"].items() if v or k not in ("cuda", "hip")]
    parts: list[Line | Table] = []
    for heading, rows in (
        ("Versions", versions), ("Devices", _devices(facts)), ("Links", _links(facts)),
        ("What autotp would use", _uses(facts)), ("Missing", lacking or [("nothing", "")]),
    ):  # fmt: skip
        cells = [(name.ljust(16), words) for name, words in rows]
        parts += [Line(heading, style="bold"), Table(cells, "ll", indent=2), Line()]
    return Sheet(parts[:-1])


def _devices(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for d in facts["devices"]:
        words = [d["name"], f"{d['memory'] / 2**30:.1f} GiB"]
        if d["kind"] == "cuda":
            words.append(f"capability {d['capability']}")
        else:
            words.append(f"{d['cores']} core{'s' * (d['cores'] != 1)}, {d['threads']} threads")
        yield (f"{d['kind']}:{d['index']}" if d["kind"] == "cuda" else d["kind"]), ", ".join(words)


def _links(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    links = facts["links"]
    yield "backends", ", ".join(links["backends"]) or "none"
    if links["pairs"]:
        yield "between devices", f"{links['peers']} of {links['pairs']} pairs with peer access"
    yield "interfaces", ", ".join(links["interfaces"]) or "none"
    yield "InfiniBand", ", ".join(links["infiniband"]) or "none"
    if facts["torchrun"]:
        yield "torchrun", ", ".join(f"{k}={v}" for k, v in facts["torchrun"].items())


def _uses(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    uses = facts["uses"]
    yield "device", uses["device"]
    yield "collectives", uses["backend"] or "none"
    yield "to run", uses["launch"]
    here = f"--cluster {uses['here']}" if uses["here"] else "--cluster FILE, from autotp calibrate"
    yield "to price", f"{uses['cluster']}; for this machine {here}"
    if len(uses["ratio"]) > 1:
        ratio = ":".join(map(str, uses["ratio"]))
        yield "unlike devices", f"{ratio} by their bfloat16 products; autotp calibrate under torchrun measures each"
