"""What claims to be faster is used where it was measured: fakes that lie, crash, are slow, and ranks that disagree."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn

import autotp
from autotp.comm.ranks import PLAIN_PROCESS
from autotp.errors import InputError
from autotp.passes.optimise import Alternative, Value
from autotp.runtime.lower import lower, measured
from autotp.runtime.lower.measured import Line, Measures, device_key, read_table
from tests.helpers.clocks import clock_by_turns
from tests.helpers.compare import gradients_differ, mesh_of
from tests.helpers.models import inputs_of, transformer
from tests.helpers.modules.overlapped import called, made

CPU = torch.device("cpu")
MEASURED: Any = {"kernels": "measured"}
FREE = dataclasses.replace(  # of machines without latencies: all that could overlap is measured
    autotp.Cluster.preset("h100"), name="free", launch_overhead=1e-15, intra_latency=1e-15, collective_overhead=1e-15
)
OPERAND = Value((4, 8), torch.float32)
FORMULAS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: x * torch.sigmoid(x),
    "equal": torch.nn.functional.silu,
    "lies": lambda x: x * torch.sigmoid(1.001 * x),
    "lies in the gradient": lambda x: x.detach() * torch.sigmoid(x),
    "another shape": lambda x: x.flatten(),
    "crashes": lambda x: x @ x,
    "not a number": lambda x: x / 0 * 0,
}


def timed(plain: float, other: float) -> Any:
    """Every measurement takes so long, and is kept in no file."""
    return patch.multiple(measured, clock_of=clock_by_turns(plain, other)), patch.object(lower, "path_of", lambda: None)


def alternative(other: str) -> Alternative:
    def graph(formula: Callable[[Any], Any]) -> fx.GraphModule:
        traced = fx.symbolic_trace(lambda x: (formula(x),))
        return fx.GraphModule({}, traced.graph)

    return Alternative(other, other, graph(FORMULAS["plain"]), graph(FORMULAS[other]), (OPERAND,))


def verdict(other: str, plain: float = 2.0, ours: float = 1.0, path: Path | None = None) -> Any:
    """The answer to whether a formula is used that takes so many seconds."""
    with patch.object(measured, "clock_of", clock_by_turns(plain, ours)):
        return Measures(PLAIN_PROCESS, CPU, True, path)(alternative(other))


@pytest.mark.parametrize(
    "other, why",
    [
        ("equal", ""),
        ("lies", "differs by"),
        ("lies in the gradient", "differs by"),
        ("another shape", "differs in shape"),
        ("crashes", "failed: RuntimeError"),
        ("not a number", "differs by"),
    ],
)
def test_only_what_gives_the_same_numbers_is_used(other, why):
    used, said = verdict(other)
    assert used == (not why) and (why or "2.00 of torch's speed") in said


def test_what_takes_too_long_to_compile_is_left_out():
    with patch.object(measured, "COMPILE_SECONDS", -1.0):
        assert verdict("equal") == (False, "its first call took 0 s")


@pytest.mark.parametrize("seconds, used", [(2.0, True), (1.01, False), (0.5, False)])
def test_only_what_is_faster_is_used(seconds, used):
    assert verdict("equal", seconds).used == used


def test_a_line_is_kept_for_this_device_versions_and_kernels(tmp_path):
    path = tmp_path / "of mine" / "measured.json"
    first = verdict("equal", 2.0, 1.0, path)
    assert verdict("equal", 1.0, 2.0, path) == first == (True, "2.00 of torch's speed")  # from the file
    assert read_table(path) == {f"equal, trained, {device_key(CPU)}": Line(2.0, 1.0)}
    assert path.stat().st_mode & 0o77 == 0 and [x.name for x in path.parent.iterdir()] == [path.name]
    path.write_text(path.read_text().replace(device_key(CPU), "another device"))
    assert not verdict("equal", 1.0, 2.0, path).used  # measured again, and nothing is lost
    assert "another device" in path.read_text()
    for part in ("torch", "triton", "kernels"):
        assert part in device_key(CPU)


KEY = f"equal, trained, {device_key(CPU)}"
LINES = {KEY: [2.0, 1.0, ""]}


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "is not JSON"),
        (json.dumps({"format": 1, "lines": LINES}), ""),  # of another version
        (json.dumps({"format": 2, "lines": {KEY: [2.0]}}), "not enough values"),
        (
            json.dumps({"format": 2, "lines": {KEY: ["2x", 1, ""]}}),
            "could not convert",
        ),
        ("[" * 99 + "]" * 99, "nested"),
        (" " * 5_000_000, "at most 4.0 MiB"),
    ],
)
def test_a_broken_file_is_measured_over(tmp_path, caplog, text, why):
    path = tmp_path / "measured.json"
    path.write_text(text)
    assert not verdict("equal", 1.0, 2.0, path).used
    assert why in caplog.text and bool(why) == ("is not read" in caplog.text)
    assert read_table(path) == {KEY: Line(1.0, 2.0)}


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert verdict("equal", path=tmp_path / "file" / "measured.json").used
    assert "cannot be written" in caplog.text


def test_the_folder_is_the_users_own_unless_the_environment_names_one(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    for named, path in (("", "/somewhere/autotp"), ("1", "/somewhere/autotp"), ("/there", "/there"), ("0", None)):
        monkeypatch.setenv("AUTOTP_CACHE", named)
        assert measured.path_of() == (None if path is None else Path(path) / "measured.json")


def test_measuring_draws_nothing_from_the_users_generators():
    state = torch.get_rng_state()
    verdict("equal")
    assert torch.equal(state, torch.get_rng_state())


def kernels_of(name: str, plain: float, other: float) -> tuple[str, str]:
    """The line of the plan, and the program."""
    model = transformer(name)
    with timed(plain, other)[0], timed(plain, other)[1]:
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs_of(model), optimise=MEASURED)
    for m in (model, sharded):
        m(**inputs_of(model)).logits.float().square().mean().backward()
    assert gradients_differ(sharded, model) < 1e-5
    return next(line for line in sharded.plan.fired if line.startswith("kernels: ")), sharded.graph


def test_kernels_stand_where_they_were_faster_and_the_plan_says_so():
    told, graph = kernels_of("llama", 2.0, 1.0)
    assert "add_norm 2 times (2.00 of torch's speed), norm 3 times" in told and "add_norm" in graph
    told, graph = kernels_of("llama", 1.0, 2.0)
    assert "add_norm not used (0.50 of torch's speed), norm not used" in told
    assert "norm(" not in graph


def test_a_kernel_that_lies_stays_out_of_the_program():
    wrong = patch.object(measured, "differs", lambda a, b: "differs by 1.0e+00" if len(b) == 5 else "")
    with wrong:  # of a sum and its norm there are two results, and three operands with gradients
        told, graph = kernels_of("llama", 2.0, 1.0)
    assert "add_norm not used (differs by 1.0e+00)" in told and "norm 5 times (2.00 of torch's speed)" in told
    assert "add_norm(" not in graph and "norm(" in graph  # the norm alone takes the place


def test_a_line_says_what_stands_there_and_of_which_sizes(tmp_path):
    """Sizes are rounded up to powers of two, so the next batch has a line already; other operators have their own."""
    path = tmp_path / "measured.json"
    keys = []
    for length, norm in ((5, nn.RMSNorm), (7, nn.RMSNorm), (9, nn.RMSNorm), (5, nn.LayerNorm)):
        model = nn.Sequential(norm(16), nn.Linear(16, 32), nn.GELU())
        with timed(2.0, 1.0)[0], patch.object(lower, "path_of", lambda: path):
            autotp.compile(model, 1, example_inputs=torch.ones(3, length, 16), optimise=MEASURED)
        keys.append({key.removesuffix(f", trained, {device_key(CPU)}") for key in read_table(path)})
    assert keys[0] == keys[1]
    assert sorted(keys[0]) == [
        "bias_gelu for linear gelu: 4x8x16 float32, 32x16 float32, 32 float32 -> 4x8x32 float32",
        "norm for rms_norm: 4x8x16 float32, 16 float32 -> 4x8x16 float32",
    ]
    assert len(keys[2] - keys[1]) == 2 and all("4x16x16" in key for key in keys[2] - keys[1])
    [line] = keys[3] - keys[2]
    assert line == "norm for layer_norm: 4x8x16 float32, 16 float32, 16 float32 -> 4x8x16 float32"


def test_on_a_cpu_nothing_is_measured_by_itself():
    model = transformer("llama")
    with patch.object(Measures, "__call__", side_effect=AssertionError):
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs_of(model))
    assert any("kernels: nowhere: without Triton on a CUDA device" in line for line in sharded.plan.fired)
    with pytest.raises(InputError, match="'regather' is not measured"):
        autotp.compile(model, 1, optimise={"regather": "measured"})


def disagreeing(rank: int, world: int, group: Any) -> list[Any]:
    """Rank 1 finds every kernel faster, rank 0 slower; then sums and products that send, on both faster or slower."""
    model, found = transformer("llama", num_hidden_layers=1), []
    with timed(1.0, 0.5 if rank else 2.0)[0], timed(1.0, 1.0)[1]:
        sharded: Any = autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh_of(group), optimise=MEASURED)
    found.append(next(line for line in sharded.plan.fired if line.startswith("kernels: ")))
    model, inputs = made("plain")
    for name, cluster in (("bucket", None), ("overlap", FREE)):
        for seconds in (0.5, 2.0):
            with timed(1.0, seconds)[0], timed(1.0, 1.0)[1]:
                options: Any = {"sequence_parallel": True, "optimise": {name: "measured"}, "cluster": cluster}
                sharded = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), **options)
            model.zero_grad()
            called(model, inputs).square().mean().backward()
            called(sharded, inputs).square().mean().backward()
            assert gradients_differ(sharded, model) < 1e-12
            found += [x for x in sharded.plan.fired if x.startswith(f"{name}: ")]
    return found


def test_ranks_take_one_verdict_that_of_rank_0(pool):
    one, other = pool.run(disagreeing, world=2)
    assert one == other
    kernels, bucketed, apart, overlapped, plain = one
    assert "norm not used (0.50 of torch's speed)" in kernels and "times" not in kernels
    assert "became 3 (2.00 of torch's speed)" in bucketed and "not used (0.50 of torch's speed)" in apart
    assert "weights' gradients (2.00 of torch's speed)" in overlapped and "not used (0.50 of torch's speed)" in plain


def test_a_verdict_in_words():
    assert Line(1.314, 1.0).verdict == (True, "1.31 of torch's speed")
    assert Line(2.0, 1.0, "failed: OSError").verdict == (False, "failed: OSError")
