"""What a graph cannot honour is refused, at the first step or when it appears later; what changes
nothing is captured once; and loss functions are guarded as models are."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizers
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onward
import onward.compile
from onward import CaptureError
from onward.model_state import facts

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
Y = torch.arange(6) % 5
RATE = 0.1


class Net(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("shift", torch.ones(8))
        self.held: list[torch.Tensor] = []
        self.unread, self.calls = torch.ones(3), 0
        self.inspect: Callable[[torch.Tensor], Any] | None = None
        self.beside: Callable[[torch.Tensor], torch.Tensor] | None
        object.__setattr__(self, "beside", None)  # also where it is a module: not registered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(x)) + self.shift
        for t in self.held:
            h = h + t
        if self.beside is not None:
            h = h + self.beside(x)
        if self.inspect is not None:
            self.inspect(h)
        return self.outer(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def trainer_of(model: nn.Module, loss_fn: Any = F.cross_entropy) -> onward.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return onward.Trainer(model, optimizer, loss_fn=loss_fn, options={"strict": True})


def assert_follows(trainer: onward.Trainer, twin: nn.Module, loss_fn: Any) -> None:
    """Run one step of the Trainer and one of plain PyTorch on the twin, and assert that they
    agree."""
    twin.zero_grad()
    loss = loss_fn(twin(X), Y)
    loss.backward()
    torch.testing.assert_close(trainer.train_step(X, Y).loss, loss.detach(), rtol=1e-5, atol=0)
    with torch.no_grad():
        for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
            if q.grad is not None:
                q.sub_(RATE * q.grad)
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- refused


def hook(*_: Any) -> None:
    """A hook that a graph could not call."""


def _around(*args: Any) -> None:
    """A hook around a call, which a graph could not run."""


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def data(parameter: torch.Tensor, value: torch.Tensor) -> Iterator[None]:
    """A context in which the parameter lies in other memory, with the same numbers."""
    before = parameter.data
    value.copy_(before)
    parameter.data = value
    try:
        yield
    finally:
        parameter.data = before


def _hooked(model: Any, h: torch.Tensor) -> None:
    handle = model.outer.register_full_backward_hook(lambda m, given, got: None)
    model.outer(h)
    handle.remove()


def _packed(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x.float()):
        return torch.tanh(x)


def _relued(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(F.relu, lambda x: x):
        return torch.tanh(x)


def _frozen(model: Any, h: torch.Tensor) -> None:
    model.inner.weight.requires_grad = False
    model.inner(h)
    model.inner.weight.requires_grad = True


class Packing(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda x: x, lambda x: x)


Refused = Callable[[onward.Trainer], AbstractContextManager[Any]]
# what is done, and what the message names
REFUSED: dict[str, tuple[Refused, str]] = {
    "forward hook": (
        lambda t: removed(t.model.inner.register_forward_hook(hook)),  # type: ignore
        "inner has the forward hook hook",
    ),
    "forward hook with keywords": (
        lambda t: removed(t.model.outer.register_forward_hook(hook, with_kwargs=True)),  # type: ignore
        "outer has the forward hook hook",
    ),
    "forward hook of the model": (
        lambda t: removed(t.model.register_forward_hook(functools.partial(hook))),
        "Net has the forward hook hook",
    ),
    "forward pre-hook": (
        lambda t: removed(t.model.inner.register_forward_pre_hook(hook)),  # type: ignore
        "inner has the forward pre-hook hook",
    ),
    "full backward hook": (
        lambda t: removed(t.model.inner.register_full_backward_hook(hook)),  # type: ignore
        "inner has the backward hook hook",
    ),
    "full backward pre-hook": (
        lambda t: removed(t.model.inner.register_full_backward_pre_hook(hook)),  # type: ignore
        "inner has the backward pre-hook hook",
    ),
    "old backward hook": (
        lambda t: removed(t.model.inner.register_backward_hook(hook)),  # type: ignore
        "inner has the backward hook hook",
    ),
    "gradient hook": (
        lambda t: removed(t.model.inner.weight.register_hook(hook)),  # type: ignore
        "inner.weight has the gradient hook hook",
    ),
    "post-accumulate-grad hook": (
        lambda t: removed(t.model.outer.bias.register_post_accumulate_grad_hook(hook)),  # type: ignore
        "outer.bias has the post-accumulate-grad hook hook",
    ),
    "multi-grad hook": (
        lambda t: removed(
            torch.autograd.graph.register_multi_grad_hook([*t.model.parameters()], hook)
        ),
        "inner.weight has the gradient hook",
    ),
    "global forward hook": (
        lambda _: removed(torch_modules.register_module_forward_hook(hook)),
        "every module has the global forward hook hook",
    ),
    "global forward pre-hook": (
        lambda _: removed(torch_modules.register_module_forward_pre_hook(hook)),
        "global forward pre-hook hook",
    ),
    "global backward hook": (
        lambda _: removed(torch_modules.register_module_full_backward_hook(hook)),
        "global backward hook hook",
    ),
    "global backward pre-hook": (
        lambda _: removed(torch_modules.register_module_full_backward_pre_hook(hook)),
        "global backward pre-hook hook",
    ),
    "step pre-hook": (
        lambda t: removed(t.optimizer.register_step_pre_hook(hook)),
        "the optimizer has the step pre-hook hook",
    ),
    "step post-hook": (
        lambda t: removed(t.optimizer.register_step_post_hook(hook)),
        "the optimizer has the step post-hook hook",
    ),
    "global step pre-hook": (
        lambda _: removed(torch_optimizers.register_optimizer_step_pre_hook(hook)),
        "global step pre-hook hook",
    ),
    "global step post-hook": (
        lambda _: removed(torch_optimizers.register_optimizer_step_post_hook(hook)),
        "global step post-hook hook",
    ),
    "step replaced": (
        lambda t: attribute(t.optimizer, "step", functools.partial(hook).func),
        "optimizer.step has been replaced by hook",
    ),
    "step partly applied": (
        lambda t: attribute(t.optimizer, "step", functools.partial(hook)),
        "optimizer.step has been replaced by partial",
    ),
    "step wrapped": (
        lambda t: attribute(t.optimizer, "step", functools.wraps(t.optimizer.step)(_around)),
        "optimizer.step has been replaced by",
    ),
    "step of the class replaced": (
        lambda _: attribute(torch.optim.SGD, "step", hook),
        "optimizer.step has been replaced by hook",
    ),
    "autocast": (
        lambda _: torch.autocast("cpu", dtype=torch.bfloat16), "autocast is on; fix: call outside",
    ),
    "function mode": (lambda _: Watching(), "Watching is active"),
    "dispatch mode": (lambda _: Counting(), "Counting is active"),
    "parameter in a list": (
        lambda t: attribute(t.model, "held", [t.model.get_parameter("inner.bias")]),
        "reads the memory of inner.bias through another tensor",
    ),
    "view of a parameter": (
        lambda t: attribute(t.model, "held", [t.model.get_parameter("inner.weight").detach()[0]]),
        "reads the memory of inner.weight through another tensor",
    ),
    "tensor computed from a parameter": (
        lambda t: attribute(t.model, "held", [t.model.get_parameter("inner.bias") * 2]),
        "requires grad but is not in model.parameters",
    ),
    "parameter that is not registered": (
        lambda t: attribute(t.model, "held", [nn.Parameter(torch.ones(8))]),
        r"reads the parameter model.held\[0\], which requires grad but is not in model.parameters",
    ),
    "parameter of a module that is not registered": (
        lambda t: attribute(t.model, "beside", functools.partial(nn.Linear(8, 8))),
        "reads the parameter .*beside.func.weight, which requires grad but is not in",
    ),
    "hook within the forward": (
        lambda t: attribute(t.model, "inspect", lambda h: h.register_hook(hook)),
        "the forward calls register_hook",
    ),
    "hook on a node within the forward": (
        lambda t: attribute(t.model, "inspect", lambda h: h.grad_fn.register_hook(hook)),
        "the forward calls register_hook on a grad_fn",
    ),
    "hook on a further node within the forward": (
        lambda t: attribute(
            t.model, "inspect", lambda h: h.grad_fn.next_functions[0][0].register_prehook(hook)
        ),
        "the forward calls register_prehook on a grad_fn",
    ),
    "hook on an edge within the forward": (
        lambda t: attribute(
            t.model,
            "inspect",
            lambda h: torch.autograd.graph.get_gradient_edge(h).node.register_hook(hook),
        ),
        "the forward calls get_gradient_edge",
    ),
    "hook on several gradients within the forward": (
        lambda t: attribute(
            t.model,
            "inspect",
            lambda h: torch.autograd.graph.register_multi_grad_hook([h, t.model.shift + h], hook),
        ),
        "the forward calls register_hook",
    ),
    "backward hook of a module within the forward": (
        lambda t: attribute(t.model, "inspect", functools.partial(_hooked, t.model)),
        "the forward calls BackwardHook; hooks do not run",
    ),
    "saved tensors hooks within the forward": (
        lambda t: attribute(t.model, "beside", _packed),
        "the forward uses torch.autograd.graph.saved_tensors_hooks",
    ),
    "saved tensors hooks": (
        lambda _: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "saved_tensors_hooks are active",
    ),
    "saved tensors hooks of one's own": (
        lambda _: Packing(), "saved_tensors_hooks are active",
    ),
    "saved tensors hooks that are functions of torch's": (
        lambda _: torch.autograd.graph.saved_tensors_hooks(F.relu, F.gelu),
        "saved_tensors_hooks are active",
    ),
    "saved tensors hooks that are functions of torch's, within the forward": (
        lambda t: attribute(t.model, "beside", _relued),
        "the forward uses torch.autograd.graph.saved_tensors_hooks",
    ),
    "parameters frozen for a while": (
        lambda t: attribute(t.model, "inspect", functools.partial(_frozen, t.model)),
        "the forward switches requires_grad of a parameter",
    ),
    "a module frozen for a while": (
        lambda t: attribute(
            t.model, "inspect", lambda h: t.model.inner.requires_grad_(False).requires_grad_()
        ),
        "the forward switches requires_grad of a parameter",
    ),
    "backward within the forward": (
        lambda t: attribute(t.model, "inspect", lambda h: h.sum().backward(retain_graph=True)),
        "the forward calls backward",
    ),
    "torch.autograd.backward within the forward": (
        lambda t: attribute(
            t.model, "inspect", lambda h: torch.autograd.backward([h.sum()], retain_graph=True)
        ),
        "the forward calls backward",
    ),
    "buffer on a parameter's memory": (
        lambda t: attribute(t.model, "shift", t.model.inner.weight.detach()[0]),  # type: ignore
        "shift and inner.weight overlap in memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_honour_is_refused(case: str) -> None:
    """The refusal comes at the first step or at a later one; nothing moves, and without the cause
    training goes on."""
    enter, message = REFUSED[case]
    model = net()
    twin = copy.deepcopy(model)
    trainer = trainer_of(model)
    for first in (True, False):
        before = [p.detach().clone() for p in model.parameters()]
        with ExitStack() as stack:
            stack.enter_context(enter(trainer))
            with pytest.raises(CaptureError, match=message) as error:
                trainer.train_step(X, Y)
        assert "fix:" in str(error.value)
        assert "\n" not in str(error.value)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        if first:
            assert_follows(trainer, twin, F.cross_entropy)


def test_a_model_of_many_ranks_is_refused(tmp_path: Path) -> None:
    """A DistributedDataParallel model is refused, since a step would not average its gradients."""
    model = net()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        trainer = trainer_of(nn.parallel.DistributedDataParallel(model))
        with pytest.raises(CaptureError, match="the model is wrapped in DistributedDataParallel"):
            trainer.train_step(X, Y)
    finally:
        torch.distributed.destroy_process_group()
    trainer_of(model).train_step(X, Y)


def test_hooks_on_gradients_do_not_matter_to_an_evaluation() -> None:
    model = net()
    trainer = trainer_of(model)
    handles = [
        model.inner.weight.register_hook(hook), model.inner.register_full_backward_hook(hook),
        trainer.optimizer.register_step_post_hook(hook),
    ]  # fmt: skip
    got = trainer.eval_step(X, Y).loss
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(got, F.cross_entropy(model(X), Y).detach(), rtol=1e-5, atol=0)


def test_gradients_stop_where_the_forward_says_also_under_no_grad() -> None:
    """A graph stops gradients where the forward says; an export under no_grad would not see it."""

    class Stopped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                gate = torch.sigmoid(self.inner(x))
            return self.outer(torch.tanh(self.inner(x)) * gate)

    torch.manual_seed(0)
    model = Stopped().train()
    twin = copy.deepcopy(model)
    trainer = trainer_of(model)
    F.cross_entropy(twin(X), Y).backward()
    with torch.no_grad():
        trainer.train_step(X, Y)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q - RATE * q.grad, rtol=1e-5, atol=1e-6)  # type: ignore


def test_pruning_keeps_its_hook() -> None:
    """Pruning's forward pre-hooks only compute weights, so they are captured."""
    from torch.nn.utils import prune

    model = net()
    prune.l1_unstructured(model.inner, "weight", 0.5)
    twin = net()
    prune.l1_unstructured(twin.inner, "weight", 0.5)
    trainer = trainer_of(model)
    for _ in range(2):
        assert_follows(trainer, twin, F.cross_entropy)


