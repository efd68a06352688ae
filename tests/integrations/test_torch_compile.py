"""torch.compile with Onward as its backend, beside eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import subprocess
import sys
import tomllib
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_families import of
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import onward
from onward.integrations.torch_compile import OFTEN, onward_backend, register

ROOT = Path(__file__).resolve().parent.parent.parent
Call = Callable[[Any], Any]

# torch.compile itself warns, with any backend, where a graph's input is another's output
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """torch.compile keeps what it has compiled for a forward's code, whichever the model."""
    register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gaussian(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def loss_of(found: Any) -> torch.Tensor:
    if hasattr(found, "loss"):
        return found.loss
    return found.sin().sum()


class Compared:
    """A compiled model and a copy of it in eager PyTorch."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model: Any = model
        self.eager: Any = copy.deepcopy(model)
        self.compiled: Any = torch.compile(model, backend="onward", **settings)

    def step(self, call: Call) -> torch.Tensor:
        """Run forward and backward of both, and assert the same loss, gradients and buffers."""
        losses = []
        for run, model in ((self.compiled, self.model), (self.eager, self.eager)):
            model.zero_grad()
            torch.manual_seed(1)
            loss = loss_of(call(run))
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        assert losses[1] != 0
        pairs = zip(self.model.named_parameters(), self.eager.parameters(), strict=True)
        for (name, p), q in pairs:
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=2e-4, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
        for b, c in zip(self.model.buffers(), self.eager.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-6)
        return losses[0]


def ids(rows: int, length: int) -> torch.Tensor:
    return tiny.tokens(rows, length, seed=rows)


def masked(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids(rows, length), "attention_mask": mask}


class Broken(nn.Module):
    """A module whose forward is two graphs, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


def gpt2() -> nn.Module:
    model = tiny.gpt2(dropout=0.0, layers=1, use_cache=False)
    model.loss_type = "ForCausalLM"  # else it warns that it is none, which breaks the graph
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def labelled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "labels": batch["input_ids"]}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Call]]] = {
    "gpt2": (gpt2, lambda b, t: lambda m: m(input_ids=ids(b, t), labels=ids(b, t))),
    "bert": (
        lambda: tiny.bert(dropout=0.0, layers=1),
        lambda b, t: lambda m: m(**labelled(masked(b, t))),
    ),
    "t5": (
        of("T5", "ConditionalGeneration", use_cache=False, num_layers=1, num_decoder_layers=1),
        lambda b, t: lambda m: m(input_ids=ids(b, t), labels=ids(b, t)),
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda b, t: lambda m: m(gaussian(b, t, 8), gaussian(b, t + 1, 8, seed=1)),
    ),
    "batch norm": (normed, lambda b, t: lambda m: m(gaussian(b * t, 8))),
    "graph break": (Broken, lambda b, t: lambda m: m(gaussian(b * t, 4))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_of_batches_of_three_sizes(name: str, captures: list[int]) -> None:
    make, call = MODELS[name]
    torch.manual_seed(0)
    # strict: raises where a graph runs in eager. dynamic: two are traced once, not twice
    dynamic = True if name in ("t5", "transformer") else None
    both = Compared(make(), dynamic=dynamic, options={"strict": True})
    losses = {float(both.step(call(b, t))) for b, t in ((2, 8), (3, 10))}
    assert captures and len(losses) == 2
    known = len(captures)
    both.step(call(2, 8))  # of its own or the second's graph
    both.step(call(4, 9))
    assert len(captures) == known, "graphs of sizes that were met serve others"


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_sizes_as_torch_compile_sees_them(
    dynamic: bool | None, fullgraph: bool, captures: list[int]
) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, count: int, scale: float) -> torch.Tensor:
            h = self.inner(x)[:count] * x.shape[0]
            return (h * scale).repeat(count, 1)

    settings = {"dynamic": dynamic, "fullgraph": fullgraph, "options": {"strict": True}}
    both = Compared(Sized(), **settings)
    for rows, count, scale in ((5, 2, 0.5), (6, 3, 0.5), (7, 3, 0.5), (8, 3, 1.5), (9, 4, 2.5)):
        both.step(lambda m, r=rows, c=count, s=scale: m(gaussian(r, 4), c, s))
    assert len(captures) < 5 or dynamic is False


def test_training_and_evaluation_have_each_its_graph(captures: list[int]) -> None:
    both = Compared(normed(), options={"strict": True})
    for step in range(6):
        for model in (both.model, both.eager):
            model.train(step % 2 == 0)
        both.step(lambda m, s=step: m(gaussian(5, 8, seed=s)))
    assert len(captures) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    both = Compared(normed().eval(), options={"strict": True})
    with mode():
        ours, eager = both.compiled(gaussian(5, 8)), both.eager(gaussian(5, 8))
    torch.testing.assert_close(ours, eager)
    assert not ours.requires_grad
    both.step(lambda m: m(gaussian(5, 8)))


def test_gradients_stop_at_no_grad_within() -> None:
    class Stopped(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                h = self.first(x)
            return self.second(h)

    both = Compared(Stopped(), options={"strict": True})
    both.step(lambda m: m(gaussian(3, 4)))
    assert both.model.first.weight.grad is None


def test_frozen_and_thawed(captures: list[int]) -> None:
    both = Compared(normed(), options={"strict": True})
    for step in range(4):
        for model in (both.model, both.eager):
            model[0].requires_grad_(step % 2 == 1)
        both.step(lambda m: m(gaussian(5, 8)))
    assert len(captures) == 2


def test_checkpoints() -> None:
    class Checkpointed(Broken):
        def forward(self, x: torch.Tensor) -> Any:
            h = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
            return self.second(h)  # type: ignore[arg-type]

    both = Compared(Checkpointed(), options={"strict": True})
    both.step(lambda m: m(gaussian(3, 4)))


def test_dropout_follows_torchs_seed() -> None:
    """Each call draws anew; equal seeds give equal masks; one in four is dropped, and the rest
    scaled."""
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.25))
    compiled = torch.compile(model, backend="onward", options={"strict": True})
    x = torch.ones(400, 50, requires_grad=True)
    torch.manual_seed(5)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(5)
    again = compiled(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.testing.assert_close(first.detach().unique(), torch.tensor([0.0, 4 / 3]))
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.02)  # six deviations
    first.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, first.detach())


