"""Cross entropy and embedding over a dealt vocabulary: kernels by Triton's interpreter, twins, and graphs with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

import autotp
from autotp.errors import InputError
from autotp.ir.specs import Runs
from autotp.kernels import cross_entropy, embedding
from autotp.kernels.operators import class_sums, class_sums_backward
from autotp.passes.decompose.loss_sums import DecomposeLosses
from autotp.passes.optimise import kernels as vocabulary
from autotp.rules.lookup import vocabulary_embedding
from tests.helpers.cases.kernel_compile import compiling
from tests.helpers.close import CLOSE, DTYPES, differ
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, transformer
from tests.helpers.modules.heads import COLUMNS, Head, captured, values
from tests.helpers.processes.interpreter import Interpreter

OPS: Any = torch.ops.autotp
CLASSES, IGNORED = 21, -100
TARGET = [0, 20, -1, 7, 21, 3, IGNORED]  # two that others hold, one to be ignored


def scored(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that do not lie together, one example of -inf alone and one with some; a maximum from elsewhere."""
    scores = 3 * torch.randn(len(TARGET), 2 * CLASSES, generator=torch.Generator().manual_seed(0))
    scores = (scores - 40).to(dtype)[:, ::2]
    scores[1], scores[2, :9], scores[3, 0] = -torch.inf, -torch.inf, -torch.inf
    most = scores.amax(1) + 1.5
    most[1] = -30
    return scores, most, torch.tensor(TARGET)


