"""docs/from_scratch.md shows the whole of examples/from_scratch.py and what it prints; the program
trains as PyTorch does, with its passes or without, and no two values that live at once share
memory."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "examples" / "from_scratch.py").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "from_scratch.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "examples" / "from_scratch.py"
    spec = importlib.util.spec_from_file_location("from_scratch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "from_scratch", module)
    spec.loader.exec_module(module)
    return module


# ---- the page


def test_the_page_shows_the_file_from_its_imports_to_its_end() -> None:
    shown = lines("".join(blocks("python")))
    assert len(blocks("python")) > 8
    assert shown == lines(SOURCE[SOURCE.index("from __future__") :])


def test_the_program_prints_what_the_page_says(scratch: ModuleType) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        scratch.main()
    [text] = blocks("text")
    assert printed.getvalue() == text


def test_each_part_names_a_stage_and_each_link_leads_somewhere() -> None:
    sections = re.findall(r"^# ---- (\w+)", SOURCE, re.MULTILINE)
    stages = sections[: sections.index("beside")]
    assert len(stages) == 8
    assert [stage for stage in stages if not (ROOT / "src" / "onward" / stage).is_dir()] == []
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert len(links) > 10
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


def test_nothing_but_numpy_is_imported_until_the_comparison() -> None:
    imported = re.findall(r"^ *(?:import|from) (\w+)", SOURCE.partition("# ---- beside")[0], re.M)
    assert set(imported) - set(sys.stdlib_module_names) == {"numpy"}


# ---- the numbers


@pytest.mark.parametrize("fused", [True, False])
def test_losses_and_weights_are_those_of_pytorch(
    fused: bool, scratch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr(scratch, "FORWARD", [])
    loss, weight = scratch.main(steps=20)
    assert loss < 1e-6
    assert weight < 2e-6


def deep(x: Any, target: Any, w: Any, b: Any) -> Any:
    """Values that are read twice, a bias that is broadcast twice."""
    h = (x @ w + b).relu()
    h = (h @ w + b).relu() + h
    return (h + b).cross_entropy(target)


def test_gradients_that_meet_are_added(scratch: ModuleType) -> None:
    """The first moment after one step is a tenth of the gradient."""
    x, w, b = torch.randn(7, 5), torch.randn(5, 5), torch.randn(5)
    target = torch.eye(5)[torch.arange(7) % 5]
    arrays = {"w": w.numpy().copy(), "b": b.numpy().copy()}
    batch = {"x": x.numpy(), "target": target.numpy()}
    trainer = scratch.Trainer(deep, arrays, batch)
    loss = trainer.train_step(**batch)

    w.requires_grad_()
    b.requires_grad_()
    h = (x @ w + b).relu()
    h = (h @ w + b).relu() + h
    eager = torch.nn.functional.cross_entropy(h + b, target)
    eager.backward()
    assert loss == pytest.approx(eager.item(), rel=1e-6)
    for name, p in {"w": w, "b": b}.items():
        assert p.grad is not None
        moment = torch.from_numpy(trainer.tensors[f"{name}.exp_avg"])
        torch.testing.assert_close(10 * moment, p.grad, rtol=1e-5, atol=1e-6)


def test_each_kernel_computes_its_ops_body(scratch: ModuleType) -> None:
    random = np.random.default_rng(0)
    x, w, b = (random.random(s, np.float32) + 0.5 for s in ((3, 4), (4, 5), (5,)))
    calls: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "Add": ([x, x[0]], {}), "Sub": ([x, x[0]], {}), "Mul": ([x, 0.5], {}), "Div": ([x, x], {}),
        "Sqrt": ([x], {}), "MatMul": ([x.T, w.T], {"ta": True, "tb": True}),
        "LinearRelu": ([x, w - 1, b], {}),
    }  # fmt: skip
    assert set(calls) == set(scratch.KERNELS)
    for name, (inputs, attrs) in calls.items():
        op = scratch.OPS[name]
        shape = op.shape(*[getattr(x, "shape", ()) for x in inputs], **attrs)
        out = np.full(shape, np.nan, np.float32)
        scratch.KERNELS[name](*inputs, out=out, **attrs)
        np.testing.assert_allclose(out, op.body(*inputs, **attrs), rtol=1e-6, err_msg=name)


# ---- the memory


@pytest.fixture
def trainer(scratch: ModuleType) -> Any:
    random = np.random.default_rng(0)
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 4), "b2": (4,)}
    parameters = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    batch = {"x": random.random((64, 16), np.float32), "target": np.eye(4, dtype="f4")[[0] * 64]}
    return scratch.Trainer(scratch.mlp, parameters, batch)


def test_values_that_live_at_once_share_no_byte(trainer: Any) -> None:
    plan = trainer.plan
    nodes = plan.graph.nodes
    for i, node in enumerate(nodes):
        later = [x for reader in nodes[i:] for x in reader.inputs]
        used = [node.output, *later, trainer.loss]
        written = {earlier.output for earlier in nodes[: i + 1]}
        owner: dict[int, Any] = {}
        for y in set(used) & written & set(plan.offsets):
            assert plan.offsets[y] + 4 * int(np.prod(y.shape)) <= plan.nbytes
            for byte in range(plan.offsets[y], plan.offsets[y] + 4 * int(np.prod(y.shape)), 4):
                assert owner.setdefault(byte, y) is y, f"{owner[byte]} and {y} at launch {i}"


def test_results_lie_in_one_arena_or_in_the_callers_arrays(trainer: Any) -> None:
    held = trainer.tensors
    before = {name: array.copy() for name, array in held.items()}
    trainer.train_step()
    for name in ("w1", "b1", "w2", "b2"):
        assert trainer.tensors[name] is held[name]
        assert not np.array_equal(held[name], before[name])
    owned = {id(array) for array in held.values()}
    places = trainer.executable.place
    assert {id(places[p]) for p in trainer.plan.graph.updates.values()} <= owned
    arenas = {id(place.base) for place in places.values() if id(place) not in owned}
    assert len(arenas) == 1


def test_a_read_after_an_update_in_place_is_refused(scratch: ModuleType) -> None:
    graph = scratch.Graph()
    p, g = graph.input("p", (4,)), graph.input("g", (4,))
    graph.updates[p] = graph.Sub(p, g)
    loss = graph.ReduceSum(graph.Mul(p, g))
    with pytest.raises(AssertionError, match=r"%p: f32\[4\] is read after it is overwritten"):
        scratch.make_plan(graph, loss)


def test_a_value_that_others_read_is_not_fused_away(scratch: ModuleType) -> None:
    def forward(x: Any, target: Any, w: Any, b: Any) -> Any:
        u = x @ w + b
        return (u.relu() + u).cross_entropy(target)

    shapes = {"x": (6, 3), "target": (6, 3), "w": (3, 3), "b": (3,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    graph, loss = scratch.capture(forward, arrays)
    before = [str(node) for node in graph.nodes]
    for each in scratch.FORWARD:
        each(graph, loss)
    assert [str(node) for node in graph.nodes] == before
