"""docs/migration: its programs run, what it names of Onward exists, and no option is left out."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import foreign_options
import pytest
import tiny
import torch

import onward
from onward.cli import VERBS
from onward.environment import VARIABLES
from onward.integrations.torch_compile import CompiledGraph, onward_backend, register
from onward.module import accelerated
from onward.recipes.options import VerifyConfig
from onward.recipes.switches import RENAMED, SWITCHES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "migration"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
FROM = [name for name in PAGES if name.startswith("from-")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def rows(page: str) -> list[list[str]]:
    """The cells of each row of all tables of a page, without headings."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = {i for i, line in enumerate(lines) if set(line) <= set("|- :")}
    return [row for i, row in enumerate(cells) if not {i, i + 1} & rules]


def quoted(text: str) -> list[str]:
    """The texts between backquotes, without blocks of code."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


# ---- programs


def names() -> dict[str, Any]:
    """The names that the programs of the pages find defined."""
    model = tiny.gpt2(dropout=0.0, layers=1, use_cache=False)
    batches = [{"input_ids": tiny.tokens(2, 8, seed=s)} for s in range(4)]
    batches = [{**b, "labels": b["input_ids"]} for b in batches]
    return {
        "torch": torch, "onward": onward, "model": model, "batches": batches,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "dataset": [{k: v[0] for k, v in b.items()} for b in batches],
        "expected": None,
    }  # fmt: skip


def plus(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", "+"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("page", FROM)
def test_the_changed_loop_trains(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changed lines of the page train in the loop around them, which is the page's own."""
    monkeypatch.chdir(tmp_path)
    [diff] = blocks(PAGES[page], "diff")
    assert sum(line.startswith("-") for line in diff.splitlines()) >= 1
    if page == "from-optimum" and find_spec("accelerate") is None:
        pytest.skip("transformers' Trainer needs the package accelerate")
    found = names()
    before = {n: p.detach().clone() for n, p in found["model"].named_parameters()}
    exec(compile(plus(diff), f"{page}, after the change", "exec"), found)
    model = found["model"]
    moved = [not torch.equal(before[n], p) for n, p in model.named_parameters()]
    assert any(moved)
    trainer = found.get("trainer")
    if isinstance(trainer, onward.Trainer):
        assert trainer.report() and trainer.updates == 2
    else:
        held = accelerated(getattr(model, "module", model))
        assert held is not None and held._last is not None, "it ran as a graph"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("page", FROM)
def test_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    register()
    torch._dynamo.reset()
    programs = blocks(PAGES[page], "python")
    assert programs
    found = names()
    if page == "from-orttrainer":
        found["trainer"] = onward.Trainer(found["model"], found["optimizer"])
    for i, program in enumerate(programs):
        exec(compile(program, f"{page}, program {i + 1}", "exec"), found)
    torch._dynamo.reset()


# ---- what is said of Onward


def calls(page: str) -> list[str]:
    return [
        text
        for text in quoted(PAGES[page])
        if re.match(r"(?:onward\.)?(?:TrainerOptions|ModuleOptions|accelerate)\(", text)
    ]


@pytest.mark.parametrize("page", FROM)
def test_options_that_are_shown_can_be_given(page: str) -> None:
    shown = calls(page)
    assert shown
    model = torch.nn.Linear(2, 2)
    known = {
        "onward": onward, "TrainerOptions": onward.TrainerOptions, "accelerate": onward.accelerate,
        "ModuleOptions": onward.ModuleOptions, "model": model, "make": lambda: model,
    }  # fmt: skip
    for text in shown:
        found = eval(text, known)
        assert found is model or dataclasses.is_dataclass(found), text


def inner(where: Any, name: str) -> Any:
    """The submodule or attribute of this name. Raises AttributeError."""
    package = (
        inspect.ismodule(where) and where.__spec__ and where.__spec__.submodule_search_locations
    )
    if package and find_spec(f"{where.__name__}.{name}") is not None:
        importlib.import_module(f"{where.__name__}.{name}")
    return getattr(where, name)