def wrong(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, each as a part of what is wanted or of 1; infinite ones are to be equal."""
    wanted = wanted.double()
    whole = wanted.isfinite()
    if not torch.equal(whole, found.isfinite()) or not torch.equal(wanted[~whole], found[~whole].double()):
        return float("inf")
    return float(((found.double() - wanted).abs() / wanted.abs().clamp(min=1))[whole].max())


def summed(dtype: torch.dtype, total: bool, shift: int = 0, device: str = "cpu") -> tuple[list[float], float]:
    """By Triton: the errors of the sums and of their gradient."""
    scores, most, target = (x.to(device) for x in scored(dtype))
    exact = scores.double(), most.double(), target, total
    grad = torch.randn(2 + total, len(TARGET), generator=torch.Generator().manual_seed(1)).to(device)
    with patch.multiple(cross_entropy, TILE=8, EXAMPLES=4):
        terms = cross_entropy._launch_terms(scores, target + shift, total)
        sums = cross_entropy._launch_sums_of(scores, most, target + shift, terms, total)
        to = cross_entropy._launch_backward(grad, scores, most, target + shift, total)
    assert (device != "cpu" or torch.empty(2).isnan().all()) and to.dtype == dtype
    errors = [wrong(a, b) for a, b in zip(sums, class_sums(*exact), strict=True)]
    return errors, differ(to, class_sums_backward(grad.double(), *exact))


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_of_a_cross_entropy_in_one_pass(interpreter: Interpreter, dtype, total):
    """Twenty-one classes in three tiles. The sums are in float32, whatever the scores are in."""
    errors, back = interpreter.run(summed, dtype, total)
    assert max(errors) < 1e-6 and back < CLOSE[dtype], (errors, back)


def test_the_class_of_a_neighbour_is_noticed(interpreter: Interpreter):
    """The negative control."""
    errors, back = interpreter.run(summed, torch.float32, False, 1)
    assert errors[0] < 1e-6 and errors[1] > 0.01 and back > 0.01


@pytest.mark.parametrize("parts", [[0, 21], [0, 8, 20, 21], [0, 20, 21]])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_terms_of_parts_are_the_sums_of_the_whole(dtype, parts):
    """Every part gives its terms; by the maximum over the parts their sums add up to those of the whole."""
    scores, _, target = scored(dtype)
    scores[1] = 0
    pieces = [(scores[:, a:b], target - a) for a, b in pairwise(parts)]
    terms = [cross_entropy.class_terms(x, t, True) for x, t in pieces]
    most = torch.stack([x[0] for x in terms]).amax(0)
    found = sum(cross_entropy.class_sums_of(x, most, t, y, True) for (x, t), y in zip(pieces, terms, strict=True))
    wanted = class_sums(scores.double(), most.double(), target, True)
    assert isinstance(found, Tensor) and wrong(found, wanted) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_gradients_of_the_sums_are_those_of_the_operator_that_they_stand_for():
    scores, most, target = scored(torch.float32)
    leaf = scores.clone().requires_grad_()
    terms = OPS.class_terms(leaf.detach(), target, True)
    grad = torch.randn(3, len(TARGET))
    (found,) = torch.autograd.grad(OPS.class_sums_of(leaf, most, target, terms, True), leaf, grad)
    (wanted,) = torch.autograd.grad(OPS.class_sums(leaf, most, target, True), leaf, grad)
    assert torch.equal(found, wanted)


ROWS, WIDTH, START, VOCABULARY, PADDING = 5, 11, 4, 12, 6
IDS = [[0, 3, 4, 6], [8, 9, 11, 8]]


def looked_up(dtype: torch.dtype, start: int = START, rows: int = ROWS, device: str = "cpu") -> bool:
    """Whether Triton finds the same rows, of a weight that does not lie together."""
    weight = torch.randn(WIDTH, ROWS, generator=torch.Generator().manual_seed(0)).to(dtype).to(device).t()[:rows]
    ids = torch.tensor(IDS, device=device).t()
    with patch.object(embedding, "TILE", 4):
        found = embedding._launch(weight, ids, start, VOCABULARY, PADDING)
    return torch.equal(found, embedding.vocabulary_rows(weight, ids, START, VOCABULARY, PADDING))


def unknown() -> str:
    """What Triton's launch says of an id that no rank has."""
    try:
        embedding._launch(torch.zeros(ROWS, WIDTH), torch.tensor(IDS) + 1, START, VOCABULARY, PADDING)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_of_a_rank(interpreter: Interpreter, dtype):
    assert interpreter.run(looked_up, dtype)
    assert interpreter.run(looked_up, dtype, START, 0)  # more ranks than rows: zeros
    assert not interpreter.run(looked_up, dtype, START + 1)  # the negative control


def test_an_id_that_no_rank_has_is_refused(interpreter: Interpreter):
    assert "12 rows" in interpreter.run(unknown)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_the_parts_of_an_embedding_add_up(dtype, kind):
    """With the gradient, in which the padding has none."""
    whole = torch.randn(VOCABULARY, WIDTH).to(dtype)
    ids, grad = torch.tensor(IDS, dtype=kind), torch.randn(2, 4, WIDTH).to(dtype)
    exact = whole.double().requires_grad_()
    wanted = nn.functional.embedding(ids, exact, PADDING)
    wanted.backward(grad.double())
    found, grads = torch.zeros_like(wanted, dtype=dtype), []
    for start, end in ((0, 4), (4, 9), (9, 12), (12, 12)):
        part = whole[start:end].clone().requires_grad_()
        rows = OPS.vocabulary_rows(part, ids, start, VOCABULARY, PADDING)
        found += rows.detach()
        grads += torch.autograd.grad(rows, part, grad)
    assert torch.equal(found.double(), wanted) and exact.grad is not None
    assert differ(torch.cat(grads), exact.grad) < CLOSE[dtype] and not exact.grad[PADDING].any()


def test_what_the_embedding_refuses():
    weight, ids = torch.randn(ROWS, WIDTH), torch.tensor(IDS)
    with pytest.raises(IndexError):
        OPS.vocabulary_rows(weight, ids + 1, START, VOCABULARY, PADDING)
    for given in ((weight.double(), ids), (weight[0], ids), (weight, ids.double()), (weight, ids.to("meta"))):
        with pytest.raises(InputError, match="vocabulary_rows takes"):
            OPS.vocabulary_rows(*given, START, VOCABULARY, PADDING)


def test_what_the_cross_entropy_refuses():
    scores, _, target = scored(torch.float32)
    for given in ((scores.int(), target), (scores[0], target), (scores, target[1:]), (scores, target.double()),
                  (scores, target.to("meta"))):  # fmt: skip
        with pytest.raises(InputError, match="class_terms takes"):
            OPS.class_terms(*given, False)


def test_the_operators_keep_torchs_rules():
    scores, most, target = scored(torch.float32)
    leaf = scores[2:].clone().requires_grad_()
    terms = OPS.class_terms(leaf.detach(), target[2:], True)
    torch.library.opcheck(OPS.class_terms.default, (scores, target, True))
    torch.library.opcheck(OPS.class_sums_of.default, (leaf, most[2:], target[2:], terms, True))
    weight = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.library.opcheck(OPS.vocabulary_rows.default, (weight, torch.tensor(IDS), START, VOCABULARY, PADDING))


def steps(sharded: Any, given: dict[str, Tensor]) -> Tensor:
    """Losses of two steps, each with its own random numbers."""
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        sharded.zero_grad()
        losses.append(sharded(**given))
        losses[-1].backward()
    return torch.stack(losses).detach()


def with_and_without(rank: int, world: int, group: Any, name: str) -> tuple[float, float, str]:
    """How far a model's losses and gradients with kernels are from those without, in training, with dropout."""
    model: Any = transformer(name, num_hidden_layers=1)
    for key, value in vars(model.config).items():
        if "drop" in key and isinstance(value, float):
            setattr(model.config, key, 0.1)
    model = type(model)._from_config(model.config).train()
    inputs = inputs_of(model)
    labels = inputs["input_ids"].clone()
    labels[0, :4] = IGNORED
    given, made, losses = {**inputs, "labels": labels}, [], []
    for on in (True, False):
        options: dict[str, Any] = {"outputs": "loss", "example_inputs": given, "optimise": {"kernels": on}}
        made.append(autotp.compile(model, mesh=mesh_of(group), **options))
        losses.append(steps(made[-1], given))
    grads = [x.full_grad_dict() for x in made]
    assert grads[0].keys() == grads[1].keys()
    largest = max(float(g.abs().max()) for g in grads[1].values())
    far = max(float((grads[0][n] - g).abs().max()) for n, g in grads[1].items()) / largest
    return difference(*losses), far, next(x for x in made[0].plan.fired if x.startswith("kernels"))


@pytest.mark.parametrize("name", ["llama-uneven", "gpt2"])
def test_a_model_trains_the_same_with_kernels(pool, name):
    for loss, grads, told in pool.run(with_and_without, name, world=2):
        assert loss < 1e-6 and grads < 1e-5, (loss, grads)
        assert "vocabulary_rows" in told and "class_terms" in told, told


class Words(nn.Module):
    """An embedding with a padding, whose vocabulary is scored against by another weight."""

    def __init__(self, words: int, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 16, padding_idx=3), Head(words, **options)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.head(self.table(ids), target)


SMOOTHED = {"ignore_index": 5, "label_smoothing": 0.1}
DEALT = {"table.weight": Shard(0), **{f"head.{name}": layout for name, layout in COLUMNS.items()}}


def dealt(rank: int, world: int, group: Any, options: dict[str, Any], off: int = 0) -> tuple[float, float, str, int]:
    """The loss over 37 words, dealt out unevenly, against the model itself; and how many values are gathered for it."""
    torch.manual_seed(0)
    model = Words(37, **options)
    ids = torch.randint(37, (12,))
    ids[:3], target = 3, torch.randint(37, (12,))
    target[:2] = 5
    right = Runs.spans
    with patch.object(Runs, "spans", lambda *a, **k: [(s + off, n) for s, n in right(*a, **k)]):
        sharded: Any = autotp.compile(
            model, mesh=mesh_of(group), outputs="loss", example_inputs=(ids, target), pins=DEALT,
            optimise={"kernels": True},
        )  # fmt: skip
        loss, wanted = sharded(ids, target), model(ids, target)
    for x in (loss, wanted):
        x.backward()
    told = next(x for x in sharded.plan.fired if x.startswith("kernels"))
    return difference(loss, wanted), gradients_differ(sharded, model), told, sharded.graph.count("amax")


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {"weight": torch.linspace(0.5, 2, 37), "ignore_index": 5}), (2, SMOOTHED), (3, SMOOTHED)],
)
def test_an_uneven_vocabulary_dealt_out(pool, world, options):
    for loss, grads, told, gathered in pool.run(dealt, options, world=world):
        assert loss < 1e-6 and grads < 1e-5 and not gathered, (loss, grads)
        assert told == "kernels: class_terms, vocabulary_rows"


