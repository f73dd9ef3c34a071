"""What a captured graph cannot say, and is refused before it would be left out in silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import CaptureError, InputError
from autotp.inputs import Inputs

from .messages import line_of

OWN = "autotp.runtime."
HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def refuse_scripted(model: nn.Module) -> None:
    """Refuse modules that are TorchScript, which no export sees through.

    Raises:
        CaptureError: it names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name}, a {module.original_name}," if name else f"the model, a {module.original_name},"
            raise CaptureError(
                f"{where} is TorchScript (torch.jit.script, torch.jit.trace or torch.jit.load), which a capture cannot "
                "look into. Give the module that it was made from, without torch.jit, and load the same state dict; "
                "functions under torch.jit.script may stay."
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
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
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
    for i, x in enumerate(compat.tree_leaves((inputs.args, inputs.kwargs))):
        # Rows of 3 and of 5 tokens have no one size that could be dealt out.
        if isinstance(x, Tensor) and x.is_nested:
            raise CaptureError(f"input {i} is a nested tensor. Pass a padded one, and a mask of what counts.")


@contextmanager
def refuse_hooks() -> Iterator[None]:
    """Within this context a forward may not hook a gradient: the trace would not show it."""

    def refusing(name: str) -> Any:
        own = getattr(Tensor, name)

        def register(self: Tensor, hook: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in ("torch", "autotp"):
                return own(self, hook)
            raise CaptureError(f"the forward hooks a gradient (Tensor.{name}), which a captured graph does not call")

        return mock.patch.object(Tensor, name, register)

    with refusing("register_hook"), refusing("register_post_accumulate_grad_hook"):
        yield


@contextmanager
def refuse_gradients() -> Iterator[None]:
    """Within this context a forward may not take gradients itself: a trace has no backward."""

    def refusing(owner: Any, name: str) -> Any:
        own = getattr(owner, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in ("torch", "autotp"):
                return own(*args, **kwargs)
            raise CaptureError(f"the forward takes a gradient itself ({owner.__name__}.{name}), which no graph has")

        return mock.patch.object(owner, name, refuse)

    with refusing(torch.autograd, "grad"), refusing(torch.autograd, "backward"), refusing(Tensor, "backward"):
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
    """Without the checks of `torch.distributions` on the values of its arguments, which are branches."""
    kind: Any = torch.distributions.Distribution
    with mock.patch.object(kind, "_validate_args", False):
        yield


class HiddenState(CaptureError):
    """The forward reads what an earlier call left in an attribute: no other way to capture it changes that."""


class EarlierValue:
    """Stands in an attribute for what an earlier call left there; `was_read` once the forward does anything with it."""

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
    """Within this context: the plain attributes in which a forward left tensors, one by one or nested.

    They are read as the forward ends, for torch's exporter puts them back.
    """
    stores: Stores = []
    before = [(module, dict(vars(module))) for module in bare.modules()]

    def read(*_: Any) -> None:
        for module, attributes in before:
            for name, value in vars(module).items():
                if value is not attributes.get(name) and any(isinstance(x, Tensor) for x in compat.tree_leaves(value)):
                    stores.append((module, name))

    hook = bare.register_forward_hook(read)
    try:
        yield stores
    finally:
        hook.remove()


def refuse_hidden_state(bare: nn.Module, stores: Stores, forward: Callable[[], Any]) -> None:
    """Refuse a forward that reads what an earlier call left in plain attributes, which a program has no place for.

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
        more = f" and {len(read) - 2} more" if len(read) > 2 else ""
        raise HiddenState(
            f"{type(bare).__name__} keeps what one call leaves for the next in plain attributes of its modules "
            f"({', '.join(read[:2])}{more}): a program of the ranks would begin without it at every call. Where it is "
            "a cache, call without one (use_cache=False); else register it as a buffer, or take it as an argument and "
            "return it (states=)."
        )