@pytest.mark.parametrize("page", PAGES)
def test_names_of_onwards_exist(page: str) -> None:
    text = PAGES[page]
    for path in re.findall(r"(?<![\w./-])onward((?:\.\w+)+)", text):
        where: Any = onward
        for name in path.strip(".").split("."):
            where = inner(where, name)
    for name in re.findall(r"\btrainer\.(?!md\b)(\w+)", text):
        if page != "from-optimum" or name != "train":  # transformers' own
            assert hasattr(onward.Trainer, name) or name in ("optimizer",), name
    for name in re.findall(r"\bstep\.(\w+)", text):
        assert name in {f.name for f in dataclasses.fields(onward.StepResult)}, name
    for name in re.findall(r"\bONWARD_\w+", text):
        assert name in VARIABLES, name
    for name in re.findall(r"`onward ([a-z]+)\b", text):
        assert name in VERBS, name
    named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)
    switches = {*VerifyConfig.__dataclass_fields__, *RENAMED, *SWITCHES, "measure"}
    assert {name.replace("-", "_") for name in named} <= switches


def test_what_is_not_there_yet_is_said_of_what_is_not_there() -> None:
    """An option that a page calls missing must be missing; once it comes, the page is wrong."""
    fields = {
        field.name
        for kind in (onward.TrainerOptions, onward.ModuleOptions)
        for field in dataclasses.fields(kind)
    }
    absent = [row for page in FROM for row in rows(PAGES[page]) if "**not there yet" in row[1]]
    assert len(absent) > 10, "the tables are read"
    for row in absent:
        for key in quoted(row[0]):
            assert re.split(r"[.(]", key)[-1].strip(")") not in fields, key
    assert not {"loss_scaler", "precision"} & fields


def test_the_arithmetic_of_both_ways_in_is_as_the_page_says() -> None:
    ids, labels = tiny.tokens(8, 32), torch.full((8, 32), -100)
    mask = torch.ones(8, 32, dtype=torch.int64)
    mask[2:, 6:] = 0
    labels[:, 2] = ids[:, 2]
    shares = []
    for as_backend in (False, True):
        model: Any = tiny.bert(dropout=0.1)
        made: list[CompiledGraph] = []
        if as_backend:
            torch._dynamo.reset()
            model = torch.compile(model, backend=keeping(made))
        else:
            onward.accelerate(model)
        for _ in range(3):  # those before have told that nobody reads the logits
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        if as_backend:
            [bound] = [bound for graph in made for bound in graph._bound.values()]
            model = bound
        held = accelerated(model)
        assert held is not None
        shares.append(round(100 * held.report()["rows"]["arithmetic_done"]))
    torch._dynamo.reset()
    page = " ".join(PAGES["from-torch-compile"].split())
    said = re.findall(r"computes (\d+) % of the arithmetic .*? and (\d+) % as a backend", page)
    assert said == [tuple(map(str, shares))]


def keeping(made: list[CompiledGraph]) -> Any:
    def backend(*given: Any, **settings: Any) -> Any:
        found = onward_backend(*given, **settings)
        assert isinstance(found, CompiledGraph)
        made.append(found)
        return found

    return backend


# ---- what is said of the others


@pytest.mark.parametrize("page", foreign_options.OPTIONS)
def test_every_option_of_the_other_library_has_its_row(page: str) -> None:
    found = {key for row in rows(PAGES[page]) for key in quoted(row[0])}
    missing = [key for key in foreign_options.OPTIONS[page] if key not in found]
    assert not missing, missing


def test_every_page_has_a_list() -> None:
    assert sorted(foreign_options.OPTIONS) == sorted(FROM)


@pytest.mark.parametrize("page", FROM)
def test_every_row_says_something(page: str) -> None:
    for row in rows(PAGES[page]):
        assert len(row) >= 2 and all(row[:2]), row


def test_arguments_of_torch_compile_are_those_of_the_installed_one() -> None:
    arguments = set(inspect.signature(torch.compile).parameters)
    listed = {key for row in rows(PAGES["from-torch-compile"]) for key in quoted(row[0])}
    assert arguments <= listed


@pytest.mark.parametrize("key", foreign_options.TORCH_SETTINGS)
def test_settings_of_torch_that_are_named_exist(key: str) -> None:
    where: Any = torch
    for name in key.split(".")[1:]:
        where = inner(where, name)
