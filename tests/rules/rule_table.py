"""Writes docs/rules.md: every operator with a rule, its loops, and that its proof ran.

    python -m tests.rules.rule_table

The proofs are those of tests/rules/cases; nothing is written unless every one of them passes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from autotp import compat
from autotp.ir.graph import short_name
from autotp.ir.op import Rule
from autotp.proof.case import Case, RuleProgram, choices, required
from autotp.proof.rule import prove_program
from autotp.rules.core import function_of, overloads
from autotp.rules.notation import letters, linear, notation
from tests.rules.cases import CASES, program_of

ROOT = Path(__file__).resolve().parents[2]
PAGE, MODELS = ROOT / "docs/rules.md", ROOT / "benchmarks/results/models.json"
RANKS = (2, 3)
WITHOUT = "## Operators without a rule"


@dataclass
class Operator:
    """An operator of the table: the overloads of one packet that have one rule function, and its cases."""

    function: Any
    targets: list[Any]
    cases: list[Case]

    @property
    def name(self) -> str:
        """The packet's name where all its overloads are meant, otherwise each of them."""
        packet = getattr(self.targets[0], "overloadpacket", self.targets[0])
        every = [t for t in overloads(packet) if _counts(t)] if packet is not self.targets[0] else self.targets
        told = [str(packet)] if set(every) <= set(self.targets) else [short_name(t) for t in self.targets]
        return ", ".join(f"`{x.removeprefix('aten.')}`" for x in told)


def _counts(target: Any) -> bool:
    """Whether an overload can be in a captured graph: it takes tensors, or makes one, and no named dimensions."""
    schema = target._schema
    tensors = [a for a in (*schema.arguments, *schema.returns) if "Tensor" in str(a.type)]
    return bool(tensors) and "Dimname" not in str(schema) and not any(a.is_out for a in schema.arguments)


def operators() -> list[Operator]:
    """Every operator with a rule that is entered for it, or that has a case and is pointwise by its tag."""
    found: dict[tuple[str, Any], Operator] = {}
    for case in CASES:
        function = function_of(case.target)
        assert function is not None, case
        found.setdefault((_packet(case.target), function), Operator(function, [], [])).cases.append(case)
    for (name, function), op in found.items():
        packet = cast(Any, op.cases[0].target).overloadpacket
        known = [t for t in overloads(packet) if function_of(t) is function and _counts(t)]
        op.targets = known or [op.cases[0].target]
        assert _packet(op.targets[0]) == name
    return list(found.values())


def _packet(target: Any) -> str:
    return str(target.overloadpacket)


@dataclass
class Row:
    """Operators that share a rule function and what it says of their widest call."""

    loops: str
    summed: str
    through: str
    names: list[str]
    cases: int
    layouts: int


def widest(op: Operator, programs: dict[int, RuleProgram]) -> RuleProgram:
    """The call of an operator that has most loops to split."""

    def width(p: RuleProgram) -> tuple[int, int, int]:
        rule = p.rule or Rule()
        return sum(f.size not in (0, 1) for f in rule.factors), len(rule.linear), len(p.op.ins)

    return max((programs[id(c)] for c in op.cases), key=width)


def tables() -> dict[str, list[Row]]:
    """The rows of each file of rules."""
    programs = {id(c): program_of(c) for c in CASES}
    rows: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
    for op in sorted(operators(), key=lambda x: x.name):
        p = widest(op, programs)
        rule = p.rule or Rule()
        names = zip(letters(rule), rule.factors, strict=True)
        summed = " ".join(dict.fromkeys(x for x, f in names if any(c is None for c in f.outs)))
        told = notation(p.op, rule), summed, linear(p.op, rule)
        module = op.function.__module__
        row = rows[module].setdefault((op.function.__name__, *told), Row(*told, [], 0, 0))
        row.names.append(op.name)
        row.cases += len(op.cases)
        row.layouts += sum(len(choices(programs[id(c)], tp)) for c in op.cases for tp in RANKS)
    return {m: list(rows[m].values()) for m in sorted(rows)}


def proved() -> int:
    """Run every proof; how many layouts were compared.

    Raises:
        RuleError: a rule is wrong. SystemExit: a case leaves a loop unproved.
    """
    count = 0
    for case in CASES:
        p = program_of(case)
        exercised = set[Any]().union(*(prove_program(p, tp) for tp in RANKS))
        if required(p) - exercised:
            sys.exit(f"{case}: never exercised: {required(p) - exercised}")
        count += sum(len(choices(p, tp)) for tp in RANKS)
    return count


