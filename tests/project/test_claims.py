"""What README.md and docs/ claim is still so: requirements, options, names, and the lists of what is not there yet."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from torch import Tensor, nn

import autotp
from autotp.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(p.relative_to(ROOT)): p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

# ---- requirements ----------------------------------------------------------------------------------------------------


def required(readme: str) -> set[str]:
    """What README says that autotp needs, beside Linux."""
    sentence = re.search(r"^Needs Linux, (.*?);", readme, re.MULTILINE | re.DOTALL)
    assert sentence is not None
    return set(re.split(r", | and ", re.sub(r"\s*\(.*?\)", "", sentence.group(1)).replace("\n", " ")))


def test_the_requirements_are_those_of_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split(r"[<>=~! ]", line)[0] for line in listed}
    assert required(PAGES["README.md"]) == needed
    assert (
        required("Needs Linux, torch, networkx (graphs) and sympy; no more.")
        == {"torch", "networkx", "sympy"}
        != needed
    )


# ---- options ---------------------------------------------------------------------------------------------------------

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
PYTHON = re.compile(r"^```python.*?^```$", re.MULTILINE | re.DOTALL)
OTHERS = {  # options of other programs that pages show
    "torchrun": "--nnodes --nproc-per-node --rdzv-id --rdzv-backend --rdzv-endpoint --rdzv-conf --standalone "
    "--max-restarts",
    "sbatch": "--nodes --ntasks-per-node --gpus-per-node --cpus-per-task --time --requeue --open-mode",
    "py-spy": "--pid",
}


def parsers() -> Iterator[str]:
    """Every option of the command line, and of the scripts in examples/ and benchmarks/."""
    commands: Any = typer.main.get_command(app)
    for command in [commands, *commands.commands.values()]:
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)
    yield "--help"
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("add", "parser.add_argument"):
                names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
                yield from names
                if "BooleanOptionalAction" in ast.unparse(node):
                    yield from (f"--no-{name.removeprefix('--')}" for name in names)


def options(page: str) -> set[str]:
    """Options that a page names in code: outside of its Python."""
    return set(OPTION.findall(PYTHON.sub("", page)))


def test_every_option_on_a_page_exists():
    known = {*parsers(), *" ".join(OTHERS.values()).split()}
    unknown = {f"{name}: {option}" for name, page in PAGES.items() for option in options(page) - known}
    assert unknown == set()
    assert sum(len(options(page)) for page in PAGES.values()) > 60  # they are read at all
    assert options("`autotp plan --nonsense 3` and train.py --checkpoint") - known == {"--nonsense", "--checkpoint"}


# ---- names -----------------------------------------------------------------------------------------------------------

NAMES = re.compile(r"`(autotp|sharded|plan)\.([A-Za-z_][\w.]*\w)([(`])")
FILES = ("json", "pt", "toml")  # plan.json is a file


def has(owner: Any, name: str) -> bool:
    """Whether an object has an attribute, or a class says that its objects do."""
    fields = {field for kind in getattr(owner, "__mro__", ()) for field in getattr(kind, "__annotations__", ())}
    return hasattr(owner, name) or name in fields


def exists(start: str, path: str) -> bool:
    """Whether `autotp.a.b`, `sharded.a` or `plan.a` is a name that there is."""
    parts = path.split(".")
    owner: Any = {"autotp": autotp, "sharded": autotp.ShardedModule, "plan": autotp.Plan}[start]
    if start == "autotp":
        for end in range(len(parts), 0, -1):
            try:
                owner, parts = import_module(".".join(["autotp", *parts[:end]])), parts[end:]
                break
            except ImportError:
                continue
    return not parts or has(owner, parts[0])


def strangers(page: str) -> set[str]:
    """Names in code font that there are not; operators `autotp::x` are written with a dot too."""
    found = {(start, path) for start, path, _ in NAMES.findall(page) if path.rpartition(".")[2] not in FILES}
    missing = {(start, path) for start, path in found if not exists(start, path)}
    return {f"{start}.{path}" for start, path in missing if not hasattr(torch.ops.autotp, path)}


def test_every_name_on_a_page_exists():
    import_module("autotp.kernels.operators")  # whose operators rules.md lists
    assert {name: strangers(page) for name, page in PAGES.items() if strangers(page)} == {}
    page = (
        "`autotp.compile(model)`, `autotp.compyle(model)`, `sharded.save_all(x)`, `plan.explane`, `sharded.generate()`"
    )
    assert strangers(page) == {"autotp.compyle", "sharded.save_all", "plan.explane"}


# ---- keywords --------------------------------------------------------------------------------------------------------

KEYWORD = re.compile(r"`([a-z_]+)=[^`=]*`")


FOREIGN = {  # keywords of other programs, of a model's own call, and of operators in a graph, that pages name
    "torch": "create_graph foreach fullgraph fused weights_only",
    "transformers": "cache_implementation save_only_model stop_strings token_healing tokenizer tp_plan use_cache",
    "transformers' trainer": "gradient_checkpointing offload prediction_loss_only",
    "accelerate": "parallelism_config",
    "lightning, peft": "ckpt_path is_trainable strategy",
    "inputs": "labels targets",
    "models of other libraries": "is_causal lstm",
    "operators": "group",
    "rules": "localise",
}


def parameters(owner: Any) -> Iterator[str]:
    """The parameters of what a module makes public: of functions, and of the methods of classes."""
    for each in (getattr(owner, name) for name in owner.__all__):
        for member in (each, *(vars(each).values() if inspect.isclass(each) else ())):
            f = getattr(member, "__func__", member)
            with contextlib.suppress(TypeError, ValueError):  # no function, or one of C
                yield from inspect.signature(f).parameters


def test_every_keyword_on_a_page_exists():
    known = {*parameters(autotp), *" ".join(FOREIGN.values()).split()}

    def unknown(page: str) -> set[str]:
        return set(KEYWORD.findall(page)) - known

    assert {name: unknown(page) for name, page in PAGES.items() if unknown(page)} == {}
    assert sum(len(KEYWORD.findall(page)) for page in PAGES.values()) > 100  # they are read at all
    assert unknown('`check=True`, `outputs="loss"`, `chekc=True`, `output="loss"`') == {"chekc", "output"}


# ---- what a page shows ----------------------------------------------------------------------------------------------


def shown(page: str) -> dict[str, int]:
    """Lines of Python of each section of a page."""
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    return {title: sum(b.count("\n") - 1 for b in PYTHON.findall(text)) for title, text in sections.items()}


def test_an_integration_takes_at_most_twenty_lines():
    libraries, _, plans = PAGES["docs/integrations.md"].partition("\n## A plan for torch and transformers\n")
    found = shown(libraries)  # the last two sections have a model of their own, and are of plans
    assert plans
    assert len(found) > 8 and max(found.values()) > 9
    assert {title: lines for title, lines in found.items() if lines > 20} == {}
    assert shown("\n## A\n```python quoted\none\ntwo\n```\n\n## B\ntext") == {"A": 2, "B": 0}


# ---- not yet ---------------------------------------------------------------------------------------------------------


def raises(f: Callable[[], Any]) -> bool:
    try:
        f()
    except (autotp.AutoTPError, TypeError):
        return True
    return False


def lacks(f: Callable[..., Any], *names: str) -> bool:
    return not set(names) & set(inspect.signature(f).parameters)


class Branch(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = super().forward(input)
        return y if y.sum() > 0 else -y


def branch_fails() -> bool:
    return raises(lambda: autotp.plan(Branch(4, 4), 2, example_inputs=torch.ones(2, 4)))


def decoder() -> tuple[Any, Tensor]:
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)  # type: ignore[arg-type]
    return transformers.GPT2LMHeadModel(config).eval(), torch.arange(4)[None]


def no_compared_cache() -> bool:
    model, ids = decoder()
    sharded = autotp.compile(model, 1, example_inputs={"input_ids": ids}, compare="first")
    return raises(lambda: sharded(input_ids=ids, use_cache=True))


LISTS = {"README.md": "Not yet", "docs/guide.md": "What is not there yet", "docs/training.md": "What is not supported"}
LISTS |= {"docs/generation.md": "What is not there"}
INTEROP = "tests/runtime/interop"
GENERATING = "tests/runtime/generation/test_generate_options.py"
TRAINER = f"{INTEROP}/frameworks/test_trainer.py::test_all_of_the_trainer_is_that_of_one_process"
GRADIENTS = f"{INTEROP}/test_tools_gradients.py::test_what_is_not_supported_is_refused_with_a_sentence"
REFUSALS = f"{INTEROP}/test_refusals.py::test_each_has_a_sentence_of_its_own"
# A few words of each item -> whether it is still so; or the test that says so; None for amounts, and what takes a GPU.
STILL: dict[str, Callable[[], bool] | str | None] = {
    "runs over tp alone": (
        "tests/runtime/generation/test_batching.py::test_what_the_engine_would_leave_out_is_refused_by_name"
    ),
    "weights or activations cannot be captured": branch_fails,
    "its times are predictions": None,
    "`torch.compile(sharded)` does not work": REFUSALS,
    "takes several times as long as torch's own": None,
    "Example inputs have no cache": "tests/models/test_models.py::test_a_cache_passed_in_is_refused",
    "weights, activations or random numbers cannot": branch_fails,
    "ranks plans; it does not predict times": None,
    "(axes.md#ep-experts-over-dp) has limits": "tests/proof/test_travel.py::test_what_does_not_go_with_it_is_refused",
    "without a rule": "tests/rules/test_rule_table.py::test_operators_without_a_rule_are_still_without",
    "[pipeline stages](axes.md#pp-pipeline-stages) torch's schedules have fixed sizes": (
        "tests/runtime/stages/test_stages.py::test_what_cannot_be_is_said_on_all_ranks"
    ),
    "`DistributedDataParallel` on a sharded module is refused": REFUSALS,
    "that were not told which ranks share a batch": TRAINER,
    "`create_graph=True` is refused with dp": GRADIENTS,
    "of `generate()`, which drops options": f"{GENERATING}::test_a_tokenizer_is_for_generate_alone",
    "`token_healing=True`, an assistant": f"{GENERATING}::test_a_tokenizer_is_for_generate_alone",
    "Caches that move between devices": None,
    "`compare=` of a call with a cache": no_compared_cache,
}


def items(page: str, heading: str) -> list[str]:
    """The items of a section's list, each in one line."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    return [" ".join(item.split("\n\n")[0].split()) for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]


