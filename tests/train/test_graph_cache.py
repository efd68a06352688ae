"""Graphs that a run before has made: a step on them is the step, bit by bit, and everything that
decides a graph makes it another one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import batch, bert, gpt2, mlp
from torch import nn

import onward
from onward import cache_files, extend, graph_cache
from onward.capture import CapturedModule, CaptureRequest
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import Mesh
from onward.graph.graph import Graph
from onward.graph.printer import graph_text
from onward.journal import Journal
from onward.kernels import host
from onward.rewrite import PackedForward

pytestmark = pytest.mark.usefixtures("captures_kept")

Made = tuple[nn.Module, Any]  # a model, and what its step is called with


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    return tmp_path / "graphs"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.exists() else []


def steps(model: nn.Module, data: Any, count: int = 3, **options: Any) -> tuple[Any, list[str]]:
    """Losses, weights and state after some steps, and the stages that were compiled."""
    made = onward.TrainerOptions(seed=7, **options)
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-2), options=made)
    losses = [trainer.train_step(**data).loss for _ in range(count)]
    state = trainer.state_dict()
    return [losses, state["model"], state["optimizer"]], list(trainer.report()["compile_seconds"])


def same_bits(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def read(stages: list[str]) -> bool:
    """Whether all was read from the cache. Raises AssertionError where only some of it was."""
    made = {"forward", "differentiate", "updates", "step"} & set(stages)
    assert len(made) in (0, 4), made
    assert "graph cache" in stages
    return not made


def few_labels() -> dict[str, torch.Tensor]:
    data = batch(4, 12, "right")
    data["labels"][:, 1:] = -100
    return data


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt2": (gpt2, lambda: batch(2, 10)),
    "bert, few labels": (bert, few_labels),
    "bert, classes": (
        lambda: bert(classes=3),
        lambda: {**batch(4, 12, "right"), "labels": torch.tensor([0, 1, 2, 1])},
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05},
    "updates all the same": {"skip_nonfinite": False},
    "budget": {"memory_budget": 0.3},
    "no rows": {"disable": ("row_demand",)},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_kept_graph_gives_the_bits_of_a_fresh_one(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A stored graph gives a fresh one's bits, with dropout on, on packed rows and on all of
    them."""
    make, data = MODELS[name]
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    want, stages = steps(make(), data(), **OPTIONS[options])
    assert "graph cache" not in stages and not files(folder)
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    cold, stages = steps(make(), data(), **OPTIONS[options])
    assert not read(stages) and files(folder)
    warm, stages = steps(make(), data(), **OPTIONS[options])
    assert read(stages)
    same_bits(cold, want)
    same_bits(warm, want)


def test_reports_say_the_same_of_a_kept_graph() -> None:
    reports = []
    for _ in range(2):
        trainer = onward.Trainer(gpt2(), onward.optim.AdamW(lr=1e-3))
        data: Any = batch(2, 10)
        trainer.train_step(**data)
        reports.append(trainer.report())
    cold, warm = reports
    assert [{**p, "seconds": 0} for p in cold["passes"]] == warm["passes"]
    for field in ("near_misses", "launches", "predicted_peak_bytes", "rows", "notes"):
        assert cold[field] == warm[field], field


PROGRAM = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import tiny, onward
found = []
for model, data, options in (
    (tiny.gpt2(layers=1), tiny.batch(2, 10),
     {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}),
    (tiny.bert(layers=1), tiny.batch(4, 12, "right", ignored=True), {}),
):
    trainer = onward.Trainer(
        model, onward.optim.AdamW(lr=1e-2), options=onward.TrainerOptions(seed=3, **options)
    )
    losses = [float(trainer.train_step(**data).loss) for _ in range(4)]
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    stages = sorted(trainer.report()["compile_seconds"])
    found.append([losses, hashlib.sha256(bits).hexdigest(), stages])
print(json.dumps(found))
"""


def program() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(tiny.__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "random"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_processes_read_what_others_keep_and_may_all_write_at_once(folder: Path) -> None:
    """Two processes make and write one graph at the same time; a third one reads it."""
    writers = [program() for _ in range(2)]
    cold = [json.loads(p.communicate(timeout=240)[0]) for p in writers]
    kept = {path.name: path.read_bytes() for path in files(folder)}
    assert kept and all(path.suffix == ".graph" for path in files(folder))
    warm = json.loads(program().communicate(timeout=240)[0])
    for one, other, again in zip(*cold, warm, strict=True):
        assert one[:2] == other[:2] == again[:2]
        assert read(again[2])
    assert {path.name: path.read_bytes() for path in files(folder)} == kept


# ---- what makes another graph


def captured() -> CapturedModule:
    return Compiler(host(), (), Journal()).capture(CaptureRequest(gpt2(), (), batch(2, 10)))


def keys(folder: Path) -> set[str]:
    return {path.name for path in files(folder)}


def compile_step(folder: Path, make: Callable[[], nn.Module] = mlp, **changes: Any) -> set[str]:
    """Keys of the cache files that a training step has added."""
    before = keys(folder)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, **changes.pop("adam", {})}
    kind = changes.pop("optimizer", torch.optim.AdamW)
    model = make()
    optimizer = kind(model.parameters(), **settings) if kind is torch.optim.AdamW else kind(
        model.parameters(), lr=0.1
    )  # fmt: skip
    options = onward.TrainerOptions(**changes)
    trainer = onward.Trainer(model, optimizer, nn.functional.cross_entropy, options=options)
    trainer.train_step(torch.ones(3, 8), torch.tensor([0, 1, 2]))
    return keys(folder) - before


class Scaled(tiny.Mlp):
    """A tiny.Mlp with a number of its own in its code: the factor of its output."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def scaled(factor: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Scaled()
        model.factor = factor
        return model.train()

    return make


