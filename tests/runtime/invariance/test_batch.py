"""The same bits however many ranks share the batch: virtual micro-batches, beside virtual ranks of tp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.comm.virtual import Host
from autotp.errors import InputError, StateError
from tests.helpers.models import transformer

from .runs import IDS, Dropped, different, trained


def on_mesh(
    rank: int, world: int, group: Any, dp: int, name: str, dtype: str, virtual: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    return trained(mesh, name, dtype, virtual, **options)


def compare(pool: Any, name: str, dtype: str, virtual: int, dps: tuple[int, ...], **options: Any) -> None:
    """Hold runs on four ranks, of which so many share the batch, against that of one process."""
    options = {"dp_invariant": 4, "repeats": 4, **options}
    alone = trained(None, name, dtype, virtual, **options)
    for dp in dps:
        for rank, values in enumerate(pool.run(on_mesh, dp, name, dtype, virtual, options)):
            odd = different(alone, values, dp, rank // (4 // dp))
            assert not odd, (dp, odd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_meshes_train_to_the_same_bits(pool, dtype: str):
    compare(pool, "dropout", dtype, 4, (2, 4))


def test_another_order_of_one_sum_over_the_batch_shows(pool, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    send, swap = Host.send, [0, 2, 1, 3]

    def swapped(self: Host, primitive: Any, xs: Any, reduction: str) -> Tensor:
        return send(self, primitive, [xs[i] for i in swap] if self.axis == "dp" else xs, reduction)

    monkeypatch.setattr(Host, "send", swapped)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(pool, "dropout", "float32", 4, (2,))


def resumed(rank: int, world: int, group: Any, dp: int, folder: str, steps: int, load: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    mesh = None
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(2))
    if world > 1:
        mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
        x = x.chunk(dp)[mesh.get_local_rank(0)]
    torch.manual_seed(0)
    options: Any = {"example_inputs": x, "tp_invariant": 2, "dp_invariant": 4, "check_capture": False}
    module = autotp.compile(Dropped(), mesh=mesh, dp=dp, **options).eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if load:
        module.load_checkpoint(folder, optimizer=optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        module.mean_loss(lambda y: y.square().mean(), module(x)).backward()
        module.clip_grad_norm_(1.0)
        optimizer.step()
    module.save_checkpoint(folder, optimizer=optimizer)
    return module.full_state_dict()


def test_a_run_goes_on_on_other_meshes(pool, tmp_path: Path):
    whole = resumed(0, 1, None, 1, str(tmp_path / "whole"), 6, load=False)
    folder = str(tmp_path / "moved")
    pool.run(resumed, 2, folder, 2, False, world=4)
    resumed(0, 1, None, 1, folder, 2, load=True)
    for values in pool.run(resumed, 4, folder, 2, True, world=4):
        assert all(torch.equal(values[name], whole[name]) for name in whole)


X = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dp": 3}, r"dp=3 does not divide dp_invariant=4: take dp from \[1, 2, 4\]"),
        ({"dp_invariant": "4"}, "dp_invariant='4': give the largest number of ranks"),
        ({"fully_shard": True, "dp": 2}, "fully_shard=True with dp_invariant: torch sums"),
        ({"cp": 2}, "cp=2 with dp_invariant: sums over cp"),
        ({"example_inputs": X[:3]}, "a batch of 3 is not divided into 4 virtual micro-batches"),
        ({"backend": "inductor"}, "backend='inductor' with dp_invariant: "),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, Any], text: str):
    asked: Any = {"example_inputs": X, "dp_invariant": 4, **options}
    with pytest.raises(InputError, match=text):
        autotp.compile(Dropped(), **asked)


def test_calls_that_do_not_go_with_it_are_refused_by_name():
    options: Any = {"tp_invariant": 2, "dp_invariant": 4, "check_capture": False}
    module = autotp.compile(Dropped(), example_inputs=X, **options)
    with pytest.raises(InputError, match="a batch of 6 is not divided into 4 virtual micro-batches"):
        module(torch.cat([X, X])[:6])
    with pytest.raises(StateError, match="a loss of a slice is summed in another order on another mesh"):
        module(X).square().mean().backward()
    with pytest.raises(StateError, match="with all that is made of the outputs in the function"):
        module.mean_loss(lambda y: y.mean(), module(X)[:, 1:]).backward()
    with pytest.raises(InputError, match="the function gave a tensor of shape"):
        module.mean_loss(lambda y: y, module(X))
    module.up.register_forward_hook(lambda *_: None)
    with pytest.raises(StateError, match="hooks on modules, with dp_invariant"):
        module(X)
    llama: Any = autotp.compile(transformer("llama-cache-short"), example_inputs={"input_ids": IDS}, dp_invariant=2)
    with pytest.raises(StateError, match="compile for these with tp_invariant alone"):
        llama.eval().generate(IDS, max_new_tokens=2)


def test_a_loss_of_ones_own_is_the_mean_of_the_micro_batches():
    torch.manual_seed(0)
    model = Dropped().eval()
    options: Any = {"example_inputs": X, "dp_invariant": 4, "check_capture": False}
    module, targets = autotp.compile(model, **options).eval(), torch.randn(4, 8, 32)
    loss = module.mean_loss(torch.nn.functional.mse_loss, module(X), targets)
    loss.backward()
    wanted = torch.nn.functional.mse_loss(model(X), targets)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for name, gradient in module.full_grad_dict().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    plain = autotp.compile(model, example_inputs=X, check_capture=False)
    assert torch.equal(plain.mean_loss(torch.nn.functional.mse_loss, model(X), targets), wanted)