# ---- no change


def toggled(t: onward.Trainer) -> None:
    t.model.eval()
    t.model.train()


def swapped(t: onward.Trainer) -> None:
    """Give parameters other memory of the same layout, as when averaged weights are swapped in."""
    for p in t.model.parameters():
        p.data = p.data.clone()


def ran(t: onward.Trainer) -> None:
    with torch.no_grad():
        t.model.eval()(X)
        t.model.train()


INNOCUOUS: dict[str, Callable[[onward.Trainer], Any]] = {
    "eval and train": toggled,
    "memory": swapped,
    "eager evaluation": ran,
    "eager gradients": lambda t: F.cross_entropy(t.model(X), Y).backward(),
    "zero_grad": lambda t: (t.model.zero_grad(), t.optimizer.zero_grad()),
    "state": lambda t: t.model.load_state_dict(t.model.state_dict()),
    "state of the trainer": lambda t: t.state_dict(),
    "learning rate": lambda t: t.optimizer.param_groups[0].update(lr=0.01),
    "looking": lambda t: (repr(t.model), list(t.model.named_modules()), copy.deepcopy(t.model)),
    "same value": lambda t: setattr(t.model, "calls", int("0")),
    "equal list": lambda t: setattr(t.model, "held", []),
    "weights": lambda t: nn.init.normal_(t.model.inner.weight),  # type: ignore
    "buffer": lambda t: t.model.shift.mul_(0.5),  # type: ignore
    "tensor that is not read": lambda t: t.model.unread.mul_(2.0),  # type: ignore
    "class of elsewhere": lambda t: type("Net", (Net,), {})(),
    "cast to what it is": lambda t: t.model.float().to("cpu"),
    "evaluation step": lambda t: t.eval_step(X, Y),
}


