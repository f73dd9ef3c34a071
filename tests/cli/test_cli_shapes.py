"""Known shapes: public configs that come with autotp, so that a plan is shown without a file."""

from __future__ import annotations

import re

import pytest

from autotp.cli.flags import ModelOptions, known_shapes
from autotp.cli.models import load

SMALL = ("--set", "num_hidden_layers=2", "--set", "vocab_size=1024", "--set", "hidden_size=512", "--json")


@pytest.mark.parametrize("name", known_shapes())
def test_a_shape_has_the_published_number_of_parameters(name):
    shape = known_shapes()[name]
    assert shape.keys() == {"source", "parameters", "config"} and re.fullmatch(r"[a-z0-9.-]+", name)
    assert shape["source"].startswith("https://")
    loaded = load(name, ModelOptions(batch=1, seq=16))
    assert next(loaded.model.parameters()).is_meta
    assert type(loaded.model).__name__ == shape["config"]["architectures"][0]
    assert sum(p.numel() for p in loaded.model.parameters()) == shape["parameters"]


def test_a_name_is_priced_for_real_sizes_unless_others_are_asked_for():
    assert load("llama-3-8b", ModelOptions()).sizes == "input_ids (8 x 4096)"
    assert load("gpt2", ModelOptions()).sizes == "input_ids (8 x 1024)"
    assert load("gpt2", ModelOptions(batch=3, seq=32)).sizes == "input_ids (3 x 32)"
    assert load("gpt2", ModelOptions(), real=True).sizes == "input_ids (2 x 16)"


def test_plan_and_sweep_take_a_name(run):
    planned = run("plan", "llama-3-8b", "--tp", 2, *SMALL)
    assert planned.exit_code == 0 and '"LlamaForCausalLM"' in planned.stdout
    swept = run("sweep", "llama-3-8b", "--tp", "1,2", *SMALL)
    assert swept.exit_code == 0 and '"best"' in swept.stdout


def test_a_file_of_that_name_comes_first(run, tmp_path):
    (tmp_path / "gpt2").write_text("{}")
    result = run("plan", "gpt2")
    assert result.exit_code == 2 and "no model_type" in result.output


def test_an_unknown_name_suggests_the_nearest_and_lists_all(run):
    output = run("plan", "Llama3-8b").output
    assert "Did you mean llama-3-8b" in output and all(name in output for name in known_shapes())
    assert "Did you mean" not in run("plan", "nowhere/at/all").output