def rules_part() -> str:
    """The page up to the operators that have no rule."""
    found = tables()
    rows = [row for each in found.values() for row in each]
    count = sum(len(row.names) for row in rows)
    lines = [
        HEAD.format(
            operators=count,
            cases=len(CASES),
            layouts=sum(r.layouts for r in rows),
            torch=torch.__version__.split("+")[0],
            ranks=" and ".join(map(str, RANKS)),
        )  # fmt: skip
    ]
    for module, each in found.items():
        doc = (importlib.import_module(module).__doc__ or "").splitlines()[0]
        lines += [f"## {doc.removesuffix('.')}", "", f"`{module.replace('.', '/')}.py`", ""]
        lines += ["| operators | loops of a call | summed over | sums pass through | proved |", "| --- " * 5 + "|"]
        lines += [_line(row) for row in sorted(each, key=lambda r: -len(r.names))] + [""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    summed, through = (f"`{x}`" if x else "" for x in (row.summed, row.through))
    proof = f"{row.layouts} layouts of {_plural(row.cases, 'call')}"
    return f"| {' '.join(row.names)} | `{row.loops}` | {summed} | {through} | {proof} |".replace("||", "| |")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def without_part(results: dict[str, Any]) -> str:
    """The operators that measured models have and that have no rule now."""
    found = results.get("operators_without_rule", {})
    lines = [WITHOUT, "", WHOLE.format(models=len(results.get("models", {}))), ""]
    rows = [(name, *seen) for name, seen in found.items() if lacks_rule(name)]
    if not rows:
        return "\n".join([*lines, "None.", ""])
    lines += ["| operator | models | for example |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {count} | {example} |" for name, count, example in sorted(rows, key=lambda r: (-r[1], r[0]))
    ]
    return "\n".join([*lines, ""])


def lacks_rule(name: str) -> bool:
    """Whether an operator (as plans name it) makes tensors and has no rule."""
    found = compat.operator(name)
    targets: Iterable[Any] = overloads(found) if found is not None else ()
    made = [t for t in targets if any("Tensor" in str(r.type) for r in t._schema.returns)]
    named = [t for t in made if short_name(t) == name] or made
    return any(function_of(t) is None for t in named) or found is None


def page() -> str:
    """The whole page."""
    results = json.loads(MODELS.read_text(encoding="utf-8")) if MODELS.exists() else {}
    return f"{rules_part()}\n{without_part(results)}"


def main() -> None:
    """Prove, then write the page."""
    torch.manual_seed(0)
    print(f"{proved()} layouts are right")
    PAGE.write_text(page(), encoding="utf-8")


HEAD = """# Operator rules

Written by `make docs` from the table of rules and its proofs; do not edit. It holds {operators} operators. On torch
{torch} every rule was proved on the calls in `tests/rules/cases`: {cases} calls, laid over {ranks} simulated ranks in
{layouts} ways that the rules allow, forward and backward. `make test` runs the same proofs.

How to read it: a call is shown as an einsum string with a letter for each loop.

- A letter may be split: operands and results that have it are sharded there, operands that lack it are replicated.
- A letter that the results lack is summed over: split, the results are partial sums.
- `_` must stay whole. `(2 a)` holds the loop twice over, `(a 2)` in pairs, `(a b)` both loops, the outer one first.
- `a₀` and `a₁` are pieces of one loop that is cut up; `{{a}}` are rows sorted by loop `a`; `a|b` is one or the other.
- "Sums pass through": with these operands partial (`+`: together, `or`: one of them), the results are partial.

Shown is the call with most loops; what the rule says of others depends on their arguments. Names are those of
`torch.ops.aten` unless they have another namespace. How a rule is written:
[architecture.md](architecture.md#adding-a-rule); for an operator of your own:
[guide.md](guide.md#a-rule-for-your-own-operator).
"""
WHOLE = """These run whole on every rank, which is right and slower, and plans name them. Met in {models} models of the
transformers library by `python -m benchmarks.models`, which writes `benchmarks/results/models.json`; operators that
draw random numbers or write to a buffer run whole too, with or without a rule."""

if __name__ == "__main__":
    main()
