"""What README.md and the pages of use show is so: programs run, tables name what there is."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from tiny import batch, gpt2, mlp
from torch import nn
from torch.optim import lr_scheduler
from transformers import GPT2Config, GPT2LMHeadModel

import onward
from onward.cli import VERBS
from onward.environment import VARIABLES
from onward.module import accelerated
from onward.options import switch_lines
from onward.prepare.batch import bind_batch
from onward.recipes.bench_options import BenchConfig
from onward.recipes.chat_options import ChatConfig
from onward.recipes.explain_options import ExplainConfig
from onward.recipes.export_options import ExportConfig
from onward.recipes.option_sources import CONFIG
from onward.recipes.options import DataConfig, FinetuneConfig, PretrainConfig, VerifyConfig
from onward.recipes.report_options import ReportConfig
from onward.recipes.search_options import SearchConfig
from onward.recipes.sweep_file import SweepConfig
from onward.recipes.switches import RENAMED, SWITCHES
from onward.recipes.train_onnx_options import TrainOnnxConfig, VerifyOnnxConfig

ROOT = Path(__file__).resolve().parent.parent
README, TRAINER, COMMAND_LINE, ARCHITECTURE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/trainer.md", "docs/command-line.md", "docs/architecture.md")
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def table(page: str, heading: str) -> list[list[str]]:
    """The rows under this heading row, cell by cell."""
    _, _, rest = page.partition(f"{heading}\n")
    assert rest, f"no table {heading}"
    rows = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# ---- programs


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the Python programs of docs/trainer.md leave behind, run in their order."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"__name__": "trainer"}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trainer")
        patch.chdir(folder)
        programs = blocks(TRAINER, "python")
        assert len(programs) == 15
        for i, program in enumerate(programs):
            exec(compile(program, f"docs/trainer.md, program {i + 1}", "exec"), found)
            if i == 1:  # later programs use the same names
                found["evaluated"] = found["ids"], found["result"]
    found["folder"] = folder
    return found


def test_the_quick_starts_loss_falls(programs: dict[str, Any]) -> None:
    losses = programs["losses"]
    assert len(losses) >= 20
    assert losses[0] == pytest.approx(5.5, abs=0.3), "log(256) at random weights"
    # the bytes' frequencies alone give this many nats
    counts = torch.bincount(programs["data"]).double()
    share = counts[counts > 0] / counts.sum()
    unigram = float(-(share * share.log()).sum())
    assert sum(losses[-5:]) / 5 < unigram


def test_the_users_own_loop_runs_as_a_graph(programs: dict[str, Any]) -> None:
    held = accelerated(programs["mine"])
    assert held is not None and len(held.plan.launches) > 10
    assert 0 < float(programs["loss"].detach()) < 5.5


def test_the_quick_start_leaves_a_model_that_others_read(programs: dict[str, Any]) -> None:
    folder, model = programs["folder"] / "runs/mine", programs["model"]
    ids, result = programs["evaluated"]
    saved = GPT2LMHeadModel.from_pretrained(folder).eval()
    for name, parameter in model.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter)
    expected = saved(input_ids=ids, labels=ids)
    torch.testing.assert_close(result.loss, expected.loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        result.outputs["logits"], expected.logits.detach(), rtol=1e-4, atol=1e-4
    )
    session = ort.InferenceSession(str(folder / "model.onnx"))
    [logits] = session.run(["logits"], {"input_ids": ids[:3, :20].numpy()})
    torch.testing.assert_close(
        torch.from_numpy(logits), saved(ids[:3, :20]).logits.detach(), rtol=1e-4, atol=1e-4
    )


def test_the_difference_to_a_plain_loop_is_one_in_time_not_in_numbers() -> None:
    """Both sides of the diff are run; four lines of PyTorch go."""
    [diff] = blocks(README, "diff")
    lines = diff.splitlines()
    assert sum(line.startswith("-") for line in lines) == 4
    weights = []
    for side in "-+":
        model = gpt2(dropout=0.0, layers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        names: dict[str, Any] = {
            "onward": onward, "model": model, "optimizer": optimizer,
            "scheduler": lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
            "batches": [batch(4, 12, seed=seed) for seed in range(4)],
        }  # fmt: skip
        exec("\n".join(line[1:] for line in lines if line[0] in (" ", side)), names)
        weights.append(dict(model.named_parameters()))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    start = dict(gpt2(dropout=0.0, layers=1).named_parameters())
    for name, eager in weights[0].items():
        assert not torch.equal(eager, start[name])
        torch.testing.assert_close(weights[1][name], eager, rtol=1e-4, atol=2e-6)


# ---- tables


def test_commands_are_those_of_the_command_line() -> None:
    named = [
        re.findall(r"`onward ([\w-]+)`", row[0])
        for row in table(COMMAND_LINE, "| command | what it does |")
    ]
    assert [name for [name] in named] == list(VERBS)


def test_options_are_those_of_the_trainer() -> None:
    rows = [row[0].strip("`") for row in table(TRAINER, "| option | what it does |")]
    shown = [eval(f"dict({row})") for row in rows]
    fields = [field.name for field in dataclasses.fields(onward.TrainerOptions)]
    assert [name for options in shown for name in options] == fields
    for kind in (onward.TrainerOptions, onward.ModuleOptions, onward.FitOptions):
        assert "|\n".join(table_of(kind)) + "|\n" in TRAINER
    for options in shown:
        if "mesh" in options:  # needs processes; tests/train/test_ranks.py has them
            onward.TrainerOptions(**options)
            continue
        if "zero" in options:
            onward.TrainerOptions(mesh={"dp_shard": 2}, **options)
            continue
        if "sequence_parallel" in options:
            onward.TrainerOptions(mesh={"tp": 2}, **options)
            continue
        if "adasum" in options:
            onward.TrainerOptions(mesh={"dp_replicate": 2}, **options)
            continue
        if options.keys() & {"offload_optimizer", "offload_dir"}:  # they go together
            pair = {name: one[name] for one in shown for name in one if name.startswith("offload")}
            onward.TrainerOptions(**pair)
            continue
        onward.Trainer(mlp(), onward.optim.AdamW(), nn.functional.cross_entropy, options=options)


def table_of(kind: type[Any]) -> list[str]:
    """The rows of the table of these options, as docs/trainer.md has it."""
    return [
        f"| `{field.name}={field.metadata['example']}` | {field.metadata['doc']} "
        for field in dataclasses.fields(kind)
    ]


def test_switches_of_options_are_those_of_finetune() -> None:
    fields = FinetuneConfig.__dataclass_fields__
    lines = switch_lines()
    assert {name: fields[name].metadata["help"] for name in lines} == lines
    shared = {f.name for f in dataclasses.fields(onward.TrainerOptions)} & set(fields)
    assert shared <= set(lines)


def test_variables_are_those_that_are_read() -> None:
    rows = [row[0].strip("`") for row in table(COMMAND_LINE, "| variable | what it does |")]
    assert sorted(row.partition("=")[0] for row in rows) == sorted(VARIABLES)


def test_extras_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    named = [row[0].strip("`") for row in table(page, "| extra | installs | for |")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # for whoever changes the code, and hf, ort and viz
    inside = {"test", "sweep", "oracles", "keras-test", "dev", "dist", "docs", "places", "all"}
    assert sorted(named) == sorted(set(project["optional-dependencies"]) - inside)


OPTIONS = (
    VerifyConfig, DataConfig, PretrainConfig, ExplainConfig, BenchConfig, ChatConfig, ExportConfig,
    SweepConfig, ReportConfig, SearchConfig, TrainOnnxConfig, VerifyOnnxConfig,
)  # fmt: skip


def test_switches_that_are_named_exist() -> None:
    known = {
        *(name for kind in OPTIONS for name in kind.__dataclass_fields__), *RENAMED,
        *SWITCHES, CONFIG, "help", "quick", "measure",
        "clear", "nproc_per_node",  # of torchrun
    }  # fmt: skip
    named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", README + TRAINER + COMMAND_LINE)
    assert named and {name for name in named if name.replace("-", "_") not in known} == set()


def test_the_tree_is_the_tree() -> None:
    _, _, rest = ARCHITECTURE.partition("## The tree\n\n```\n")
    path: list[str] = []
    shown = []
    for line in rest.partition("```")[0].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        for each in re.split(r",\s+", re.split(r"\s{2,}", line.strip())[0]):
            path = [*path[:depth], each.rstrip("/")]
            assert ROOT.joinpath(*path).exists(), f"{'/'.join(path)} is not there"
            shown.append("/".join(path))
        assert name
    package = ROOT / "src" / "onward"
    parts = {
        f"src/onward/{p.name}" for p in package.iterdir() if p.suffix == ".py" or p.is_dir()
    } - {"src/onward/__pycache__"}
    assert parts <= set(shown), "every part of the package has its line"


def test_the_law_in_the_document_is_the_law_in_the_test() -> None:
    from test_architecture import LEVELS

    [law] = re.findall(r"^errors < .*?cli$", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    written = [frozenset(re.findall(r"\w+", part)) for part in law.split("<")]
    kept = {"onward"}  # the public face
    assert written == [level - kept for level in LEVELS if level - kept]


# ---- statements

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    classes = {
        name
        for name in lr_scheduler.__all__
        if inspect.isclass(getattr(lr_scheduler, name)) and name != "LRScheduler"
    }
    assert classes == set(SCHEDULERS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_works(name: str) -> None:
    """Made before the Trainer and after it; the oracle is eager PyTorch."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    runs = []
    for how in ("eager", "before", "after"):
        torch.manual_seed(1)
        model = nn.Linear(8, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer) if how != "after" else None
        trainer = None
        if how != "eager":
            trainer = onward.Trainer(model, optimizer, nn.functional.cross_entropy)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(4):
            rates.append(optimizer.param_groups[0]["lr"])
            if trainer is not None:
                step = trainer.train_step(x, y)
                loss = step.loss
                assert step.lr == rates[-1]
            else:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            with warnings.catch_warnings():
                # SequentialLR and ChainedScheduler warn of themselves, with eager PyTorch too
                warnings.filterwarnings("ignore", "The epoch parameter")
                if name == "ReduceLROnPlateau":
                    scheduler.step(1.0)
                else:
                    scheduler.step()
        runs.append((rates, model.weight.detach()))
    assert len(set(runs[0][0])) > 1, "the rate moves"
    for rates, weight in runs[1:]:
        assert rates == runs[0][0]
        torch.testing.assert_close(weight, runs[0][1], rtol=1e-5, atol=1e-6)


