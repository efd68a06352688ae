"""Parts of a model that run in PyTorch within its graph, beside the model in eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from region_models import PARTS, Model, Numpy, batch
from twins import CLOSE, Twins, assert_same, moved_away, total

import onward
from onward import CaptureError, EagerWarning
from onward.compile import Compiler
from onward.module import accelerated

EPS = 1e-2  # so that a gradient that is nothing but rounding moves nothing
EACH = pytest.mark.parametrize("part", PARTS)
SOME = pytest.mark.sample(3)  # of a table that `make test-whole` runs whole


def model(part: str, dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(PARTS[part], dropout).train()


def regions(ours: Any) -> list[str]:
    """The paths of the parts that the last call ran in PyTorch, by the plan's launches."""
    held = accelerated(ours)
    assert held is not None
    return [str(x.attrs["path"]) for x in held.plan.launches if x.op == "Region"]


@pytest.fixture(autouse=True)
def _expected() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*in eager PyTorch within the graph", EagerWarning)
        yield


@pytest.mark.sample(1)
@EACH
def test_losses_gradients_and_buffers_are_eager_s(part: str) -> None:
    twins = Twins(model(part))
    for i, shape in enumerate([(3, 5), (3, 5), (2, 7), (3, 5), (4, 6)]):
        twins.zero()
        found = twins.same(lambda m, i=i, s=shape: m(**batch(i, *s)))
        del found
        for output in twins.each(lambda m, i=i, s=shape: m(**batch(i, *s))):
            output["loss"].backward()
        twins.same_gradients()
        twins.same_buffers()
    held = accelerated(twins.ours)
    assert held is not None and regions(twins.ours) and len(held.plan.launches) > 5
    assert not any(type(c) is str for s in held._states for c in s.calls.values())


@SOME
@EACH
def test_gradients_of_every_output(part: str) -> None:
    twins = Twins(model(part))
    for i in range(2):
        twins.zero()
        for output in twins.each(lambda m, i=i: m(**batch(i))):
            total(output).backward()
        if part != "Norm":  # behind a batch norm most gradients are but rounding
            twins.same_gradients()
        twins.same_buffers()


@SOME
@EACH
def test_forwards_before_backwards_in_another_order(part: str) -> None:
    twins = Twins(model(part))
    for m in twins.both:
        outputs = [m(**batch(i, 2 + i % 2, 4)) for i in range(4)]
        for i in (2, 0, 3, 1):
            outputs[i]["loss"].backward()
    twins.same_gradients()


@SOME
@EACH
def test_backward_twice(part: str) -> None:
    twins = Twins(model(part))
    for m in twins.both:
        output = m(**batch(0))
        for _ in range(3):
            output["loss"].backward(retain_graph=True)
        output["loss"].backward()
    twins.same_gradients()
    with pytest.raises(RuntimeError, match="a second time"):
        output = twins.ours(**batch(0))
        output["loss"].backward()
        output["loss"].backward()


@SOME
@EACH
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_without_gradients(part: str, mode: str) -> None:
    twins = Twins(model(part).train(mode == "train"))
    for i in range(3):
        with torch.no_grad():
            twins.same(lambda m, i=i: m(**batch(i)))
        twins.same_buffers()


@SOME
@EACH
def test_evaluation_between_steps(part: str) -> None:
    twins = Twins(model(part))
    for i in range(3):
        for output in twins.each(lambda m, i=i: m.train()(**batch(i))):
            output["loss"].backward()
        with torch.no_grad():
            twins.same(lambda m, i=i: m.eval()(**batch(9 + i)))
    twins.same_gradients()
    twins.same_buffers()


@SOME
@EACH
def test_training_with_an_optimizer(part: str) -> None:
    twins = Twins(model(part))
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=EPS) for m in twins.both]
    for i in range(6):
        for m, optimizer in zip(twins.both, steps, strict=True):
            m(**batch(i))["loss"].backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(twins.ours.named_parameters(), twins.eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n} {m}")


