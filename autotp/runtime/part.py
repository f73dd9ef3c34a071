"""The modules of a sharded module's tree, each an instance of the class of the original's module that it stands for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autotp.capture.copies import plain_class
from autotp.errors import StateError
from autotp.inputs import Args, Kwargs
from autotp.ir.graph import Function
from autotp.runtime.generation.generate_methods import while_generating
from autotp.runtime.interop.methods import ABSENT, AbsentError, in_place_of, on_whole_weights
from autotp.runtime.interop.ownership import DDP, SET, Refused

from .changes import TORCHS, Changes, Watched, foreign
from .data_parallel import refuse_another
from .module_hooks import Boundary, after_forward, before_forward, is_own, note, on_backward
from .revision import TABLES, Revision, count_writes, counted
from .storage import Storage


class Part(nn.Module):
    """Module that stands for one of the original: it holds that one's parameters and runs its part of the program.

    Attributes of the original's module are read from its skeleton; one that is set stays on the part, and makes the
    next call a new kind of call (`autotp.runtime.changes`).
    """

    _watched: Watched | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance without the original's own `__new__`."""
        return object.__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: the original's classes may keep a register of what derives from them."""

    def __init__(self, original: nn.Module) -> None:
        nn.Module.__init__(self)  # never the original's
        count_writes(self, TABLES)
        self._original = type(original).__name__
        self._detail = original.extra_repr()
        self._leaf = "" if original._modules else repr(original)
        self._programs: dict[Any, Function] = {}
        self._boundaries: dict[Any, Boundary] = {}  # what hooks see of a call
        self._calls_made: dict[Any, Boundary] = {}  # likewise hooks on the backward, of those that may be to come
        self._backward_ran = False
        self._storages: dict[str, Storage] = {}  # how its parameters are held, by the original's names of them
        self._due = False  # what stands in its place is to call it with a program
        self._alone = False  # it is called by itself, perhaps by what stands in its place
        self.training = original.training

    def __call__(self, *args: Any, program: Any = None, **kwargs: Any) -> Any:
        """Call as torch does, whatever the original's class does in its own, which the program holds."""
        if program is None:
            return self.forward(*args, **kwargs)  # the hooks are called there
        self.__dict__["_due"] = False
        return nn.Module.__call__(self, *args, program=program, **kwargs)

    __getstate__: Any = object.__getstate__  # likewise what it does to copies
    __setstate__ = nn.Module.__setstate__

    def forward(self, *args: Any, program: Any = None, **kwargs: Any) -> Any:
        """Run this part of `program`, called by the parent part with the values that flow in.

        Without a program it is called by itself, as the original's module is: whole values, on every rank the same.
        """
        if program is None:
            if self._due:
                raise StateError(
                    f"what stands in the place of this {self._original} called it without the keyword arguments that "
                    "it was given itself. Hand on both: def forward(self, *args, **kwargs): return self.layer(*args, "
                    "**kwargs)."
                )
            return self._by_itself(args, kwargs)  # pyright: ignore[reportCallIssue]
        if self._backward_hooks or self._backward_pre_hooks:
            note(self, program)
        return self._programs[program](*args)

    @torch.compiler.disable  # a function that is compiled around it goes on after it
    def _by_itself(self, args: Args, kwargs: Kwargs) -> Any:
        watched: Any = self._watched
        if type(watched.module).forward is nn.Module.forward:  # a list of modules: torch's own error
            return nn.Module.forward(self, *args, **kwargs)
        if watched.changes.whole is None:
            raise StateError(f"this {self._original} is a copy of one part of a sharded module. Copy the whole.")
        self.__dict__["_alone"] = True
        try:
            return watched.changes.whole.by_itself(watched.path, args, kwargs)
        finally:
            self.__dict__["_alone"] = False

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def register_forward_pre_hook(self, hook: Any, *, prepend: bool = False, with_kwargs: bool = False) -> Any:
        """Register as torch does; the hook sees whole values, as on the original."""
        watched = self._watched
        if not is_own(hook):
            hook, with_kwargs = before_forward(hook, with_kwargs), True
        elif watched is not None and watched.changes.whole is not None:
            refuse_another(watched.changes.whole._shards, hook)
        return nn.Module.register_forward_pre_hook(self, hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self, hook: Any, *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> Any:
        """Register as torch does; the hook sees whole values, as on the original."""
        if not is_own(hook):
            hook, with_kwargs = after_forward(hook, with_kwargs), True
        return nn.Module.register_forward_hook(
            self, hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register as torch does; the hook sees gradients of whole values, as on the original."""
        return nn.Module.register_full_backward_hook(self, hook if is_own(hook) else on_backward(hook), prepend)

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register as torch does; the hook sees gradients of whole values, as on the original."""
        return nn.Module.register_full_backward_pre_hook(self, hook if is_own(hook) else on_backward(hook), prepend)

    # ---- attributes, children and parameters -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        watched = self._watched
        if watched is not None and name in watched.module.__dict__:
            return watched.read(self, name)
        try:
            return nn.Module.__getattr__(self, name)  # before the original's own, which may ask for more
        except AttributeError:
            advice = "" if watched is None else watched.in_parts(self, name)
            if advice := ABSENT.get(name, advice).format(name=name):
                raise AbsentError(advice) from None
            lookup: Any = getattr(super(), "__getattr__")  # noqa: B009
            if watched is None or name in watched.children or lookup.__func__ is nn.Module.__getattr__:
                raise
        return lookup(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SET:
            raise StateError(SET[name])
        Revision.number += 1
        watched = self._watched
        if watched is not None:
            watched.set(self, name, value)
        if name in TABLES:
            value = counted(value)
        nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        Revision.number += 1
        watched = self._watched
        if watched is not None:
            watched.delete(self, name)
        nn.Module.__delattr__(self, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add as torch does; another module in the place of one of the original's is refused."""
        watched = self._watched
        if watched is not None:
            watched.place(self, name, module)
        nn.Module.add_module(self, name, module)

    # ---- what it looks like ----------------------------------------------------------------------------------------

    _ddp_params_and_buffers_to_ignore = Refused(DDP)

    def __dir__(self) -> list[str]:
        kind = type(self)
        return [n for n in nn.Module.__dir__(self) if not isinstance(inspect.getattr_static(kind, n, None), Refused)]

    def extra_repr(self) -> str:
        """Return the original's."""
        return self._detail

    def __repr__(self) -> str:
        return self._leaf or super().__repr__()


class Standing(type):
    """Metaclass of parts. Calling one's class (`type(layer)(8, 8)`, `Embedding.from_pretrained`) makes an original."""

    _class: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original's class."""
        return cls._class(*args, **kwargs)


@functools.lru_cache(1024)
def class_of(original: type[nn.Module], kind: type[Part] = Part, forward_class: type[nn.Module] | None = None) -> Any:
    """Return the class of what stands for modules of a class: a kind of `Part` and one of these.

    The kind alone where the class allows no subclass.

    Args:
        original: the class. kind: `Part`, or a class of whole sharded modules.
        forward_class: the class whose forward says the arguments; None for a part, which is called with values.
    """
    meta_of = type(original)
    meta = Standing if issubclass(Standing, meta_of) else type("Standing", (Standing, meta_of), {})
    instead = on_whole_weights(original) | in_place_of(original) | while_generating(original)
    body = {n: function for n, function in instead.items() if kind is Part or not hasattr(kind, n)}
    body |= {n: getattr(original, n) for n in ("__module__", "__qualname__")} | {"_class": original}
    body["__doc__"] = original.__doc__ if kind is Part else kind.__doc__
    if forward_class is not None or while_generating(original):

        @functools.wraps((forward_class or original).forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return kind.forward(self, *args, **kwargs)

        body["forward"] = forward
    try:
        return meta(original.__name__, (kind, original), body)
    except TypeError:
        return kind


def whole_class(model: nn.Module, kind: type[Part]) -> Any:
    """Return the class of a sharded module: of a kind of these, and of the original's, with its forward's arguments."""
    if isinstance(model, torch.jit.ScriptModule):
        return kind
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    # PEFT's may take anything, and pass it on to the base model.
    anything = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    base: Any = getattr(model, "get_base_model", None) if anything else None
    return class_of(plain_class(type(model)), kind, type(base()) if callable(base) else type(model))


def part_of(module: nn.Module) -> Part:
    """Make what stands for a module of the original."""
    cls = class_of(plain_class(type(module))) if not isinstance(module, torch.jit.ScriptModule) else Part
    part = cls.__new__(cls)
    Part.__init__(part, module)
    return part


def watch(parts: Mapping[str, nn.Module], bare: nn.Module, changes: Changes) -> Changes:
    """Let every part record in `changes`, which is returned, what is set on it.

    Args:
        parts: the parts by the original's paths of modules.
        bare: the original's skeleton.
        changes: of the whole module; what its parts have noted already counts on.
    """
    changes.whole = parts[""]
    for path, module in bare.named_modules(remove_duplicate=False):
        part = parts[path]
        if isinstance(part, Part) and ((before := part._watched) is None or before.changes is not changes):
            watched = part.__dict__["_watched"] = Watched(module, path, changes, part._modules)  # type: ignore[arg-type]
            watched.versions |= before.versions if before is not None else {}
            for name in module.__dict__.keys() - TORCHS:
                if name in part.__dict__:  # such as the config
                    watched.lend(name, part.__dict__[name])
                _uncover(type(part), name)
    return changes


class Own:
    """Attribute of which the original's class has one value and its instances another: the instance's.

    Read when it is asked for: what is read is compared before every call.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __get__(self, part: Any, owner: Any = None) -> Any:
        watched = None if part is None else part._watched
        return watched.read(part, self.name) if watched and self.name in watched.module.__dict__ else self.value


def _uncover(kind: type[nn.Module], name: str) -> None:
    """Let the class of parts show what an instance has, where Python would find the value of the original's class."""
    if "_class" in vars(kind) and name not in nn.Module.__dict__ and hasattr(kind, name):
        covers = getattr(kind, name)
        if not callable(covers) and not hasattr(type(covers), "__get__"):
            setattr(kind, name, Own(name, covers))


def standing_for(part: Part, module: nn.Module) -> nn.Module:
    """Return the module that is called in the part's place, where it is that part or wraps it.

    Raises:
        StateError: it would take shards for whole tensors.
    """
    if reason := foreign(part, module):
        raise StateError(f"in the place of {part._original}: {reason}")
    return module