def test_the_readmes_budget_can_be_had_on_the_readmes_model() -> None:
    """GPT-2, 4 layers, 512 wide, vocabulary 50257, 4 x 256 tokens: planned, not run."""
    assert "| GPT-2 (4 layers, 512 wide, vocabulary 50257, 4 x 256 tokens" in README
    rows = table(TRAINER, "| option | what it does |")
    [row] = [row for row in rows if "memory_budget" in row[0]]
    [fraction] = map(float, re.findall(r"`(0\.\d+)`", row[1]))
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8))
    model = model.to_empty(device="cpu")
    trainer = onward.Trainer(model, onward.optim.AdamW())
    ids = torch.zeros(4, 256, dtype=torch.int64)
    call = bind_batch((), {"input_ids": ids, "labels": ids}, False)
    step = trainer._steps.training(model, None, call)
    dims = step.captured.dims(call.tensors)
    assert dims is not None and dims == {"B": 4, "T": 256}
    graph, compiler = step.graphs.step, step.graphs.compiler
    outputs = ["loss", *graph.signature.updated.values()]
    most, less = (compiler.plan(graph, outputs, dims, b).peak for b in (None, fraction))
    with pytest.raises(onward.OnwardError) as error:
        compiler.plan(graph, outputs, dims, 2)
    least = int(re.findall(r"memory_budget=(\d+) or more", str(error.value))[0])
    assert least > fraction * most, "of the whole peak the fraction could not be had"
    assert least <= less <= least + fraction * (most - least) < most