# ---- one graph, several modules


def test_layers_that_share_a_graph_keep_their_weights(captures: list[int]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

    stack = nn.Sequential(*[Layer() for _ in range(3)])
    eager = copy.deepcopy(stack)
    for layer in stack:
        layer.compile(backend="onward", options={"strict": True})
    for step in range(3):
        for model in (stack, eager):
            model.zero_grad()
            model(gaussian(3, 4, seed=step)).sin().sum().backward()
        for p, q in zip(stack.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-4, atol=1e-6)
            with torch.no_grad():
                p -= 0.1
                q -= 0.1
    assert len(captures) == 3, "one for each layer"


def test_a_parameter_that_is_replaced() -> None:
    both = Compared(Broken(), options={"strict": True})
    for step in range(3):
        for model in (both.model, both.eager):
            model.first.weight = nn.Parameter(gaussian(4, 4, seed=step))
        both.step(lambda m: m(gaussian(3, 4)))


def test_a_buffer_that_each_call_replaces_becomes_an_argument(captures: list[int]) -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    both = Compared(Scaled(), options={"strict": True})
    for step in range(OFTEN + 5):
        for model in (both.model, both.eager):
            model.scale = gaussian(4, seed=step)
        both.step(lambda m: m(gaussian(3, 4)))
    assert len(captures) == OFTEN + 1


def test_weights_that_are_arguments() -> None:
    """Gradients reach weights that are plain tensor arguments, another set of them in every
    step."""
    model = Broken()
    compiled = torch.compile(
        lambda weights, x: functional_call(model, weights, (x,)).sin().sum(),
        backend="onward", options={"strict": True},
    )  # fmt: skip
    for step in range(3):
        weights = {n: gaussian(*p.shape, seed=step) for n, p in model.named_parameters()}
        found = []
        for run in (compiled, lambda w, x: functional_call(model, w, (x,)).sin().sum()):
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            loss = run(leaves, gaussian(3, 4))
            found.append(torch.autograd.grad(loss, list(leaves.values())))
        torch.testing.assert_close(found[0], found[1], rtol=2e-4, atol=1e-6)


def test_a_model_that_is_gone_is_freed() -> None:
    model = Broken()
    compiled = torch.compile(model, backend="onward")
    compiled(gaussian(3, 4)).sum().backward()
    held = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    gc.collect()
    assert all(p() is None for p in held)


# ---- what a graph hands on to the code after it


class HandsOn(Broken):
    """A module that hands sizes, views of its input and a counting buffer across a graph break."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, rows, turned = self.first(x), 2 * x.shape[0], x.t()
        first, second = x.chunk(2, 1)
        self.count += 1
        torch._dynamo.graph_break()
        h = h * rows + turned.sum() + self.count
        return self.second(h) + (first * second).sum()


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_views_and_counters_across_a_graph_break(dynamic: bool | None) -> None:
    both = Compared(HandsOn(), dynamic=dynamic, options={"strict": True})
    for rows in (3, 4, 5, 3):
        both.step(lambda m, r=rows: m(gaussian(r, 4)))
    assert both.model.count == 4


def test_a_view_of_the_input_is_one() -> None:
    class Turns(Broken):
        def forward(self, x: torch.Tensor) -> Any:
            return self.first(x), x.t(), x[0].detach(), x.shape

    compiled = torch.compile(Turns(), backend="onward", options={"strict": True})
    x = gaussian(3, 4).requires_grad_()
    _, turned, row, shape = compiled(x)
    assert turned.data_ptr() == row.data_ptr() == x.data_ptr() and shape == x.shape
    assert turned.requires_grad and not row.requires_grad
    turned.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_views_where_gradients_are_off_have_none() -> None:
    class Off(Broken):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                turned = x.t()
            return self.first(x), turned

    model = Off()
    compiled = torch.compile(model, backend="onward")
    gradients = []
    for run in (compiled, model):
        x = gaussian(3, 4).requires_grad_()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            h, turned = run(x)
        assert len(told) == (1 if run is compiled else 0)
        (h.sum() + 5 * turned.sum()).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_function_that_runs_the_backward_itself(captures: list[int]) -> None:
    """A compiled function may run backward itself: torch.compile does not trace Onward's own
    code."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    eager = copy.deepcopy(model)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    compiled = torch.compile(step, backend="onward")
    for seed in range(2):
        torch.testing.assert_close(compiled(model, gaussian(3, 4, seed=seed)).detach(),
                                   step(eager, gaussian(3, 4, seed=seed)).detach())  # fmt: skip
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-4, atol=1e-6)
    assert captures


