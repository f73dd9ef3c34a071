"""Kernels against float64: by Triton's interpreter, with memory that starts as NaN, their twins, their operators."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autotp.errors import InputError
from autotp.kernels import bias_gelu, norm
from tests.helpers.cases.kernel_cases import CASES, EPS, error, errors
from tests.helpers.cases.kernel_compile import compiling

RAGGED = ((3, 37), (2, 1030), (1, 3), (0, 8))
NARROW = ((3, 0), (0, 0))  # a rank may have no columns
OPS: Any = torch.ops.autotp


@pytest.mark.parametrize("name", CASES)
def test_by_triton(interpreter, name):
    found = interpreter.run(errors, name, "triton", RAGGED)
    assert max(found.values()) <= 1, found


def by_turns(name: str) -> dict[Any, float]:
    """More rows than programs."""
    with patch.object(norm, "TILE", 64):
        return errors(name, "triton", ((40, 37),))


@pytest.mark.parametrize("name", ["layer norm, 2 vectors, added", "rms norm, 1 vectors"])
def test_many_rows(interpreter, name):
    found = interpreter.run(by_turns, name)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("way", ["triton", "twin"])
def test_no_columns(interpreter, way):
    for name in (n for n in CASES if "norm" not in n):
        assert max(interpreter.run(errors, name, way, NARROW).values()) == 0


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def unwritten() -> dict[str, float]:
    found = {}
    for module, function, name in (
        (bias_gelu, "_forward", "bias_gelu False"),
        (bias_gelu, "_backward", "bias_gelu True"),
        (norm, "_forward", "rms norm, 1 vectors"),
        (norm, "_backward", "layer norm, 2 vectors, added"),
    ):
        with patch.object(module, function, Nothing()):
            found[f"{name} {function}"] = error(name, "triton", torch.float32, (5, 37), "contiguous")
    return found


def test_what_is_not_written_is_noticed(interpreter):
    assert set(interpreter.run(unwritten).values()) == {torch.inf}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bias_gelu True", "bias_gelu False"),
        ("layer norm, 0 vectors", "rms norm, 0 vectors"),
    ],
)
def test_another_function_is_noticed(interpreter, name, other):
    call = error, name, "triton", torch.float32, (5, 37), "contiguous"
    assert interpreter.run(*call, name) <= 1 and interpreter.run(*call, other) > 10


@pytest.mark.parametrize("name", CASES)
def test_twins(name):
    found = errors(name, "twin", RAGGED)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("name", CASES)
def test_twins_backward_is_the_derivative(name):
    """In float64, against autograd through the reference."""
    case, draw = CASES[name], torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64) for s in case.shapes(4, 6)]
    exact = [x.clone().requires_grad_() for x in inputs]
    wanted = case.reference(exact, [exact[0], exact[0] + exact[min(1, len(exact) - 1)]])
    grads = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in wanted]
    outputs, gradients = case.twin(inputs, grads)
    back = torch.autograd.grad(wanted, exact, grads)
    for got, want in zip([*outputs, *gradients], [*wanted, *back], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


X, W = torch.randn(2, 3, 10), torch.randn(10)
CALLS = {
    "bias_gelu": (X, W, True),
    "bias_gelu_backward": (X, X, W, False),
    "norm": (X, W, None, EPS, False),
    "add_norm": (X, X.cos(), W, W, EPS, True),
    "norm_backward": (X, None, X, torch.ones(2, 6), W, None, True),
}


def leaves(args: tuple[Any, ...]) -> list[Any]:
    return [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_what_torch_wants(name):
    given = CALLS[name] if "backward" in name else leaves(CALLS[name])
    torch.library.opcheck(getattr(OPS, name).default, tuple(given))


@pytest.mark.parametrize("name", [n for n in CALLS if "backward" not in n])
def test_they_compile_whole(name):
    def run(*args: Any) -> Any:
        out = getattr(OPS, name)(*args)
        return out if isinstance(out, torch.Tensor) else out[0] + (out[1] if name == "add_norm" else 0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = []
    for function in (run, compiled):
        given = leaves(CALLS[name])
        out = function(*given)
        out.sin().sum().backward()
        found.append([out, *(x.grad for x in given if isinstance(x, torch.Tensor))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch._dynamo.reset()


def test_only_the_sum_of_a_norm_may_have_a_gradient():
    x, residual = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    OPS.add_norm(x, residual, None, None, EPS, True)[1].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 5))


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("bias_gelu", (X.double(), W.double(), True), "float64"),
        ("bias_gelu", (X, W[:-1], True), "as long as"),
        ("norm", (X.int(), None, None, EPS, True), "int32"),
        ("norm", (X, W[1:], None, EPS, True), "as long as"),
        ("norm", (X, W.double(), None, EPS, True), "float64"),
        ("norm", (X[..., :0], None, None, EPS, True), "not empty"),
        ("norm", (X.new_empty(2, 16385), None, None, EPS, True), "at most 16384"),
        ("add_norm", (X, X[0], None, None, EPS, True), "one shape and dtype"),
        ("add_norm", (X, X.half(), None, None, EPS, True), "one shape and dtype"),
        ("norm", (X, W.to("meta"), None, EPS, True), "one device"),
    ],
)
def test_refused(name, args, why):
    with pytest.raises(InputError, match=why):
        getattr(OPS, name)(*args)


WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from autotp.kernels import common, norm
assert not common.available()
y, _ = torch.ops.autotp.norm(torch.ones(2, 4), None, None, 0.0, False)
assert torch.equal(y, torch.ones(2, 4))
"""


@pytest.mark.parametrize("name", ["norm", "add_norm", "bias_gelu"])
def test_counts_of_rows_stay_symbols(name):
    args = {"norm": (None, EPS, True), "add_norm": (None, EPS, True), "bias_gelu": (False,)}[name]

    def call(x, vector):
        y = getattr(OPS, name)(*[x] * (2 if name == "add_norm" else 1), vector, *args)
        return torch.autograd.grad(y.sum() if name == "bias_gelu" else y[0].sum(), (x, vector))

    program = make_fx(call, tracing_mode="symbolic")(
        torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    )
    rows = next(iter(program.graph.nodes)).meta["val"].shape[:2]
    assert not any(n.node.expr.is_number for n in rows)


@pytest.mark.ranks
def test_triton_is_optional():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=900)


@pytest.mark.parametrize("name", CASES)
def test_they_compile_for_a_device(name):
    """To machine code of sm_90, without the device: the interpreter does not check types."""
    pytest.importorskip("triton")
    case = CASES[name]
    for columns in (4096, 1, *((16384,) if "added" in name else ())):
        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in case.shapes(2, columns)]
        grads = [torch.empty(2, columns, dtype=torch.bfloat16)] * 2
        with compiling() as made:
            case.triton(inputs, grads)
        assert len(made) == 2


# Triton 3.9 says of its own default that it will change; it does not matter here.
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_device(name):
    found = errors(name, "triton", ((5, 37), (300, 4096), (3, 16383), (0, 8)), "cuda")
    assert max(found.values()) <= 1, found