def test_what_changes_nothing_is_captured_once(captures: list[int]) -> None:
    trainer = trainer_of(net())
    trainer.train_step(X, Y)
    trainer.eval_step(X, Y)
    for name, act in INNOCUOUS.items():
        with torch.no_grad() if name in ("weights", "buffer") else torch.enable_grad():
            act(trainer)
        trainer.train_step(X, Y)
        assert len(captures) == 1, name  # the evaluation is made of it


def test_an_attribute_that_keeps_changing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    trainer = trainer_of(model)
    with caplog.at_level(logging.WARNING, logger="onward"):
        for i in range(7):
            model.inner.calls = i  # type: ignore[assignment]
            trainer.train_step(X, Y)
    [record] = caplog.records
    assert record.getMessage().startswith("model.inner.calls has changed 5 times")


# ---- loss functions


class Weighted(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 5))
        self.smoothing = 0.0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, target, self.weight, label_smoothing=self.smoothing)


class Called:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, target) * self.by

    def method(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, target) * self.by


def closed(by: list[float]) -> Callable[..., torch.Tensor]:
    return lambda outputs, target: F.cross_entropy(outputs, target) * by[0]


def in_place(loss_fn: Any) -> None:
    loss_fn.weight.mul_(torch.linspace(1.0, 3.0, 5))