def frozen() -> nn.Module:
    model = mlp()
    model.inner.weight.requires_grad_(False)
    return model


OTHERS: dict[str, dict[str, Any]] = {
    "dropout": {"make": lambda: mlp(0.5)},
    "a number in the code": {"make": scaled(2.0)},
    "its last bit": {"make": scaled(2.0000002)},
    "a frozen parameter": {"make": frozen},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 1.0},
    "another norm": {"max_grad_norm": 1.0000001},
    "skip_nonfinite": {"skip_nonfinite": False},
    "a pass less": {"disable": ("gemm_add",)},
    "another optimizer": {"optimizer": torch.optim.SGD},
}


INPUTS: dict[str, dict[str, Any]] = {
    "a learning rate": {"adam": {"lr": 0.5}},
    "betas": {"adam": {"betas": (0.5, 0.999)}},
    "epsilon": {"adam": {"eps": 1e-3}},
    "weight decay": {"adam": {"weight_decay": 0.0}},
    "a seed": {"seed": 5},
}


def test_each_option_and_number_of_a_graph_makes_another_and_its_inputs_do_not(
    folder: Path,
) -> None:
    assert compile_step(folder) and not compile_step(folder)
    for name, changes in OTHERS.items():
        assert compile_step(folder, **dict(changes)), name
        assert not compile_step(folder, **dict(changes)), name
    for name, changes in INPUTS.items():
        assert not compile_step(folder, **dict(changes)), name


WORLD: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a version of torch": lambda m: m.setattr(torch, "__version__", "9.9.9"),
    "a version of another": lambda m: m.setattr(graph_cache, "_versions", lambda: ["1"]),
    "other sources": lambda m: m.setattr(graph_cache, "sources", lambda: "0"),
    "threads": lambda m: m.setattr(torch, "get_num_threads", lambda: 3),
    "an engine": lambda m: m.setenv("ONWARD_BLAS", "torch"),
    "the kernel library": lambda m: m.setattr("onward.kernels.fingerprint._digest", lambda *a: ""),
    "a processor": lambda m: m.setattr("onward.kernels.fingerprint._processor", lambda: "other"),
    "a kernel less": lambda m: m.setitem(extend.KERNELS, "Gelu", extend.KERNELS["Gelu"][1:]),
    "passes in another order": lambda m: m.setattr(
        "onward.rewrite.STEP", [*reversed(onward.rewrite.STEP)]
    ),
    "an environment's pass": lambda m: m.setenv("ONWARD_DISABLE", "noop"),
    "no library": lambda m: m.setenv("ONWARD_NATIVE", "0"),
}


@pytest.mark.parametrize("what", WORLD)
def test_whatever_else_decides_is_in_the_key(
    what: str, monkeypatch: pytest.MonkeyPatch, build: Callable[[str], None], folder: Path
) -> None:
    call = captured()
    Compiler(host(), (), Journal()).forward(call)
    before = keys(folder)
    Compiler(host(), (), Journal()).forward(call)
    assert len(before) == 1 and keys(folder) == before
    WORLD[what](monkeypatch)
    if what == "no library":
        build("0")
    Compiler(host(), (), Journal()).forward(call)
    assert len(keys(folder)) == 2, what


def squared(b: Any, dy: Any, y: Any, x: Any) -> list[Any]:
    return [b.Mul(dy, x)]


def unlike(call: Any) -> Any:
    return call.type(0)


def body(b: Any, xs: Any, attrs: Any) -> Any:
    return [b.Neg(xs[0])]


def bound(call: Any) -> Any:
    return call.x


def nothing(graph: Any) -> int:
    return 0


