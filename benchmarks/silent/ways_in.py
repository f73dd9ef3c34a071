"""The ways in: what each does, in which model, and what may be otherwise in it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import adapters, generating, libraries, saving, training
from .context import Context, Numbers

Options = dict[str, Any]
BESIDE = ("tp", "dp", "cp")
EVERY = (*BESIDE, "pp")


@dataclass(frozen=True)
class WayIn:
    """A call, or a few that belong together, as a user makes them.

    Attributes:
        run: does it, and gives what it gave. model: a kind of `models.py`. training: the mode.
        axes: beside tp, with which it has a meaning; "tp" with none.
        forward, gradient, rate: whether it has a forward, a backward, an optimizer with a learning rate.
        options: of the call, each of which one rank may give. drawn: whether it draws random numbers.
        at: callbacks amid it. uses: how often each is called.
        heard: whether the others hear at once of what one raises.
        changes: whether weights are others afterwards.
        copied: whether modules are copies of one, because its captures take long.
        close: how near numbers are to those of the original, as a part of the largest.
    """

    run: Callable[[Context], Numbers]
    model: str = "llama"
    training: bool = True
    axes: tuple[str, ...] = BESIDE
    forward: bool = True
    gradient: bool = False
    rate: bool = False
    options: tuple[Options, ...] = ()
    drawn: bool = True
    at: tuple[str, ...] = ()
    uses: int = 1
    heard: bool = True
    changes: bool = False
    copied: bool = False
    close: float = 1e-9


def _generates(run: Callable[[Context], Numbers], at: str, drawn: bool = False, **options: Any) -> WayIn:
    """By `generate()`, with an option more."""
    every = ({"max_new_tokens": generating.TOKENS + 1}, options)
    return WayIn(run, training=False, axes=("tp", "dp", "pp"), options=every, drawn=drawn, at=(at,) if at else (),
                 uses=3, copied=True)  # fmt: skip


def _adapts(run: Callable[[Context], Numbers], *options: Options, **more: Any) -> WayIn:
    """With adapters, and a hook in their layer."""
    return WayIn(run, model="adapters", drawn=False, options=options, at=("hook",), copied=True, **more)


def _stateful(run: Callable[[Context], Numbers], *options: Options, **more: Any) -> WayIn:
    """Without a forward."""
    return WayIn(run, forward=False, drawn=False, options=options, **more)


WAYS_IN: dict[str, WayIn] = {
    "forward": WayIn(training.call, axes=EVERY, options=({"logits_to_keep": 1},), at=("hook",)),
    "backward": WayIn(training.backward, axes=EVERY, gradient=True, options=({"scale": 2.0},), at=("hook",)),
    "accumulated backwards": WayIn(training.accumulate, axes=EVERY, gradient=True, options=({"scale": 2.0},)),
    "clipping": WayIn(
        training.clip, axes=EVERY, gradient=True, options=({"max_norm": 0.05}, {"norm_type": 1.0}), changes=True,
    ),
    "optimizer step": WayIn(
        training.step, axes=EVERY, gradient=True, rate=True, options=({"weight_decay": 0.5},), at=("hook",),
        heard=False, changes=True,
    ),
    "step with a closure": WayIn(
        training.closure, gradient=True, rate=True, options=({"max_iter": 3},), at=("closure",), uses=2,
        changes=True,
    ),
    "pipe.step": WayIn(training.pipe_step, axes=("pp",), gradient=True, at=("hook",)),
    "pipe.evaluate": WayIn(training.pipe_evaluate, axes=("pp",), at=("hook",)),
    "generate, greedy": _generates(generating.greedy, "processor", top_k=7),
    "generate, sampled": _generates(generating.sample, "criterion", True, temperature=0.5),
    "generate, beams": _generates(generating.beams, "hook", num_beams=3),
    "generate, drafts": replace(
        _generates(generating.lookup, "processor", prompt_lookup_num_tokens=3), axes=("tp",)  # with dp it is refused
    ),
    "generate, streamed": _generates(generating.stream, "streamer", repetition_penalty=3.0),
    "generate, static cache": _generates(generating.static, "", cache_implementation="dynamic"),
    "full_state_dict": _stateful(training.state, axes=EVERY),
    "full_grad_dict": WayIn(training.gradients, axes=EVERY, gradient=True),
    "state_dict": _stateful(training.parts, axes=EVERY),
    "save_checkpoint": WayIn(
        saving.save, axes=EVERY, gradient=True, rate=True,
        options=({"path": "elsewhere"}, {"step": 2}, {"optimizer": None}, {"format": "huggingface"}), changes=True,
    ),
    "save in background": WayIn(
        saving.save_behind, axes=EVERY, gradient=True, rate=True, options=({"path": "elsewhere"}, {"step": 2}),
        changes=True,
    ),
    "save_pretrained": _stateful(
        saving.save_pretrained, {"path": "elsewhere"}, {"max_shard_size": 2000}, axes=EVERY
    ),
    "load_checkpoint": _stateful(
        saving.load, {"path": "other"}, {"strict": False}, {"cast": True}, axes=EVERY, changes=True
    ),
    "load_state_dict": _stateful(
        saving.load_state, {"path": "other"}, {"strict": False}, axes=EVERY, changes=True
    ),
    "Trainer": WayIn(
        libraries.trainer, axes=("tp", "dp"), gradient=True, rate=True,
        options=({"max_grad_norm": 0.5}, {"seed": 1}, {"path": "elsewhere"}), at=("callback", "collator"), uses=2,
        heard=False, changes=True, close=1e-6,
    ),
    "Accelerator": WayIn(
        libraries.accelerator, axes=("tp", "dp"), gradient=True, rate=True,
        options=({"max_norm": 0.5}, {"accumulate": 2}, {"path": "elsewhere"}), at=("collator",), uses=2, heard=False,
        changes=True, close=1e-4,
    ),
    ".to a type": _stateful(training.convert, {"dtype": torch.bfloat16}, changes=True, close=1e-5),
    "adapter set": _adapts(adapters.select, {"adapter": "default"}),
    "adapters off": _adapts(adapters.switch_off, uses=2),
    "adapters mixed": _adapts(adapters.mix, {"adapters": ["second"] * 4}, training=False, axes=("tp", "cp")),
    "adapters merged": _adapts(adapters.merge, {"merged": ["second"]}, changes=True),
}  # fmt: skip
