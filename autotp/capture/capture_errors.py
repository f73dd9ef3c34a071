"""Messages of capture errors: the user's line, the attempts, and the way out for this kind of error."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import CaptureError, InputError
from autotp.inputs import Inputs
from autotp.text import failure, first_line

from .copies import tensors_of

HERE = Path(__file__).parents[1]
NOT_THE_USERS = (  # files of torch and numpy, of this library (two folders are links), and generated code
    *(f"{Path(str(library.__file__)).parent}/" for library in (torch, np)),
    f"{HERE}/",
    *(f"{(HERE / room).resolve()}/" for room in ("passes", "cost")),
    "<",
)
STANDARD = f"{sysconfig.get_paths()['stdlib']}/"  # the interpreter's own; installed packages may be in there

# Kind of error -> a pattern of its type, message and the user's line, each on a line of its own.
KINDS: dict[str, str] = {
    "value": r"GuardOnDataDependentSymNode|[Dd]ata.dependent|DynamicOutputShape|PendingUnbacked",
    "loop": r"(?s)(GuardOnDataDependentSymNode|[Dd]ata.dependent).*\n\s*(async )?for ",
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
        r"_ctc_loss",
        "Torch tells no sizes of this loss before it has the values. Return the log-probabilities, and take the loss "
        "of them outside of the module.",
    ),
    (
        r"zeros\(\): argument 'size' failed to unpack|pack_padded_sequence|pad_packed_sequence",
        "How long packed rows are is told by values. Run the layer on the padded rows: what comes after a row's end "
        "changes nothing before it in a layer of one direction; mask it after that. Reverse each row for the other.",
    ),
    (
        KINDS["loop"],
        "The loop runs as often as the values of a tensor say. Let it run over all indices and mask what does not "
        "count, or compute all of them at once (a batched or grouped matmul).",
    ),
    (
        r"(?s)(GuardOnDataDependentSymNode|[Dd]ata.dependent).*\n\s*(if|elif|while|assert)\b|Eq\(u\d+, 1\)",
        "A Python branch depends on the value of a tensor. Write it with torch.where (both sides are computed), or "
        "pass the decision as an argument (a Python bool): each value is captured by itself. A branch that skips what "
        "there is nothing for (an expert without tokens) may be left out where work on no rows adds nothing.",
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
        "of a set, and a trace does not know it. Compare the numbers (`max(numbers) > min(numbers)`), which is a "
        "condition of every call, or pass the number as an argument (a Python int): each value is captured by itself.",
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
    """Return the kinds of `KINDS` that an error is of."""
    text = _text(error)
    return {kind for kind, pattern in KINDS.items() if re.search(pattern, text)}


def line_of_error(error: Exception) -> tuple[str, int] | None:
    """Return file and number of the innermost line that is neither torch's, Python's nor ours."""
    frame = _frame(error)
    return None if frame is None else (frame.filename, frame.lineno or 0)


def capture_error(model: nn.Module, failures: list[tuple[str, Exception]], fails: str) -> CaptureError:
    """Make the error for a model that no attempt could capture.

    Args:
        model: it, or its skeleton.
        failures: names of attempts, "" for the model as it is, with their errors; at least one.
        fails: the failure of the model itself; "" where it runs.
    """
    error = failures[0][1]
    where = _frame(error)
    lines = [f"{type(model).__name__} cannot be captured as one graph: {_first_line(error)}"]
    if where is not None:
        lines += [f"  at {where.filename}:{where.lineno} in {where.name}", f"    {where.line}"]
    for name, e in failures[1:]:
        reason = f"{_first_line(e)}{_elsewhere(e, where)}"
        lines.append(f"Tried with {name}: {'the same' if reason == _first_line(error) else reason}")
    text = _text(error)
    way_out = next(advice for pattern, advice in WAYS_OUT if re.search(pattern, text))
    if fails:
        way_out = f"It is not the capture: {fails.rstrip('.')}. Correct the inputs or the model until it runs on them."
    return CaptureError("\n".join([*lines, way_out]))


def line_of(node: fx.Node) -> str:
    """Return the user's line that made a node, as `file:line: code`; "" where the export does not tell."""
    places = re.findall(r'File "(.+?)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    return next(("{}:{}: {}".format(*place) for place in reversed(places) if the_users(place[0])), "")


def _text(error: Exception) -> str:
    """Return type and message, then the user's line."""
    where = _frame(error)
    return f"{type(error).__name__}: {error}\n{where.line if where is not None else ''}"


def _first_line(error: Exception) -> str:
    return first_line(error) if isinstance(error, CaptureError) else failure(error)


def _elsewhere(error: Exception, before: traceback.FrameSummary | None) -> str:
    """Locate this error, unless it is at the line that was named before."""
    at = _frame(error)
    if at is None or (before is not None and (at.filename, at.lineno) == (before.filename, before.lineno)):
        return ""
    return f" (at {at.filename}:{at.lineno}: {at.line})"


def _frame(error: Exception) -> traceback.FrameSummary | None:
    """Return the innermost line that is neither torch's, Python's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if the_users(f.filename)), None)


def the_users(filename: str) -> bool:
    """Say whether a file is neither torch's, Python's nor ours."""
    builtin = filename.startswith(STANDARD) and "site-packages" not in filename
    return not builtin and not filename.startswith(NOT_THE_USERS)


def running_line() -> traceback.FrameSummary | None:
    """Return the user's line that is running."""
    return next((f for f in reversed(traceback.extract_stack()) if the_users(f.filename)), None)


def library_calls() -> bool:
    """Return whether torch or this library, and no model, calls the function that asks, while a model is traced."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] in ("torch", "autotp")


# ---- refusals --------------------------------------------------------------------------------------------------------

# Refusals of models that a captured graph cannot express, before a part would be left out in silence.

OWN = "autotp.runtime."
HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def refuse_scripted(model: nn.Module) -> None:
    """Refuse modules that are TorchScript, which no export sees through.

    Raises:
        CaptureError: it names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'}, a {module.original_name}, is TorchScript (torch.jit.script, torch.jit.trace "
                "or torch.jit.load), which a capture cannot look into. Give the module that it was made from, without "
                "torch.jit, and load the same state dict; functions under torch.jit.script may stay."
            )


