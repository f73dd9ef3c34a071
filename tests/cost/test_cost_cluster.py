"""Clusters in files: JSON and TOML, what is refused, and the sources of the presets' numbers."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace

import pytest

from autotp.cost import Cluster
from autotp.cost.machines import presets
from autotp.cost.machines.presets import PRESETS
from autotp.errors import InputError
from tests.helpers.clusters import ROUND


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_file_gives_the_same_cluster(name, suffix, tmp_path):
    path = tmp_path / f"mine{suffix}"
    Cluster.preset(name).save(path)
    assert Cluster.load(path) == Cluster.preset(name)
    assert Cluster.resolve(str(path)) == Cluster.resolve(path) == Cluster.preset(name)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("text", ['a "quoted" name', "tab\tand\nline", "back\\slash", "\x7f\x00", "Größe 😀", ""])
def test_any_text_survives(text, suffix, tmp_path):
    odd = replace(ROUND, name=text, source=text, peak_flops={"float32": 1.0, text: 1e-300, "a.b": 1e300, "c": 3})
    odd.save(tmp_path / f"odd{suffix}")
    assert Cluster.load(tmp_path / f"odd{suffix}") == odd


def test_a_file_changes_a_preset(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text('preset = "a100"\ndevices_per_node = 4\ninter_bandwidth = 12_500_000_000\n')
    read, base = Cluster.load(path), Cluster.preset("a100")
    assert (read.name, read.devices_per_node, read.inter_bandwidth) == ("lab", 4, 12.5e9)
    assert (
        read == replace(base, name="lab", devices_per_node=4, inter_bandwidth=12.5e9, source=read.source)
        and "a100; changed: devices_per_node, inter_bandwidth" in read.source
    )


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("value", ["0", "-1.0", "nan", "inf", "-inf", '"fast"', "true"])
def test_a_bad_number_names_file_and_field(value, suffix, tmp_path):
    path = tmp_path / f"bad{suffix}"
    written = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(value, value) if suffix == ".json" else value
    ROUND.save(path)
    text = re.sub(r'("?inter_bandwidth"?\s*[:=]) [^\n,]*', rf"\1 {written}", path.read_text())
    path.write_text(text)
    with pytest.raises(InputError, match=rf"bad\{suffix}: Cluster.inter_bandwidth is .*finite number greater than 0"):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("none.toml", None, "cannot be read"),
        ("x.yaml", "", "must end in .json or .toml"),
        ("x.toml", "name = ", "is not TOML"),
        ("x.json", "{'name': 1}", "is not JSON"),
        ("x.json", "[1, 2]", "holds a list"),
        ("x.toml", 'name = "x"', "missing .*'device'"),
        ("x.toml", 'preset = "h100"\nnodes = 2', "unknown .'nodes'"),
        ("x.toml", 'preset = "tpu"', "'tpu' is not a preset"),
        ("x.json", '{"preset": 7}', "preset is 7: it must be one of h100"),
        ("x.toml", 'preset = "h100"\n[peak_flops]\nbfloat16 = 1e12', "Cluster.peak_flops .*'float32'"),
        ("x.toml", 'preset = "h100"\n[peak_flops]\nfloat32 = 0', r"Cluster.peak_flops\['float32'\]"),
    ],
)
def test_bad_files_are_refused(file, text, said, tmp_path):
    path = tmp_path / file
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        Cluster.load(path)
    assert file in str(error.value)


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    for path, said in [(tmp_path / "x.yaml", "must end"), (tmp_path / "no" / "x.json", "cannot be written")]:
        with pytest.raises(InputError, match=said):
            ROUND.save(path)


def unsourced(text: str) -> list[str]:
    """Lines that write a number but do not say where it is from, nor does the comment above them."""
    lines = [line.strip() for line in text.partition('"""\n\n')[2].splitlines()]
    code = [re.sub(r'"[^"]*"', "", line).partition("#")[0] for line in lines]
    numbers = [i for i, line in enumerate(code) if re.search(r"\b\d", line)]
    return [lines[i] for i in numbers if "#" not in lines[i] and not lines[i - 1].startswith("#")]