@pytest.mark.parametrize(("segments", "found"), [(((4, 1),), True), (((3, 1), (1, 1)), False)])
def test_a_lookup_runs_by_its_kernel_on_all_ranks_or_on_none(segments, found):
    """Of the second way rank 1 has one run of ids, and rank 0 two: ranks measure a kernel together."""
    for rank in range(2):
        graph = fx.Graph()
        weight, ids = graph.placeholder("weight"), graph.placeholder("ids")
        weight.meta["val"] = torch.empty(4, 8)
        place: Any = {"rank": rank, "tp": 2}
        node = graph.call_function(vocabulary_embedding, (weight, ids, Runs(1, segments), -1), place)
        assert (vocabulary.look_up(node) is not None) == found


class Widened(nn.Module):
    """Scores in half precision, whose loss is taken in float32; and perhaps something else of them."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(16, 36, dtype=torch.bfloat16), other

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.head(x).float()
        loss = nn.functional.cross_entropy(scores.view(-1, 36), target.view(-1))
        return loss + 1e-3 * scores.square().mean() if self.other else loss


@pytest.mark.parametrize("other", [False, True])
def test_scores_are_not_copied_to_float32(other):
    """Unless something else reads that copy; loss and gradients stay as they are, to the bit."""
    torch.manual_seed(0)
    model = Widened(other)
    x, target = torch.randn(3, 4, 16, dtype=torch.bfloat16), torch.randint(36, (3, 4))
    program = captured(model, x, target)
    DecomposeLosses().run(program)
    losses, grads = [], []
    for on in (False, True):
        if on:
            (sums,) = (n for n in program.graph.nodes if n.target is OPS.class_sums.default)
            rewrite = vocabulary.sum_in_one_pass(sums)
            assert rewrite is not None and rewrite.put(*rewrite.arguments)
            program.graph.eliminate_dead_code()
        losses.append(values(program, [x, target], model))
        grads.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    casts = [n for n in program.graph.nodes if n.target is torch.ops.aten.to.dtype and n.meta["val"].ndim == 3]
    assert len(casts) == other and torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_rows_of_a_neighbour_are_noticed(pool):
    """The negative control."""
    assert any(found[1] > 1e-3 for found in pool.run(dealt, {}, 1, world=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_compile_for_a_device(dtype):
    pytest.importorskip("triton")
    scores, target = torch.empty(3, 5000, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    with compiling() as made:
        for total in (False, True):
            terms = cross_entropy._launch_terms(scores, target, total)
            cross_entropy._launch_sums_of(scores, scores[:, 0], target, terms, total)
            cross_entropy._launch_backward(torch.empty(2 + total, 3), scores, scores[:, 0], target, total)
        for weight in (scores, scores[:, :1]):
            embedding._launch(weight, target, 0, 3, -1)
    assert len(made) == 8


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device(dtype):
    for total in (False, True):
        errors, back = summed(dtype, total, 0, "cuda")
        assert max(errors) < 1e-6 and back < CLOSE[dtype]
    assert looked_up(dtype, START, ROWS, "cuda")
