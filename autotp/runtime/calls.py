"""Calls of a module, each compared with those of the other ranks before it begins.

Every forward and every backward begins with a turn in which ranks say what they are about to do (`comm/lockstep.py`).
With a forward go the shapes and the mode, which parameters are trained, how often weights were written since the
forward before, a few values of the inputs, and the number from which dropout draws, of which rank 0's is taken by all.
With dp all ranks of both axes take that turn together (`call_message.py`). Batches of an engine, whose sizes follow
from what ranks compared before them, have no turn of their own (`generation/batch_manager.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from autotp.comm.channel import Channel
from autotp.comm.lockstep import CAUSES, end_hooks, lost, meet
from autotp.comm.ranks import Facts, Ranks, agree, broadcast, from_all
from autotp.comm.turn import Turn, hold
from autotp.errors import RankError, StateError
from autotp.inputs import Leaves
from autotp.passes.decompose.counter_random import base_seed
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.interop.ownership import know_virtual

from . import state
from .call_message import (
    NOTHING,
    SAMPLED,
    SEQUENCES,
    CallMessage,
    Groups,
    Ticket,
    compare,
    differ,
    kind_of,
    mode_of,
    parted,
    refuse_generators,
    refuse_samples,
    sampled,
    short,
)
from .changes import Changes
from .data_parallel import follow_types, show_gradients
from .module_hooks import compare_hooks
from .programs import MAX_KINDS, CallKind, Program
from .revision import Inventory, WriteCount
from .storage import ShardState

HOOKS = (
    "hooks on modules, with dp_invariant: what flows there is of several micro-batches in one process. Hook what the "
    "module takes and gives, around it."
)
BACKWARD_HOOKS = (
    "backward hooks on modules, with tp_invariant: what flows there is of several ranks in one process, and torch "
    "calls no hook of it. Hook tensors, in a forward hook on the module."
)
OTHER_LENGTHS = (
    "the dp ranks exchange values of this call that are as long as its inputs (the plan's notes say after which "
    "operators), and were given other lengths. Pad their slices of a batch to one length."
)
COUNT_VALUES = 1 << 32  # of a number that is sent


@dataclass(eq=False)
class Calls:
    """Counter of the calls of one sharded module on this rank.

    Attributes:
        original: the class's name. copy: "copy of " where it is one, which ranks may make alone.
        order: the parts of the module; `changes`: what was set on them.
        values: whether values of the inputs are compared.
        hooked: whether a hook of the user's may fail on some rank in the present call.
        same_sizes: whether inputs have the same sizes on all ranks.
        place: of the module among the rank's sharded ones.
        writes_before: how often weights were written, by the call before, or by a load after it.
        before_gathering: `pieces` of the shards as they are before `fully_shard` gathers them, which the rank keeps;
            `own_count` counts writes to them.
        tied: of pipeline stages, what ranks of several hold; None where there are none.
    """

    shards: ShardState
    original: str
    order: Sequence[Any]
    changes: Changes
    values: bool = True
    copy: str = ""
    place: int = 1
    number: int = 0
    writes_before: int = 0
    hooked: bool = False
    same_sizes: bool = True
    before_gathering: Sequence[tuple[str, Tensor, bool]] = ()
    tied: Any = None
    own_count: WriteCount | None = None

    def __post_init__(self) -> None:
        self.inventory = Inventory(self.order)
        self.shards.counter = self
        if self.shards.host is not None:
            know_virtual(self.shards.root)
        # There from now on, as the other: to make one is a collective that no turn comes before.
        ranks = self.shards.ranks
        wide = ranks, ranks.joint, ranks.place, ranks.every
        channels = [channel for group in wide if group is not None and (channel := group.channel) is not None]
        for channel in channels:  # where a rank fails, who waits for it with other tp groups of this module hears of it
            channel.around.update(other for other in channels if channel.others < other.others)
        if self.channel is not None:
            self.channel.modules += self.copy == ""
            self.place = self.channel.modules

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        """Copy for another module, which begins to count."""
        shards, order, changes = deepcopy((self.shards, self.order, self.changes), memo)
        copy = Calls(shards, self.original, order, changes, self.values, "copy of ")
        copy.place = self.place
        return copy

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks that keep in step: of all axes, or those of tp where all are too many."""
        ranks = self.shards.ranks
        return ranks.planners if ranks.planners.channel is not None else ranks

    @property
    def channel(self) -> Channel | None:
        """The channel by which these ranks keep in step."""
        return self.ranks.channel

    @property
    def tp_channel(self) -> Channel | None:
        """The channel of the tp ranks alone."""
        return self.shards.ranks.channel

    @cached_property
    def groups(self) -> Groups:
        """The ranks of all axes by what they have in common."""
        axis, size = self.shards.axis, self.channel.size if self.channel is not None else 1
        return Groups.of(size, self.shards.tp, axis.cp, axis.dp)

    @property
    def name(self) -> str:
        """The module in words."""
        return f"{self.copy}{self.original}"

    @property
    def what(self) -> str:
        """The present call in words."""
        return f"call {self.number} of {self.name}" + (f" ({self.place})" if self.place > 1 else "")

    def turn(self, what: str = "") -> AbstractContextManager[None]:
        """Return a turn of this process, by default for a call; no turn for one rank alone."""
        channels = [*filter(None, (self.channel, self.tp_channel))]
        what = f"{what} of {self.name}, after call {self.number}" if what else f"call {self.number + 1} of {self.name}"
        return Turn(what, *channels) if channels else contextlib.nullcontext()

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Compare a forward whose weights torch's `fully_shard` gathers before it, and name a rank that is lost."""
        self.count_own()
        meet(self.channel, f"forward, call {self.number + 1} of {self.name}")
        try:
            yield
        except RuntimeError as error:
            lost(error, self.ranks.group_name)
            raise

    def begin(
        self, kind: CallKind, call: Arguments, program: Program | None, step: str = "", target: Any = None
    ) -> tuple[bool, int | None]:
        """Compare a forward, or a step of several, with those of the other ranks. A collective call.

        Args:
            kind: of the call, and `program` the one that is known for it. call: the inputs.
            step: of forwards and backwards that begins, in words; "" for a forward. target: that a step is given.

        Returns: whether the call is of a new kind to any rank, and rank 0's seed, if the program is known.
        """
        channel = self.channel
        if self.shards.host is not None and self.inventory.hooked[1]:
            raise StateError(BACKWARD_HOOKS)
        if len(self.shards.hosts) > 1 and any(self.inventory.hooked):
            raise StateError(HOOKS)
        self.number += 1
        what = f"{step}, {self.what}" if step else self.what
        if channel is None:
            return program is None, None
        trained, count = self.inventory.trained(), self.count()
        writes = (count - self.writes_before) % COUNT_VALUES
        hooked = any(self.inventory.hooked) if step else self.inventory.hooked[0]
        flags = program is None, hooked, call.sequences is not None
        sample = sampled(call.sequences or call.inputs) if self.values else NOTHING
        digests = self._digests(kind, call)
        tied = self.tied.values(target, self.values) if self.tied is not None else b""
        message = CallMessage(*digests, trained, *flags, writes, *self._numbers(program), sample, tied)
        mine = pickle.dumps(message)
        try:
            messages = meet(channel, what if step else f"forward, {what}", mine)
        except RankError:
            self.number -= 1  # it was not begun on any rank
            raise
        if messages.count(mine) == len(messages):  # as nearly always: then nothing differs
            self.writes_before, self.hooked, self.same_sizes = count, hooked, True
            return program is None, message.seed if program is not None else None
        # In order of what misleads most: another call has other values too, and other weights give other values.
        everyone = [*map(pickle.loads, messages)]
        if how := parted(everyone, self.groups):
            self._differ(kind, call, how)
        compare(everyone, self.groups, what)
        if self.tied is not None:
            self.tied.compare([m.tied for m in everyone], what, self.groups.slices)
        self.writes_before = count
        self.same_sizes = len({m.sizes for m in everyone}) == 1
        # A hook on one rank may fail amid collectives that all are in, so all end the call by a turn.
        self.hooked = any(m.hooked for m in everyone)
        # Virtual micro-batches draw from one number on all ranks.
        beside = everyone
        if not self.shards.hosts:
            lane = next(lane for lane in self.groups.lanes if channel.rank in lane)
            beside = [everyone[r] for r in lane]
        new = any(message.new for message in beside)
        return new, beside[0].seed if program is not None else None

    def refuse_lengths(self, program: Program) -> None:
        """Refuse inputs of other sizes on some dp ranks, where these exchange values of such sizes; all know of it.

        Raises:
            RankError: they have other sizes.
        """
        if not self.same_sizes and program.needs_same_sizes:
            raise RankError(f"{self.what}: {OTHER_LENGTHS}")

    def compare_sequences(self, sequences: Sequence[Any]) -> None:
        """Refuse whole sequences that differ on ranks of a slice of the batch, on any device. A collective call.

        Before a call of a new kind alone: reading what is on a device waits for it.
        """
        if self.values:
            samples = from_all(self.shards.planners, sampled(sequences, anywhere=True), "comparison of sequences")
            for lane in self.groups.lanes if len(samples) > 1 else ():
                head = f"The ranks do not have the same sequences in {self.what} {SAMPLED}"
                refuse_samples([samples[r] for r in lane], head, SEQUENCES)

    def count(self) -> int:
        """Count writes to weights by now; with dp to those that the rank keeps, not to what is gathered of them."""
        return self.own_count.number() if self.own_count is not None else self.inventory.writes

    def writes(self) -> int:
        """Return how often weights were written since the call before, or since a load after it."""
        return (self.count() - self.writes_before) % COUNT_VALUES

    def count_own(self) -> None:
        """Count writes to the weights that the rank keeps, from before others are gathered."""
        follow_types(self.shards)
        if isinstance(self.shards.root, FSDPModule) and not self.before_gathering:
            self.settle()

    def settle(self) -> None:
        """Forget what was written by now: the ranks have the same weights, as after a load."""
        if isinstance(self.shards.root, FSDPModule):
            show_gradients(self.shards)  # the rank's own, where a forward has gathered others
            self.before_gathering = [*self.shards.pieces()]
            self.own_count = WriteCount([piece for _, piece, _ in self.before_gathering])
        (self.own_count or self.inventory).forget()  # a conversion gives weights other tensors, whose counts are others
        self.writes_before = self.count()

    @contextlib.contextmanager
    def conversion(self, to: str) -> Iterator[None]:
        """Compare a conversion of all weights: its type and device, and how often the weights were written before."""
        with self.turn("conversion"):
            self.agree("a conversion", {"to": to, "writes to weights": self.writes()})
            yield
            self.settle()

    def running(self) -> AbstractContextManager[None]:
        """Return a context for the program, at whose end ranks with hooks hear of an error of one. Collective."""
        return self._with_hooks() if self.hooked else contextlib.nullcontext()

    @contextlib.contextmanager
    def _with_hooks(self) -> Iterator[None]:
        # Of a call of a new kind it is known only now which gather.
        compare_hooks(self.ranks, self.what, self.order, self.groups.places)
        hold()
        yield
        end_hooks(self.channel, self.what)

    def seed(self, program: Program) -> int:
        """Return rank 0's seed for a forward whose program was not known before. Collective."""
        seed, generator = self._numbers(program)
        if not (program.seeds or program.draws):
            return seed
        ranks = self.shards.ranks
        pairs = from_all(ranks.joint, (seed, generator), f"random numbers of {self.what}")
        refuse_generators([state for _, state in pairs], self.what)
        return broadcast(ranks.along("dp" if self.shards.hosts else "cp"), pairs[0][0])

    def agree(self, what: str, facts: Facts) -> None:
        """Make sure that the tp ranks of every slice of the batch do this with the same options. A collective call.

        Args:
            what: is done. facts: the options in words.

        Raises:
            RankError: with the options that differ.
        """
        if self.channel is None:
            return
        tied = self.tied.values(None, self.values) if self.tied is not None else b""
        doing, tp = f"{what} of {self.name}, after call {self.number}", self.shards.tp
        pairs = from_all(self.ranks, (short(facts), tied), doing)
        slices = [range(i, i + tp) for i in range(0, len(pairs), tp)]
        if differ([digest for digest, _ in pairs], slices):
            agree(self.shards.ranks, f"the options of {what}", facts)
            raise RankError(f"The ranks of another slice of the batch do not agree on the options of {what}. {CAUSES}")
        if self.tied is not None:
            self.tied.compare([theirs for _, theirs in pairs], doing, self.groups.slices)

    def any(self, here: bool, what: str) -> bool:
        """Return whether this is so on any rank of the module. A collective call.

        Args:
            here: whether it is on this one. what: the turn in words.
        """
        return any(from_all(self.ranks, here, f"{what} of {self.name}"))

    def lost(self, error: Exception) -> None:
        """Name the rank that is gone, where an error of the program is one of communication.

        Raises:
            RankError: caused by `error`.
        """
        lost(error, self.shards.planners.group_name)

    @contextlib.contextmanager
    def together(self, what: str, reads: bool = False) -> Iterator[None]:
        """Compare what all tp ranks do in this context, and writes to weights where it `reads` these. Collective."""
        with self.turn(what):
            facts = {"writes to weights": self.writes()} if reads else {}
            digests = meet(self.tp_channel, f"{what} of {self.name}, after call {self.number}", short(facts))
            if len(set(digests)) > 1:
                agree(self.shards.ranks, f"the state before {what}", facts)
            try:
                yield
            finally:
                if self.tp_channel is not None:
                    self.tp_channel.leave()

    def end(self, outputs: Leaves, inputs: Leaves) -> None:
        """End the forward: backwards from its outputs are compared with the other ranks' too."""
        if (channel := self.channel) is None:
            return
        channel.leave()
        if not torch.is_grad_enabled():
            return
        input_ids = {id(x) for x in inputs}
        parts = itertools.chain(*[getattr(x, "micro_batches", ()) for x in outputs])
        graded = [x.grad_fn for x in (*outputs, *parts) if isinstance(x, Tensor) and id(x) not in input_ids]
        ticket = Ticket(self.ranks, self.what, self.inventory.hooked[1], self.groups if self.values else None)
        for i, node in enumerate(dict.fromkeys(graded)):
            if node is not None:
                node.register_prehook(partial(ticket.backward, i))

    def _numbers(self, program: Program | None) -> tuple[int, bytes]:
        seed = base_seed() if program is not None and program.seeds else 0
        draws = program is not None and program.draws
        return seed, bytes.fromhex(state.random_state(self.shards.device))[:8].ljust(8) if draws else bytes(8)

    def _digests(self, kind: CallKind, call: Arguments) -> tuple[bytes, int, bytes]:
        """Return digests of a call's kind, of its sizes, and of what slices of the batch have in common."""
        # Of whole numbers alone, so that it is the same in every process.
        sizes = hash(tuple([shape for shape in call.shapes if shape is not None])) % (1 << 64)
        if self.shards.axis.size == 1:
            return kind.digest, sizes, b""
        if sizes not in kind.slices:
            if len(kind.slices) >= MAX_KINDS:
                kind.slices.clear()
            kind.slices[sizes] = short((*kind.key[:-1], kind_of(call.whole)))  # in place of the leaves
        return kind.digest, sizes, kind.slices[sizes]

    def _differ(self, kind: CallKind, call: Arguments, how: str) -> None:
        """Raise an error that says in what the calls differ; `how` is what `parted` returned."""
        flat, facts = call.whole, {}
        if how == "trained" or self.tied is None:  # each stage has parameters of its own
            frozen = [name for name, p in self.shards.root.named_parameters() if not p.requires_grad]
            facts["frozen parameters"] = f"{len(frozen)}: {', '.join(frozen)}" if frozen else "none"
        if how != "trained":
            facts |= {"the module that is called": call.entry or self.original, **mode_of(kind.key.mode, flat)}
            facts |= {**state.input_text(flat, call.spec, False), **self.changes.facts()}
            facts |= kind_of(flat) if how == "kind" else {}
        agree(self.shards.planners, f"the inputs of this call ({self.what}), or its mode", facts)
        raise RankError(f"The ranks do not agree on the inputs of {self.what}, or on its mode. {CAUSES}")