def refuse_unsaid(model: nn.Module, inputs: Inputs) -> None:
    """Refuse weights, inputs and hooks that a graph of plain tensors does not have.

    Raises:
        InputError: the model is sharded already. CaptureError: it names the first one.
    """
    for name, module in model.named_modules():
        # By class, not by its weights: a part of it within another model holds shards too, and these would be taken for
        # wholes.
        if not any(k.__module__.startswith(OWN) for k in type(module).__mro__):
            continue
        what = f"its part {name!r}" if name else "it"
        raise InputError(
            f"the model is sharded already: autotp.compile or parallelize gave {what}. Give the original model."
        )
    for name, p in tensors_of(model).items():
        if nn.parameter.is_lazy(p):
            raise InputError(
                f"{name} has no shape yet: the first call of a lazy module gives it one. Call the model once before."
            )
        # Frozen, a quantised weight is replaced by the tensors in it; trained, its gradient has no place among these.
        if compat.wraps_tensors(p):
            raise CaptureError(
                f"{name} is a {type(p).__name__}, a tensor that wraps others, and it is trained: a graph holds plain "
                "tensors, and its parts cannot be trained in its place. Freeze it by requires_grad_(False), as "
                "quantised weights are, or shard the plain model."
            )
        # `p.register_hook(lambda g: g.clamp(-1, 1))` would be gone without a word, and the training another.
        if any(getattr(p, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise CaptureError(
                f"{name} has a hook on its gradient, which a captured graph does not call. Register it on the sharded "
                "module's parameter, after compile."
            )
    for name, module in model.named_modules():
        # Of a module as well: the graph has its operators, and no module whose backward begins or ends.
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise CaptureError(
                f"{name or 'the model'} has a backward hook, which a captured graph does not call. Register it on the "
                "sharded module, after compile."
            )
    for i, x in enumerate(inputs.leaves):
        # Rows of 3 and of 5 tokens have no common size that could be sharded.
        if isinstance(x, Tensor) and x.is_nested:
            raise CaptureError(f"input {i} is a nested tensor. Pass a padded one, and a mask of what counts.")


HOOKED = "the forward hooks a gradient ({}), which a captured graph does not call"  # the trace would not show it
TAKEN = "the forward takes a gradient itself ({}), which no graph has"  # a trace has no backward
GRADIENTS: tuple[tuple[Any, str, str], ...] = (
    (Tensor, "register_hook", HOOKED),
    (Tensor, "register_post_accumulate_grad_hook", HOOKED),
    (torch.autograd, "grad", TAKEN),
    (torch.autograd, "backward", TAKEN),
    (Tensor, "backward", TAKEN),
)


@contextmanager
def refuse_gradients() -> Iterator[None]:
    """Context in which a forward may neither hook a gradient nor take one itself."""

    def refusing(owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if library_calls():
                return original(*args, **kwargs)
            raise CaptureError(what.format(f"{owner.__name__}.{name}"))

        return mock.patch.object(owner, name, refuse)

    with ExitStack() as stack:
        for row in GRADIENTS:
            stack.enter_context(refusing(*row))
        yield


def refuse_higher_order(graph: fx.Graph) -> None:
    """Refuse operators that take functions, such as torch.cond.

    Raises:
        CaptureError: the graph has one.
    """
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.target, compat.HigherOrderOperator)
            and "wrap_with" not in str(node.target)
        ):
            raise CaptureError(f"{node.target} takes a function, which cannot be split ({line_of(node)})")


@contextmanager
def unvalidated() -> Iterator[None]:
    """Context without the checks of `torch.distributions` on the values of its arguments, which are branches."""
    kind: Any = torch.distributions.Distribution
    with mock.patch.object(kind, "_validate_args", False):
        yield


class HiddenState(CaptureError):
    """Error of a forward that reads the value of an earlier call in an attribute: no other attempt changes that."""


class EarlierValue:
    """Stand-in for the value of an earlier call in an attribute; `was_read` once the forward does anything with it."""

    was_read = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and torch ask any object
            raise AttributeError(name)
        return self._read()

    def _read(self, *others: Any, **options: Any) -> Any:
        self.was_read = True
        raise HiddenState("what an earlier call left is read")

    __torch_function__ = __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __call__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _read
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _read


Stores = list[tuple[nn.Module, str]]  # attributes that a forward sets to tensors


@contextmanager
def attributes_written(bare: nn.Module) -> Iterator[Stores]:
    """Context that collects the plain attributes in which a forward left tensors, one by one or nested.

    They are read as the forward ends, for torch's exporter puts them back.
    """
    stores: Stores = []
    before = [(module, dict(vars(module))) for module in bare.modules()]

    def read(*_: Any) -> None:
        for module, attributes in before:
            for name, value in vars(module).items():
                if value is not attributes.get(name) and any(isinstance(x, Tensor) for x in compat.tree_leaves(value)):
                    stores.append((module, name))

    with bare.register_forward_hook(read):
        yield stores


def refuse_hidden_state(bare: nn.Module, stores: Stores, forward: Callable[[], Any]) -> None:
    """Refuse a forward that reads values of an earlier call in plain attributes, which a program has no place for.

    RecurrentGemma keeps its recurrent states so: without them every decoded token would be computed from zeros.

    Args:
        bare: the model. stores: the attributes in question. forward: runs it once more; it may fail.

    Raises:
        HiddenState: it names the attributes.
    """
    if not stores:
        return
    values = [EarlierValue() for _ in stores]
    # What the stand-ins cause, or whatever else a forward may raise, says nothing by itself.
    with suppress(Exception), ExitStack() as stack:
        for (module, name), value in zip(stores, values, strict=True):
            stack.enter_context(mock.patch.dict(vars(module), {name: value}))
        forward()
    paths = {id(module): path for path, module in bare.named_modules()}
    pairs = zip(stores, values, strict=True)
    read = [f"{paths.get(id(module), '')}.{name}".strip(".") for (module, name), value in pairs if value.was_read]
    if read:
        rest = f" and {len(read) - 2} more" if len(read) > 2 else ""
        raise HiddenState(
            f"{type(bare).__name__} keeps what one call leaves for the next in plain attributes of its modules "
            f"({', '.join(read[:2])}{rest}): a program of the ranks would begin without it at every call. Where it is "
            "a cache, call without one (use_cache=False); else register it as a buffer, or take it as an argument and "
            "return it (states=)."
        )