METHOD, LIST = Called(), [1.0]
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "attribute": (Weighted, lambda f: setattr(f, "smoothing", 0.3)),
    "buffer": (Weighted, lambda f: setattr(f, "weight", torch.linspace(2.0, 0.5, 5))),
    "buffer in place": (Weighted, in_place),
    "reduction": (nn.CrossEntropyLoss, lambda f: setattr(f, "reduction", "sum")),
    "object": (Called, lambda f: setattr(f, "by", 2.0)),
    "method": (lambda: METHOD.method, lambda f: setattr(f.__self__, "by", 2.0)),
    "closure": (lambda: closed(LIST), lambda f: LIST.__setitem__(0, 2.0)),
    "partial": (
        lambda: functools.partial(F.cross_entropy, label_smoothing=0.0),
        lambda f: f.keywords.update(label_smoothing=0.4),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_changed_loss_function_holds_from_the_next_step_on(case: str) -> None:
    make, change = LOSSES[case]
    model, loss_fn = net(), make()
    twin, trainer = copy.deepcopy(model), trainer_of(model, loss_fn)
    assert_follows(trainer, twin, loss_fn)
    before = float(loss_fn(twin(X), Y).detach())
    change(loss_fn)
    assert abs(float(loss_fn(twin(X), Y).detach()) - before) > 1e-3
    assert_follows(trainer, twin, loss_fn)


def test_another_loss_function_holds_from_the_next_step_on() -> None:
    model = net()
    twin, trainer = copy.deepcopy(model), trainer_of(model)
    assert_follows(trainer, twin, F.cross_entropy)
    trainer.loss_fn = functools.partial(F.cross_entropy, reduction="sum")
    assert_follows(trainer, twin, trainer.loss_fn)


def test_a_parameter_in_the_loss_functions_closure_is_refused() -> None:
    """The captured penalty would stay that of the first step for ever, without a gradient."""
    model = net()
    weight = model.inner.weight
    trainer = trainer_of(model, lambda o, t: F.cross_entropy(o, t) + weight.pow(2).sum())
    with pytest.raises(CaptureError, match=r"memory of inner\.weight through another tensor"):
        trainer.train_step(X, Y)
    assert_follows(
        trainer_of(model, lambda o, t: F.cross_entropy(o, t) + model.inner.weight.pow(2).sum()),
        twin := copy.deepcopy(model),
        lambda o, t: F.cross_entropy(o, t) + twin.inner.weight.pow(2).sum(),
    )


@pytest.mark.parametrize("way", ["version", "content"])
def test_another_models_weights_in_the_loss_are_seen_when_they_move(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of another model are constants of the graph, which is made anew when they move."""
    if way == "version":
        monkeypatch.setattr(facts, "BYTES", 0)
    model, teacher = net(), net()

    def distil(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, target) + F.mse_loss(outputs, teacher(X).detach())

    twin, trainer = copy.deepcopy(model), trainer_of(model, distil)
    for _ in range(2):
        assert_follows(trainer, twin, distil)
        with torch.no_grad():
            teacher.outer.weight.mul_(1.5)