# ---- what runs in eager, and what is refused


class Writes(Broken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x * 2)
        x.add_(1)
        return self.second(h)


class Mixed(Broken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
        return self.second(h.float())


class ViewOfOutput(Broken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        row = h[0]
        torch._dynamo.graph_break()
        with torch.no_grad():
            row.zero_()
        return self.second(h)


EAGER = {
    Writes: r"add_.* writes in place into the batch",
    ViewOfOutput: r"row is a view of its output h",
}


@pytest.mark.parametrize("kind", EAGER)
def test_what_runs_in_eager_says_why_once(kind: type[Broken]) -> None:
    both = Compared(kind())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(3):
            both.step(lambda m, s=seed: m(gaussian(3, 4, seed=s)))
    lines = [str(w.message) for w in told if w.category is onward.EagerWarning]
    assert len(lines) == len(set(lines))
    [line] = [line for line in lines if re.search(EAGER[kind], line)]
    assert line.startswith("the torch.compile graph of forward, ") and f"{__file__}:" in line
    torch._dynamo.reset()
    strict = torch.compile(kind(), backend="onward", options={"strict": True})
    for _ in range(2):
        with pytest.raises(onward.CaptureError, match=EAGER[kind]):
            strict(gaussian(3, 4))


def test_autocast_around() -> None:
    near_autocast(Broken(), torch.autocast("cpu", dtype=torch.bfloat16))


def test_autocast_within() -> None:
    near_autocast(Mixed(), contextlib.nullcontext())


def near_autocast(model: nn.Module, around: Any) -> None:
    """Assert that the model runs as a graph, with results of eager mode's types and near them in
    value."""
    eager, ours = copy.deepcopy(model), torch.compile(model, backend="onward")
    with around, warnings.catch_warnings():
        warnings.simplefilter("error", onward.EagerWarning)
        found, want = (m(gaussian(3, 4)) for m in (ours, eager))
    assert found.dtype == want.dtype
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
    for y in (found, want):
        y.float().square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert q.grad is not None
        room = 0.02 * float(q.grad.abs().max())
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=room)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"strct": True}}, r"unknown option in .*: 'strct' .did you mean strict"),
        ({"options": {"strict": "yes"}}, "strict='yes' is invalid; fix: True or False"),
        ({"options": {"outputs": "loss"}}, r"fix: onward.accelerate\(model, outputs='loss'\)"),
        ({"mode": "max-autotune"}, "mode='max-autotune'.* fix: leave it out"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    model = Broken()
    compiled = torch.compile(model, backend="onward", **settings)
    with pytest.raises(onward.OnwardError, match=message):
        compiled(gaussian(3, 4))


def test_options_reach_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="onward", options={"memory_budget": 2})
    with pytest.raises(onward.OnwardError, match="memory_budget"):
        compiled(gaussian(3, 4)).sum().backward()


# ---- how it is found


def test_the_entry_point_is_found_by_name(tmp_path: Path) -> None:
    """torch finds the backend by its entry point, in a process that imports torch alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(group, points)] = project["entry-points"].items()
    assert group == "torch_dynamo_backends"
    folder = tmp_path / "onward-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onward\nVersion: 9\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'src')!r}]\n"
        "import torch\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "assert 'onward' not in sys.modules\n"
        "found = lookup_backend('onward')\n"
        "assert found.__module__ == 'onward.integrations.torch_compile', found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_function_is_a_backend_and_register_may_be_called_again() -> None:
    register()
    model = Broken()
    compiled = torch.compile(model, backend=onward_backend)
    torch.testing.assert_close(compiled(gaussian(3, 4)), model(gaussian(3, 4)))