def untied(listed: list[str]) -> list[str]:
    return [item for item in listed if sum(words in item for words in STILL) != 1]


def test_every_item_of_a_not_yet_list_is_tied_to_a_check():
    listed = [item for name, heading in LISTS.items() for item in items(PAGES[name], heading)]
    assert untied(listed) == []
    assert [words for words in STILL if not any(words in item for item in listed)] == []  # nor more than there are
    assert untied(items("## Not yet\n\n- No tea.\n- No\n  coffee.\n\nMore.\n", "Not yet")) == ["No tea.", "No coffee."]


@pytest.mark.parametrize("check", list(dict.fromkeys(c for c in STILL.values() if callable(c))))
def test_what_is_not_there_yet_is_still_not_there(check):
    assert check()


def test_the_tests_that_say_so_are_there():
    named = [check for check in STILL.values() if isinstance(check, str)]
    gone = [name for name in named if f"\ndef {name.split('::')[1]}(" not in (ROOT / name.split("::")[0]).read_text()]
    assert gone == [] and len(named) > 3


def test_what_has_come_is_noticed():
    """The same kinds of check on what works."""
    assert not lacks(autotp.compile, "dp") and not raises(
        lambda: autotp.plan(nn.Linear(4, 4), 2, example_inputs=torch.ones(2, 4))
    )
