"""Errors of capture in words: the user's line, what was tried, and the way out for this kind of error."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import fx, nn

from autotp.errors import CaptureError

HERE = Path(__file__).parents[1]
NOT_THE_USERS = (  # files of torch and numpy, of this library (two folders are links), and generated code
    *(f"{Path(str(library.__file__)).parent}/" for library in (torch, np)),
    f"{HERE}/",
    *(f"{(HERE / room).resolve()}/" for room in ("passes", "cost")),
    "<",
)
STANDARD = f"{sysconfig.get_paths()['stdlib']}/"  # the interpreter's own; installed packages may lie in there

# Kind of error -> what its type, message and the user's line look like, each on a line of its own.
KINDS: dict[str, str] = {
    "value": r"GuardOnDataDependentSymNode|[Dd]ata.dependent|DynamicOutputShape|PendingUnbacked",
    "loop": r"(?s)(GuardOnDataDependentSymNode|[Dd]ata.dependent).*\n\s*(async )?for ",
    "skip": r"(?s)([Dd]ata.dependent).*((Eq|Ne)\(u\d+, 0\).*\n\s*if\b|\n\s*if\b[^\n]*\.any\(\))",
    "index": r"^IndexError",
    "none": r"^(AttributeError|TypeError).*NoneType",
}
# The first row that fits says what to do; it is searched in the same text.
WAYS_OUT: tuple[tuple[str, str], ...] = (
    (
        r"cannot be captured with its own backward",
        "Pass every tensor that it reads as an argument of `apply`, and everything else as a plain number or string; "
        "decide nothing by values; write to none that is read afterwards. Or write it with torch operators whose "
        "derivative is the wanted one: "
        "`x + (f(x) - x).detach()` for a straight-through gradient.",
    ),
    (
        KINDS["loop"],
        "The loop runs as often as the values of a tensor say. Let it run over all indices and mask what does not "
        "count, or compute all of them at once (a batched or grouped matmul).",
    ),
    (
        r"(?s)(GuardOnDataDependentSymNode|[Dd]ata.dependent).*\n\s*(if|elif|while|assert)\b|Eq\(u\d+, 1\)",
        "A Python branch depends on the value of a tensor. Write it with torch.where (both sides are computed), or "
        "pass the decision as an argument (a Python bool): each value is captured by itself.",
    ),
    (
        KINDS["value"],
        "A number or a size depends on the values of a tensor (`x.item()`, `x.tolist()`, `x.nonzero()`, `x[mask]`). "
        "Use torch.where or a mask over the full size, or pass the number as an argument (a Python int): each value "
        "is captured by itself.",
    ),
    (
        r"unhashable type: non-nested SymInt",
        "A number that the values of a tensor tell (`x.sum(1).tolist()`) is looked up, as a key of a dict or an item "
        "of a set that is written out, and a trace does not know it. Compare the numbers (`max(numbers)`, "
        "`len(set(numbers)) > 1`), which is a condition of every call, or pass the number as an argument (a Python "
        "int): each value is captured by itself.",
    ),
    (
        r"Unsupported input type",
        "An argument of the call is an object that no program takes. Pass tensors, numbers, strings, None, containers "
        "of them, and objects that hold tensors in their attributes; leave out what the forward itself does not read, "
        "such as a tokenizer.",
    ),
    (
        KINDS["none"],
        "Under torch.export a default that the model makes for itself is left out. Pass that argument explicitly in "
        "example_inputs and in every call (attention_mask, decoder_attention_mask, position_ids).",
    ),
    (
        r"assigned during export|mutat.*attribute|leaked|side effect",
        "The forward keeps something in an attribute of the module. Register it as a buffer and write to it in place, "
        "or return it as an output.",
    ),
    (
        r"writes to the parameter",
        "A parameter is changed by the optimizer alone. Compute the changed value and use that (`weight.clamp(...)` in "
        "place of `weight.clamp_(...)`), or change the weights before they are sharded; a model that does it once, in "
        "its first call in eval mode, has done it after that call.",
    ),
    (
        r"takes a function, which cannot be split",
        "Use torch.where in place of torch.cond, a loop in place of torch.scan, or shard the submodules around it.",
    ),
    (
        r"takes a gradient itself",
        "Return what it is the gradient of (the energy), and take the gradient outside: "
        "`torch.autograd.grad(sharded(x).sum(), x)`, with x.requires_grad_() in the example inputs too; or write the "
        "derivative with torch operators.",
    ),
    (
        r"hooks a gradient",
        "Change the gradient by a torch.autograd.Function, which is captured with its backward; register hooks that "
        "only look at gradients on the sharded module, after compile.",
    ),
    (
        r"a write that has no gradient",
        "Under no_grad, or through `.detach()`, such a write leaves the gradient as it was, which no operator says. "
        "Write `y = y + (changed - y).detach()`, or change a copy (`y.detach().clone()`).",
    ),
    (
        r"a fake tensor in the exported program constant's list",
        "The forward reads `.data`, which tracing does not see. Use `.detach()`, or `torch.no_grad()` around the line.",
    ),
    (
        r"self-check",
        "The forward depends on something that is no tensor and changes between calls (a counter, Python's random, "
        "the time, a global), or writes to what it should only read. Pass it as an argument, or make it a buffer; "
        "where the difference is meant, check_capture=False skips the comparison.",
    ),
    (
        r"fake kernel|fake impl|Meta.*tensors|meta kernel|NotImplementedError",
        "An operator does not say the shape of its result. Give it one with torch.library.register_fake.",
    ),
    (
        r"numpy|data_ptr|DataPtr",
        "The forward leaves torch for another library. Compute that part with torch operators, or outside the model "
        "and pass the result as an argument.",
    ),
    (
        "",
        "Check first that the model itself runs on these example inputs. If it does, rewrite that line with torch "
        "operators on tensors (torch.where for a branch), or shard the submodule without it.",
    ),
)


def kinds_of(error: Exception) -> set[str]:
    """The kinds of `KINDS` that an error is of."""
    text = _text(error)
    return {kind for kind, pattern in KINDS.items() if re.search(pattern, text)}


def line_of_error(error: Exception) -> tuple[str, int] | None:
    """File and number of the innermost line that is neither torch's, Python's nor ours."""
    frame = _frame(error)
    return None if frame is None else (frame.filename, frame.lineno or 0)


def capture_error(model: nn.Module, failures: list[tuple[str, Exception]], fails: str = "") -> CaptureError:
    """The error for a model that no attempt could capture.

    Args:
        model: it, or its skeleton.
        failures: what was tried, "" for the model as it is, and why it failed; at least one.
        fails: says so where the model itself fails too.
    """
    error = failures[0][1]
    where = _frame(error)
    lines = [f"{type(model).__name__} cannot be captured as one graph: {_first_line(error)}"]
    if where is not None:
        lines += [f"  at {where.filename}:{where.lineno} in {where.name}", f"    {_code(where)}"]
    for name, e in failures[1:]:
        reason = f"{_first_line(e)}{_elsewhere(e, where)}"
        lines.append(f"Tried with {name}: {'the same' if reason == _first_line(error) else reason}")
    text = _text(error)
    way_out = next(advice for pattern, advice in WAYS_OUT if re.search(pattern, text))
    if fails:
        way_out = f"It is not the capture: {fails}. Correct the inputs or the model until it runs on them."
    return CaptureError("\n".join([*lines, way_out]))


def line_of(node: fx.Node) -> str:
    """The user's line that made a node, as `file:line: code`; "" where the export does not tell."""
    places = re.findall(r'File "(.+?)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [place for place in places if the_users(place[0])]
    return "{}:{}: {}".format(*own[-1]) if own else ""


def _text(error: Exception) -> str:
    """Type and message, then the user's line."""
    where = _frame(error)
    return f"{type(error).__name__}: {error}\n{_code(where) if where is not None else ''}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, CaptureError) else f"{type(error).__name__}: {first}"


def _elsewhere(error: Exception, before: traceback.FrameSummary | None) -> str:
    """Where this error is, unless it is at the line that was named before."""
    at = _frame(error)
    same = at is None or (before is not None and (at.filename, at.lineno) == (before.filename, before.lineno))
    return "" if at is None or same else f" (at {at.filename}:{at.lineno}: {_code(at)})"


def _frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line that is neither torch's, Python's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if the_users(f.filename)), None)


def the_users(filename: str) -> bool:
    """Whether a file is neither torch's, Python's nor ours."""
    builtin = filename.startswith(STANDARD) and "site-packages" not in filename
    return not builtin and not filename.startswith(NOT_THE_USERS)


def _code(frame: traceback.FrameSummary) -> str:
    return linecache.getline(frame.filename, frame.lineno or 0).strip()