def test_every_number_of_the_presets_has_a_source():
    text = inspect.getsource(presets)
    assert not unsourced(text)
    bare = '"memory_bandwidth": 3.35e12,'
    assert f"{bare}  # datasheet" in text and unsourced(text.replace(f"{bare}  # datasheet", bare)) == [bare]


def test_json_text_is_readable(tmp_path):
    ROUND.save(tmp_path / "round.json")
    assert json.loads((tmp_path / "round.json").read_text()) == ROUND.to_dict()


# ---- unlike ranks ----------------------------------------------------------------------------------------------------


def test_unlike_ranks_have_a_machine_each():
    """`rank` gives it; what is not asked by rank is the worst of all."""
    pair = Cluster(ranks=["rtx4090", "rtx3060"])
    assert pair.rank(0) == Cluster.preset("rtx4090") and pair.rank(1) == Cluster.preset("rtx3060")
    assert (pair.name, pair.peak("bfloat16"), pair.memory_size) == ("rtx4090,rtx3060", 25.4e12, 12e9)
    assert (pair.intra_latency, pair.matmul_tile, pair.switch) == (5.7e-6, 64, False)
    assert Cluster.resolve("rtx4090, rtx3060") == pair and pair.known and hash(pair) == hash(Cluster.resolve(pair.name))
    assert not replace(pair, intra_bandwidth=1e9).known and replace(pair, intra_bandwidth=1e9).ranks == pair.ranks


@pytest.mark.parametrize(
    ("rates", "ratio"),
    [((2.0, 1.0), (2, 1)), ((2.95, 2.05, 1.0), (3, 2, 1)), ((1.5, 1.0), (3, 2)), ((7.1, 1.0), (7, 1))],
)
def test_rates_as_a_ratio(rates, ratio):
    ranks = [replace(ROUND, name=str(x), peak_flops={"float32": x * 1e9}) for x in rates]
    assert Cluster(ranks=ranks).ratio() == ratio and ROUND.ratio() == (1,)


def test_ranks_that_are_alike_are_the_cluster_of_one():
    assert Cluster(ranks=["rtx3090", "rtx3090"]) == Cluster.preset("rtx3090")
    assert Cluster.preset("rtx3090").rank(7) == Cluster.preset("rtx3090") and "ranks" not in ROUND.to_dict()


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_unlike_ranks_in_files(suffix, tmp_path):
    """Names where they are presets, all fields otherwise; a short file says the ranks alone."""
    lab = Cluster(ranks=["rtx4090", replace(ROUND, name="odd, and 'quoted'")], name="lab")
    lab.save(tmp_path / f"lab{suffix}")
    assert Cluster.load(tmp_path / f"lab{suffix}") == lab and lab.to_dict()["ranks"][0] == "rtx4090"
    (tmp_path / "short.toml").write_text('ranks = ["rtx4090", "rtx3090"]\n')
    assert Cluster.load(tmp_path / "short.toml").ranks == Cluster.resolve("rtx4090,rtx3090").ranks


def test_a_degree_over_unlike_ranks():
    """tp ranks follow each other; of two groups of them a plan is made for the worst of each place."""
    four = Cluster(ranks=["rtx4090", "rtx3090", "rtx4080", "rtx3090"])
    assert four.over(4) is four and ROUND.over(3) is ROUND
    two = four.over(2)
    assert two.rank(0).memory_size == 16e9 and two.rank(1) == Cluster.preset("rtx3090")
    assert Cluster(ranks=["rtx4090", "rtx3090"] * 2).over(2) == Cluster.resolve("rtx4090,rtx3090")
    with pytest.raises(InputError, match="tp=3 .*which says 4 ranks"):
        four.over(3)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("rtx4090", "Cluster.ranks is 'rtx4090': it must be a list"),
        (["rtx4090", "abacus"], "'abacus' is not a preset"),
        (["h100", Cluster.resolve("rtx4090,rtx3090")], "of single devices"),
        ([{"name": "x"}], "missing"),
        ([], "Cluster.device is None"),
    ],
)
def test_bad_ranks_are_refused(ranks, said):
    with pytest.raises(InputError, match=said):
        Cluster(name="x", ranks=ranks)