def trained(part: str, ours: bool, optimizer: str, steps: int = 4) -> tuple[list[float], Model]:
    m = model(part)
    own: Any = torch.optim.SGD(m.parameters(), lr=1e-2)
    if optimizer == "adamw":
        own = torch.optim.AdamW(m.parameters(), lr=1e-2, eps=EPS)
    losses: list[float] = []
    trainer = onward.Trainer(_Loss(m), own) if ours else None
    for i in range(steps):
        if trainer is not None:
            losses.append(float(trainer.train_step(**batch(i, 3, 4 + i % 2)).loss))
            continue
        loss = m(**batch(i, 3, 4 + i % 2))["loss"]
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(float(loss.detach()))
    return losses, m


class _Loss(torch.nn.Module):
    """A wrapper that calls the model in the form that a Trainer takes."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inner(ids, labels)


@SOME
@EACH
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_trainer_s_steps_are_eager_s(part: str, optimizer: str) -> None:
    losses, ours = trained(part, True, optimizer)
    want, eager = trained(part, False, optimizer)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n} {m}")
    for b, c in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(b, c, **CLOSE)


@SOME
@EACH
def test_strict_raises_with_the_reason_and_the_place(part: str) -> None:
    ours = onward.accelerate(model(part), strict=True)
    with pytest.raises(CaptureError):
        ours(**batch(0))
    own = model(part)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    trainer = onward.Trainer(own, optimizer, options={"strict": True})
    with pytest.raises(CaptureError):
        trainer.train_step(**batch(0))


@SOME
@EACH
@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (1, 1)])
def test_sizes_of_one(part: str, shape: tuple[int, int]) -> None:
    if part == "Norm" and shape == (1, 1):
        return  # one number has no variance, in eager neither
    twins = Twins(model(part))
    for i in range(2):
        twins.zero()
        for output in twins.each(lambda m, i=i: m(**batch(i, *shape))):
            output["loss"].backward()
        twins.same_gradients()
    assert regions(twins.ours)


@pytest.mark.parametrize("part", ["Counting", "Hooked"])
def test_values_that_a_part_sets_are_no_reason_to_capture_anew(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    plain = Compiler.capture
    monkeypatch.setattr(
        Compiler, "capture", lambda self, *a, **k: captured.append(1) or plain(self, *a, **k)
    )
    ours = onward.accelerate(model(part))
    for i in range(5):
        ours(**batch(i))["loss"].backward()
    assert len(captured) == 1
    trained(part, True, "sgd", 5)
    assert len(captured) == 2


@pytest.mark.parametrize("read", ["set by the user", "set by the part"])
def test_values_of_a_part_that_other_code_reads(read: str) -> None:
    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale, self.times = torch.nn.Linear(8, 8), 2.0, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.times += 1
            return self.linear(x) * (1.0 + 0.0 * float(x.detach().numpy().sum()))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Part(), torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.part(x) * self.part.scale)

    class Reader(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.part(x) * self.part.times)

    torch.manual_seed(0)
    twins = Twins(Net() if read == "set by the user" else Reader())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        for i in range(4):
            for m in twins.both:
                m.part.scale = 2.0 + i // 2
            x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(i))
            assert_same(*twins.each(lambda m, x=x: m(x)))
    assert twins.ran() == (read == "set by the user")


def test_a_part_whose_shapes_data_decide_leaves_a_call_to_eager() -> None:
    class Sometimes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.linear(x).flatten(0, 1)).view_as(x)
            keep = x.shape[1] - int(float(x.detach().numpy().sum()) > 1e4)
            return y[:, :keep].clone()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Sometimes(), torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.part(x)).tanh()

    torch.manual_seed(0)
    twins = Twins(Net())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for scale in (1.0, 1e4, 1.0):
            twins.zero()
            x = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(0)) * scale
            found = twins.each(lambda m, x=x: m(x))
            assert_same(*found)
            for y in found:
                y.sin().sum().backward()
            twins.same_gradients()
            twins.same_buffers()
    told = [str(w.message) for w in said if issubclass(w.category, EagerWarning)]
    assert len(told) == 2 and "part runs in eager PyTorch within the graph and returns" in told[1]


@SOME
@EACH
def test_what_runs_in_pytorch_is_said_once(part: str) -> None:
    ours = onward.accelerate(model(part))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(3):
            ours(**batch(i))["loss"].backward()
            ours(**batch(i, 2, 6))["loss"].backward()
    told = [str(w.message) for w in said if issubclass(w.category, EagerWarning)]
    assert len(told) == 1, told
    assert "within the graph" in told[0] and "layers.*" in told[0], told


def test_the_rest_of_the_model_is_in_the_graph() -> None:
    ours = onward.accelerate(model("Numpy"))
    for i in range(2):
        ours(**batch(i))["loss"].backward()
    assert regions(ours) == ["layers.0", "layers.2"]
    ops = [x.op for x in accelerated(ours).plan.launches]  # type: ignore[union-attr]
    assert ops.count("RegionGrad") == 2 and "Gemm" in " ".join(ops) + "Gemm"


class Dropping(Numpy):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


def test_dropout_within_a_part_follows_the_generator() -> None:
    """Runs with one seed are equal and others are not; backward has the forward's masks."""
    torch.manual_seed(0)
    ours = onward.accelerate(Model(Dropping).train())

    def losses(seed: int, twice: bool = False) -> list[float]:
        torch.manual_seed(seed)
        found: list[float] = []
        for i in range(3):
            ours.zero_grad()
            loss = ours(**batch(i))["loss"]
            loss.backward(retain_graph=twice)
            if twice:
                once = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
                ours.zero_grad()
                loss.backward()
                again = [p.grad for p in ours.parameters() if p.grad is not None]
                for a, b in zip(once, again, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            found.append(float(loss.detach()))
        return found

    assert losses(1) == losses(1) == losses(1, twice=True)
    assert losses(1) != losses(2)
    assert len({*losses(1)}) == 3


def test_dropout_within_a_part_follows_a_trainer_s_seed() -> None:
    """A step neither reads nor moves torch's own generator."""

    def losses(seed: int, state: int) -> list[float]:
        torch.manual_seed(0)
        ours = Model(Dropping).train()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        trainer = onward.Trainer(ours, optimizer, options={"seed": seed})
        found: list[float] = []
        for i in range(3):
            torch.manual_seed(state + i)
            before = torch.get_rng_state()
            found.append(float(trainer.train_step(**batch(0)).loss))
            assert torch.equal(torch.get_rng_state(), before)
        return found

    assert losses(1, 0) == losses(1, 7)
    assert losses(1, 0) != losses(2, 0)


def test_a_parameter_that_data_leave_out_has_no_gradient() -> None:
    class Either(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = float(x.detach().numpy().sum()) > 1e9
            return self.a(x) if first else self.b(x)

    torch.manual_seed(0)
    twins = Twins(Model(Either))
    for output in twins.each(lambda m: m(**batch(0))):
        output["loss"].backward()
    twins.same_gradients()
    assert twins.ours.layers[0].a.weight.grad is None

    own = copy.deepcopy(twins.eager)
    trainer = onward.Trainer(own, torch.optim.AdamW(own.parameters(), lr=0.1))
    before = {n: p.detach().clone() for n, p in own.named_parameters()}
    with pytest.raises(onward.OnwardError, match=r"layers\.0\.a\.weight.*accelerate"):
        trainer.train_step(**batch(0))
    for name, p in own.named_parameters():
        assert torch.equal(p, before[name])


def test_hooks_on_parameters_within_a_part_run_once() -> None:
    twins = Twins(model("Numpy"))
    seen: dict[str, list[float]] = {"ours": [], "eager": []}
    for kind, m in zip(seen, twins.both, strict=True):
        m.layers[0].linear.weight.register_hook(
            lambda g, kind=kind: seen[kind].append(float(g.sum())) or g * 2.0
        )
    for i in range(2):
        for output in twins.each(lambda m, i=i: m(**batch(i))):
            output["loss"].backward()
    assert len(seen["ours"]) == len(seen["eager"]) == 2
    twins.same_gradients()


class Attribute(torch.autograd.Function):
    """A function that keeps its input as an attribute, past save_for_backward, so that hooks on
    saved tensors do not move it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach()
        return x * float(x.detach().numpy().std())

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0] * ctx.x


@pytest.mark.parametrize("part", ["Norm", "Attribute"])
def test_a_graph_of_saved_tensors_moved_away(part: str) -> None:
    """Saved tensors come back elsewhere, since another forward holds the block meanwhile."""

    class Keeps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Attribute.apply(x)  # type: ignore[return-value]

    torch.manual_seed(0)
    twins = Twins(Model(Keeps if part == "Attribute" else PARTS[part]).train())
    for i in range(2):
        twins.zero()
        for m in twins.both:
            with moved_away():
                first = m(**batch(i))
            second = m(**batch(5))  # in the first one's block
            first["loss"].backward()
            second["loss"].backward()
        twins.same_gradients()
        twins.same_buffers()


def test_within_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    twins = Twins(model("Loop"))
    for i in range(2):
        for m in twins.both:
            loss = checkpoint(lambda m=m, i=i: m(**batch(i))["loss"], use_reentrant=False)
            loss.backward()
    twins.same_gradients()


def test_shapes_that_data_decide_are_refused_before_anything_is_changed() -> None:
    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = int(x.detach().numpy().shape[1]) - int(float(x.detach().sum()) > 1e6)
            return x[:, :keep].clone()

    torch.manual_seed(0)
    ours = Model(Rows)
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    trainer.train_step(**batch(0))
    with torch.no_grad():
        ours.embed.weight.fill_(1e6)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    with pytest.raises(onward.OnwardError, match=r"layers\.0 runs in eager PyTorch .* returns"):
        trainer.train_step(**batch(1))
    for name, p in ours.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("act", ["export", "dump"])
def test_a_graph_with_regions_is_not_portable(act: str, tmp_path: Any, monkeypatch: Any) -> None:
    ours = model("Function")
    if act == "dump":
        monkeypatch.setenv("ONWARD_DUMP", str(tmp_path))
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    trainer.train_step(**batch(0))
    if act == "export":
        with pytest.raises(onward.OnwardError, match=r"layers\.\* \(2 times\)"):
            trainer.export_onnx(tmp_path / "model.onnx")
        assert not list(tmp_path.iterdir())
    else:
        texts = sorted(p.name for p in tmp_path.glob("*.txt"))
        assert texts and any("Region" in p.read_text() for p in tmp_path.glob("*.txt"))


def test_verification_compares_with_eager_alone() -> None:
    ours = model("Function")
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    found = trainer.verify(**batch(0))
    assert found.ok and "layers.* (2 times)" in str(found)


def test_profiles_change_nothing() -> None:
    ours = model("Norm")
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    trainer.train_step(**batch(0))
    before = copy.deepcopy(ours.state_dict())
    times = trainer.profile()
    assert times["Region"] > 0 and times["RegionGrad"] > 0
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name


def test_accelerated_parts_of_an_accelerated_model() -> None:
    twins = Twins(model("Numpy"))
    onward.accelerate(twins.ours.layers[0])
    onward.accelerate(twins.ours.layers[0].linear)
    for i in range(2):
        for output in twins.each(lambda m, i=i: m(**batch(i))):
            output["loss"].backward()
    twins.same_gradients()


def test_changes_within_a_part_are_seen() -> None:
    twins = Twins(model("Numpy"))

    def step(i: int) -> None:
        twins.zero()
        ours, eager = twins.each(lambda m: m(**batch(i)))
        assert_same(ours, eager)
        ours["loss"].backward()
        eager["loss"].backward()
        twins.same_gradients()

    step(0)
    for m in twins.both:
        m.layers[0].linear.weight.requires_grad_(False)
    step(1)
    for m in twins.both:
        m.layers[0].linear.weight.requires_grad_(True)
        m.layers[0].linear.weight.data = m.layers[0].linear.weight.data * 2.0
    step(2)
    for m in twins.both:
        m.layers[0].linear.bias = None
    step(3)
    for m in twins.both:
        torch.manual_seed(5)
        m.layers[2] = torch.nn.Linear(8, 8)
    step(4)
    for m in twins.both:
        torch.manual_seed(6)
        m.layers[0].linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    step(5)