FOREIGN: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a kernel": lambda m: m.setitem(
        extend.KERNELS, "Gelu", (extend.Kernel("mine", bound), *extend.KERNELS["Gelu"])
    ),
    "a rule": lambda m: m.setitem(extend.rule_table.RULES, "Tanh", squared),
    "a pass": lambda m: m.setattr(
        "onward.rewrite.FORWARD", [*onward.rewrite.FORWARD, extend.Pass(nothing)]
    ),
    "an op": lambda m: m.setitem(extend.OPS, "Mine", extend.Op("Mine", unlike, body)),
    "changed sources": lambda m: m.setattr(graph_cache, "_LOADED", 0.0),
    "dumps": lambda m: m.setenv("ONWARD_DUMP", os.environ["ONWARD_CACHE"] + "/dump"),
    "checks": lambda m: m.setenv("ONWARD_CHECK", "1"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_where_others_have_a_say_nothing_is_kept_or_read(
    what: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    call = captured()
    kept = Compiler(host(), (), Journal()).forward(call)
    before = keys(folder)
    FOREIGN[what](monkeypatch)
    journal = Journal()
    with_others = Compiler(host(), (), journal).forward(call)
    assert keys(folder) == before
    assert "forward" in journal.seconds, "made, not read"
    assert len(with_others) == len(kept)


def test_stages_that_are_looked_at_are_made() -> None:
    call = captured()
    for journal in (Journal(), Journal(keep_stages=True), Journal(quiet=True)):
        Compiler(host(), (), journal).forward(call)
        assert "graph cache" in journal.seconds or "forward" in journal.seconds
        assert ("graph cache" in journal.seconds) == (not journal.quiet and not journal.stages)


def test_an_optimizer_of_a_registered_name_that_is_another_is_not_kept(folder: Path) -> None:
    compiler, call = Compiler(host(), (), Journal()), captured()
    registered = extend.OPTIMIZERS["SGD"]
    names = tuple(sorted(call.reached))
    for optimizer, files_more in ((dataclasses.replace(registered), 0), (registered, 1)):
        attributes = optimizer.attributes(torch.optim.SGD([torch.ones(1)]).param_groups[0])
        before = keys(folder)
        compiler.step(call.graph, Recipe((UpdateGroup(0, names, optimizer, attributes),)))
        assert len(keys(folder) - before) == files_more


def test_two_stages_of_one_graph_are_two_files(folder: Path) -> None:
    made: list[str] = []

    def same() -> Graph:
        made.append("same")
        return graph

    def nothing() -> None:
        made.append("nothing")

    graph, cache = captured().graph, Compiler(host(), (), Journal()).cache
    for _ in range(2):  # made, then read
        assert len(cache.get_or_make("same", graph, (), same)) == len(graph)
        assert cache.get_or_make("nothing", graph, (), nothing) is None
    assert made == ["same", "nothing"] and len(keys(folder)) == 2


def test_every_argument_of_every_verb_is_in_the_key(folder: Path) -> None:
    """Every argument is in the key, by keyword or by position, as a list or a tuple."""
    data = few_labels()
    compiler = Compiler(host(), (), Journal())
    call = compiler.capture(CaptureRequest(bert(), (), data))
    forward = compiler.forward(call)
    [loss], names = forward.signature.differentiated_outputs, sorted(call.reached)
    [scores] = forward.signature.results.values()
    others: list[tuple[str, list[Callable[[], Any]]]] = [
        ("rows of the loss", [
            lambda: compiler.pack(forward, [loss]), lambda: compiler.pack(forward, (loss,)),
            lambda: compiler.pack(outputs=[loss], forward=forward),
        ]),
        ("rows that are watched", [
            lambda: compiler.pack(forward, [loss], watch=True),
            lambda: compiler.pack(forward, [loss], True),
        ]),
        ("rows of all outputs", [lambda: compiler.pack(forward, [loss, scores])]),
        ("halves", [
            lambda: compiler.halves(forward, [loss], names),
            lambda: compiler.halves(forward, ends=(loss,), wrt=tuple(names)),
        ]),
        ("other ends", [lambda: compiler.halves(forward, [scores], names)]),
        ("other inputs", [lambda: compiler.halves(forward, [loss], names[1:])]),
    ]  # fmt: skip
    for name, spellings in others:
        before = keys(folder)
        first, *more = [spell() for spell in spellings]
        assert len(keys(folder) - before) == 1, name
        for again in more:
            assert type(again) is type(first), name
            if isinstance(first, PackedForward):
                assert again.reads == first.reads and bool(first.reads) == ("watched" in name)
                assert graph_text(again.graph) == graph_text(first.graph), name
            else:
                assert graph_text(again) == graph_text(first), name


def test_the_mesh_is_in_the_key(folder: Path) -> None:
    call = captured()
    meshes = (
        Mesh(), Mesh(("dp_shard",), (1,), (0,)), Mesh(("dp_shard",), (2,), (0,)),
        Mesh(("dp_shard",), (2,), (1,)), Mesh(("tp",), (2,), (1,)),
    )  # fmt: skip
    for number, mesh in enumerate(meshes, start=1):
        for _ in range(2):
            Compiler(host(), (), Journal(), mesh=mesh).forward(call)
            assert len(keys(folder)) == number, mesh


def test_a_step_runs_where_the_folder_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache_files, "folder", lambda: tmp_path / "file" / "graphs")
    _, stages = steps(gpt2(), batch(2, 10), count=1)
    assert not read(stages)
    assert cache_files.size() == cache_files.clear() == (0, 0)
