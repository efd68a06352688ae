"""Histories: changes of a module and calls of it, in any order, beside the same in eager PyTorch.

A history is a list of actions, each with a number that chooses its details. Every action is done
to a side (a model, what of its forwards is outstanding, its hooks), and says what can be seen:
results, gradients, exceptions. Two sides that differ in anything that is seen are a finding.
"""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from twins import CLOSE

import onward
from onward.config import EagerWarning, OnwardError
from onward.module import accelerated

W = 4
ONCE = "do not obey the gradient layout contract"  # which torch says once in a process
Step = tuple[str, int]


# ---- the model


@dataclass
class Config:
    scale: float = 1.0
    layers: list[int] = field(default_factory=lambda: [1])
    nested: dict[str, Any] = field(default_factory=lambda: {"deep": {"add": 0.0, "list": [0.5]}})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(W, W), nn.LayerNorm(W), nn.Dropout(0.0)
        self.gain: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.norm(self.lin(x)))) * self.gain


class Model(nn.Module):
    """Whose forward depends on whatever a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.head = Part(), Part(), nn.Linear(W, W)
        self.bn = nn.BatchNorm1d(W)
        self.config, self.extra, self.flags = Config(), nn.ModuleList(), {"twice": False}
        self.register_buffer("shift", torch.zeros(W))
        self.register_buffer("maybe", None)
        self.checkpointing, self.how = False, "tanh"

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(
        self, x: Any, how: Any = None, *, mask: Any = None, back: Any = "tensor", **more: Any
    ) -> Any:
        total: Any = sum(pytree.tree_leaves(x)) if isinstance(x, (list, tuple, dict)) else x
        h = (
            checkpoint(self.first, total, use_reentrant=False)
            if self.checkpointing
            else (self.first(total))
        )
        if self.flags["twice"]:
            h = self.second(h)
        for _ in self.config.layers:
            h = self.second(h)
        for part in self.extra:
            h = part(h)
        if self.training and h.dim() == 2 and h.shape[0] > 1:
            h = h + 0.1 * self.bn(h)
        shift: Any = self.shift
        h = self.bend(h) if self.how == "tanh" else torch.relu(h)
        h = h * self.config.scale + shift + self.config.nested["deep"]["add"]
        if self.maybe is not None:
            h = h + self.maybe
        if mask is not None:
            h = h.masked_fill(mask, 0.25)
        for name in sorted(more):
            h = h + more[name] * len(name)
        y = self.head(h) + torch.full((W,), 0.125)  # of the default dtype
        if how is not None:
            y = y * how
        match back:
            case "tensor":
                return y
            case "pair":
                return y, h
            case "dict":
                return {"y": y, "none": None, "h": h.detach(), "x": x, "n": 3}
            case "view":
                return y, y.view(-1), y.sum(), y.argmax(-1)
        raise AssertionError(back)


# ---- a side


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


@dataclass
class Side:
    """model: what is called. ours: whether it is the accelerated one."""

    model: Any
    ours: bool
    losses: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    modes: dict[str, Any] = field(default_factory=dict)

    @property
    def core(self) -> Any:
        """The model itself, where a wrapper is called."""
        return self.model.module if isinstance(self.model, onward.Module) else self.model

    def drop(self) -> None:
        self.losses.clear()
        self.inputs.clear()


def new_sides() -> tuple[Side, Side]:
    model = Model()
    return Side(onward.accelerate(copy.deepcopy(model)), True), Side(model, False)


Action = Callable[[Side, int], Any]
ACTIONS: dict[str, Action] = {}
MUTATIONS: list[str] = []


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


def mutation(function: Action) -> Action:
    """An action that changes what forwards that are outstanding have read, so these are dropped."""

    def act(s: Side, k: int) -> Any:
        s.drop()
        return function(s, k)

    ACTIONS[function.__name__] = act
    MUTATIONS.append(function.__name__)
    return function


# ---- changes of the module


def _linears(m: Any) -> list[nn.Linear]:
    return [m.first.lin, m.second.lin, m.head]


@mutation
def freeze(s: Side, k: int) -> None:
    parts: list[Any] = [s.core.first, s.core.head.bias, s.core, s.core.second.norm]
    parts[k % 4].requires_grad_(False)


@mutation
def thaw(s: Side, k: int) -> None:
    parts: list[Any] = [s.core.first, s.core.head.bias, s.core, s.core.second.norm]
    parts[k % 4].requires_grad_(True)


def _plain_weight(lin: Any) -> bool:
    return "weight" in lin._parameters


@mutation
def weight(s: Side, k: int) -> None:
    """A weight is another tensor, or another's, or has other values."""
    lin, other = _linears(s.core)[k % 3], _linears(s.core)[(k + 1) % 3]
    if not (_plain_weight(lin) and _plain_weight(other)):
        return
    with torch.no_grad():
        match k // 3 % 8:
            case 0:
                lin.weight = nn.Parameter(lin.weight.detach() * 0.5)
            case 1:
                lin.weight.data = lin.weight.data * 0.75
            case 2:
                lin.weight.mul_(0.5)
            case 3:
                lin.weight.data.add_(0.125)
            case 4:
                lin.weight = other.weight
            case 5:
                if lin.weight is other.weight:
                    lin.weight = nn.Parameter(other.weight.detach().clone())
            case 6:
                lin.weight.data = lin.weight.data.t()
            case 7:
                lin.weight.set_(lin.weight.detach().clone() * 1.25)


@mutation
def bias(s: Side, k: int) -> None:
    lin = _linears(s.core)[k % 3]
    lin.bias = None if k // 3 % 2 else nn.Parameter(torch.full((W,), 0.1, dtype=lin.weight.dtype))


@mutation
def load(s: Side, k: int) -> None:
    state = {n: x + 0.0625 if x.is_floating_point() else x for n, x in s.core.state_dict().items()}
    s.core.load_state_dict(state, assign=bool(k % 2))


@mutation
def submodule(s: Side, k: int) -> None:
    torch.manual_seed(k)
    dtype = next(s.core.parameters()).dtype
    match k % 8:
        case 0:
            s.core.second = Part().to(dtype)
        case 1:
            s.core.second = s.core.first
        case 2:
            s.core.extra.append(nn.Linear(W, W).to(dtype))
        case 3:
            if len(s.core.extra):
                del s.core.extra[-1]
        case 4:
            s.core.first.drop = nn.Identity()
        case 5:
            s.core.first.norm = nn.Sequential(nn.LayerNorm(W), nn.Tanh()).to(dtype)
        case 6:
            s.core.extra = nn.ModuleList([s.core.first])
        case 7:
            s.core.head = nn.Linear(W, W, bias=False).to(dtype)


@mutation
def attribute(s: Side, k: int) -> None:
    values: list[Any] = [
        1,
        1.0,
        True,
        2.5,
        -0.0,
        0.0,
        torch.tensor(1.5),
        nn.Parameter(torch.ones(W)),
    ]
    match k % 9:
        case 0:
            gain = values[k // 9 % 8]
            for held in (vars(s.core.first), s.core.first._parameters):
                held.pop("gain", None)
            s.core.first.gain = gain
        case 1:
            s.core.config.scale = values[k // 9 % 6]
        case 2:
            s.core.config.layers.append(1)
        case 3:
            s.core.config.layers[:] = [1]
        case 4:
            s.core.config.nested["deep"]["add"] = 0.25 * (k // 9 % 3)
        case 5:
            s.core.flags["twice"] = not s.core.flags["twice"]
        case 6:
            s.core.how = "relu" if s.core.how == "tanh" else "tanh"
        case 7:
            s.core.config = Config(scale=1.5)
        case 8:
            s.core.first.norm.eps = 0.5 * (k // 9 % 2) + 1e-5


@mutation
def code(s: Side, k: int) -> None:
    """A method is another function."""
    match k % 3:
        case 0:
            s.core.bend = types.MethodType(lambda self, x: torch.sin(x), s.core)
        case 1:
            vars(s.core).pop("bend", None)
        case 2:
            s.core.bend = torch.sigmoid


@action
def mode(s: Side, k: int) -> None:
    parts: list[Any] = [s.core, s.core.first, s.core.bn, s.core.second.drop]
    parts[k % 4].train(bool(k // 4 % 2))


@mutation
def dtype(s: Side, k: int) -> None:
    s.core.to(torch.float64 if k % 2 else torch.float32)


@mutation
def moved(s: Side, k: int) -> None:
    s.core.to("cpu")
    if k % 3 == 0:
        s.core.share_memory()
    if k % 3 == 1:
        s.core.apply(lambda m: m.to(memory_format=torch.contiguous_format))


@mutation
def dropout(s: Side, k: int) -> None:
    """All or nothing, of which eager draws no numbers."""
    if isinstance(s.core.first.drop, nn.Dropout):
        s.core.first.drop.p = float(k % 2)


@mutation
def buffer(s: Side, k: int) -> None:
    held = s.core.shift
    match k % 6:
        case 0:
            held.add_(0.25)
        case 1:
            s.core.shift = held + 0.125
        case 2:
            s.core.maybe = None if s.core.maybe is not None else torch.full_like(held, 0.5)
        case 3:
            held.data = held.data * 2
        case 4:
            s.core.register_buffer("shift", held.clone() - 0.5, persistent=bool(k // 6 % 2))
        case 5:
            s.core.bn.running_mean.zero_()


@mutation
def parametrized(s: Side, k: int) -> None:
    lin: Any = _linears(s.core)[k % 3]
    held = parametrize.is_parametrized(lin)
    pruned = any(isinstance(h, prune.BasePruningMethod) for h in lin._forward_pre_hooks.values())
    if held:
        parametrize.remove_parametrizations(lin, "weight", leave_parametrized=bool(k // 3 % 2))
    elif pruned:
        prune.remove(lin, "weight")
    elif k // 3 % 2:
        parametrizations.weight_norm(lin)
    elif k // 6 % 2:
        parametrize.register_parametrization(lin, "weight", Doubled())
    else:
        prune.l1_unstructured(lin, "weight", amount=3)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


# ---- hooks


@mutation
def hook(s: Side, k: int) -> None:
    note = s.log.append

    def pre(_: Any, args: Any) -> Any:
        note("pre")
        return (args[0] * 0.5, *args[1:]) if k % 2 else None

    def post(_: Any, __: Any, out: Any) -> Any:
        note("post")
        return pytree.tree_map_only(torch.Tensor, lambda t: t * 1, out) if k % 2 else None

    where: list[Any] = [s.core.first, s.core.head, s.core, s.model]
    at = where[k // 2 % 4]
    kinds: list[Callable[[], Any]] = [
        lambda: at.register_forward_pre_hook(pre),
        lambda: at.register_forward_hook(post),
        lambda: at.register_full_backward_hook(lambda *_: note("backward")),
        lambda: at.register_full_backward_pre_hook(lambda *_: note("backward pre")),
    ]
    s.handles.append(kinds[k // 8 % 4]())


@mutation
def parameter_hook(s: Side, k: int) -> None:
    p = next(iter(s.core.head.parameters()))
    if not p.requires_grad:
        return
    kinds: list[Callable[[], Any]] = [
        lambda: p.register_hook(lambda g: g * 2),
        lambda: p.register_post_accumulate_grad_hook(lambda q: s.log.append(tuple(q.grad.shape))),
        lambda: p.register_hook(_stop),
    ]
    s.handles.append(kinds[k % 3]())


def _stop(_: Any) -> None:
    raise Stop


@mutation
def unhook(s: Side, k: int) -> None:
    if s.handles:
        s.handles.pop(k % len(s.handles)).remove()


# ---- copies, wrappers, parts


@mutation
def copied(s: Side, k: int) -> None:
    s.handles.clear()
    held = accelerated(s.core)
    old = s.core
    match k % 3:
        case 0:
            model = copy.deepcopy(old)
        case 1:
            model = _fresh(old)
        case 2:
            file = io.BytesIO()
            torch.save(s.core.state_dict(), file)
            file.seek(0)
            model = copy.deepcopy(old)
            model.load_state_dict(torch.load(file))  # noqa: TID251
    assert accelerated(model) is None
    s.model = model
    if s.ours:
        onward.accelerate(model)
        assert held is not None


def _fresh(model: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(model))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return copy.deepcopy(model)


@mutation
def wrapped(s: Side, k: int) -> None:
    s.model = s.core
    if s.ours and k % 2:
        s.model = onward.Module(s.core)


@action
def inner(s: Side, k: int) -> None:
    """A part is accelerated itself."""
    part = s.core.second if k % 2 else s.core.head
    if s.ours and accelerated(part) is None:
        onward.accelerate(part)


# ---- the surroundings


@action
def surroundings(s: Side, k: int) -> None:
    """From here on calls are made within other modes."""
    s.modes = [{}, {"grad": False}, {"inference": True}, {"autocast": True}, {"device": "cpu"},
               {"dtype": torch.float64}, {"anomaly": True}, {"checkpoint": True}][k % 8]  # fmt: skip


@contextmanager
def _within(modes: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        if "grad" in modes:
            stack.enter_context(torch.set_grad_enabled(modes["grad"]))
        if "inference" in modes:
            stack.enter_context(torch.inference_mode())
        if "autocast" in modes:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if "device" in modes:
            stack.enter_context(torch.device(modes["device"]))
        if "dtype" in modes:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(modes["dtype"])
        if "anomaly" in modes:
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        yield


# ---- calls


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def arguments(s: Side, k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call is given; inputs that require gradients are entered in the side."""
    dt = next(s.core.parameters()).dtype
    seed, kind = k // 32, k % 32
    x = tensor(seed, 3, W).to(dt)

    def needs(t: torch.Tensor) -> torch.Tensor:
        s.inputs.append(t.requires_grad_())
        return t

    match kind:
        case 0:
            return (x,), {}
        case 1:
            return (tensor(seed, 5, W).to(dt),), {}
        case 2:
            return (tensor(seed, 1, W).to(dt),), {}
        case 3:
            return (tensor(seed, 2, 3, W).to(dt),), {}
        case 4:
            return (tensor(seed, W).to(dt),), {}
        case 5:
            return (x, 2.0), {}
        case 6:
            return (x, 2), {}
        case 7:
            return (x, True), {}
        case 8:
            return (), {"how": torch.full((W,), 0.5, dtype=dt), "x": x}
        case 9:
            return (needs(x),), {}
        case 10:
            return (needs(x) * 2,), {}
        case 11:
            return (x, x), {}
        case 12:
            t = needs(x)
            return (t, t), {}
        case 13:
            whole = tensor(seed, 5, W).to(dt)
            return (whole[:3], whole[2:]), {}
        case 14:
            return (tensor(seed, W, 3).to(dt).t(),), {}
        case 15:
            return (tensor(seed, 3, 2 * W).to(dt)[:, ::2],), {}
        case 16:
            return (tensor(seed, 3, 1).to(dt).expand(3, W),), {}
        case 17:
            return ([x, tensor(seed + 1, 3, W).to(dt)],), {"back": "pair"}
        case 18:
            return ({"a": x, "b": tensor(seed + 1, 3, W).to(dt)},), {"mask": x > 0}
        case 19:
            return ([x, (x * 2, [x * 3])],), {"back": "dict"}
        case 20:
            return (x,), {"back": "view"}
        case 21:
            return (x,), {"one": tensor(1, W).to(dt), "another": 0.5}
        case 22:
            return (x,), {"another": 0.5, "one": tensor(1, W).to(dt)}
        case 23:
            return (x,), {"one": 1, "mask": None}
        case 24:
            return (torch.empty(0, W, dtype=dt),), {}
        case 25:
            return (tensor(seed, 3, W + 1).to(dt),), {}  # which does not fit
        case 26:
            return (x.to(torch.float64 if dt == torch.float32 else torch.float32),), {}
        case 27:
            return (x, s.core.shift), {}
        case 28:
            head = s.core.head.weight
            return (x, head[0]), {}
        case 29:
            return (needs(x).expand(2, 3, W), needs(torch.ones((), dtype=dt))), {}
        case 30:
            return (x,), {"how": nn.Parameter(torch.ones(W, dtype=dt))}
        case 31:
            return (x.to(torch.bfloat16),), {}
    raise AssertionError(kind)


def _called(s: Side, k: int) -> Any:
    args, kwargs = arguments(s, k)
    with _within(s.modes):
        if "checkpoint" in s.modes:
            return checkpoint(s.model, *args, use_reentrant=False, **kwargs)
        return s.model(*args, **kwargs)


def total(outputs: Any) -> torch.Tensor | None:
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    parts = [(i + 1.0) * t.double().sin().sum() for i, t in enumerate(tensors) if t.requires_grad]
    return torch.stack(parts).sum() if parts else None


@action
def forward(s: Side, k: int) -> Any:
    out = _called(s, k)
    loss = total(out)
    if loss is not None:
        s.losses.append(loss)
    return out


@action
def lost(s: Side, k: int) -> Any:
    """A forward of which nothing is kept."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), _called(s, k))


@action
def step(s: Side, k: int) -> Any:
    out = _called(s, k)
    loss = total(out)
    if loss is not None:
        loss.backward()
    return out


@action
def written(s: Side, k: int) -> Any:
    """The caller writes into the output, and differentiates what it has become."""
    out = _called(s, k)
    if isinstance(out, torch.Tensor) and "inference" not in s.modes:
        out.mul_(2)
        loss = total(out)
        if loss is not None:
            loss.backward()
    return out


@action
def backward(s: Side, k: int) -> None:
    if s.losses:
        keep = bool(k % 2)
        i = k // 2 % len(s.losses)
        (s.losses[i] if keep else s.losses.pop(i)).backward(retain_graph=keep)


@action
def twice(s: Side, k: int) -> None:
    """The second is one too many."""
    if s.losses:
        loss = s.losses.pop(k % len(s.losses))
        loss.backward()
        loss.backward()


@action
def together(s: Side, k: int) -> None:
    if s.losses:
        losses, s.losses = s.losses, []
        torch.stack(losses).sum().backward()


@action
def by_grad(s: Side, k: int) -> Any:
    """torch.autograd.grad by some tensors."""
    if not s.losses:
        return None
    wrt = [p for p in s.core.parameters() if p.requires_grad][k % 3 :: 2]
    wrt += [t for t in s.inputs if t.requires_grad][-1:]
    if not wrt:
        return None
    return torch.autograd.grad(s.losses.pop(), wrt, allow_unused=True)


@action
def drop(s: Side, k: int) -> None:
    if s.losses:
        s.losses.pop(k % len(s.losses))


# ---- gradients and updates


@action
def zero(s: Side, k: int) -> None:
    s.model.zero_grad(set_to_none=bool(k % 2))


@action
def edit_gradients(s: Side, k: int) -> None:
    held = [p for p in s.core.parameters() if p.grad is not None]
    for p in held[k % 3 :: 3]:
        match k // 3 % 3:
            case 0:
                p.grad.mul_(0.5)
            case 1:
                p.grad = p.grad * 3
            case 2:
                p.grad = None
    if held and k % 2:
        nn.utils.clip_grad_norm_(s.core.parameters(), 1.0)


@mutation
def update(s: Side, k: int) -> None:
    with torch.no_grad():
        for p in s.core.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad.clamp(-1, 1)


@action
def update_between(s: Side, k: int) -> Any:
    """Between a forward and its backward, which raises in eager, or is what eager gives."""
    out = _called(s, k)
    loss = total(out)
    with torch.no_grad():
        for p in s.core.parameters():
            p.mul_(0.9)
    s.drop()
    if loss is not None:
        loss.backward()
    return None


# ---- a history


def seen(error: BaseException) -> str:
    """What of an exception is compared: OnwardError stands for torch's errors of the same."""
    return "Stop" if isinstance(error, Stop) else "error"


def act(s: Side, step: Step) -> Any:
    name, k = step
    try:
        return ACTIONS[name](s, k)
    except (Exception, Stop) as error:
        s.drop()
        # a backward that is broken off leaves the gradients that it has come to, in no set order
        s.model.zero_grad()
        for given in s.inputs:
            given.grad = None
        if isinstance(error, OnwardError) and "gradients of gradients" in str(error):
            raise
        return error


class Differs(AssertionError):
    """The sides do."""


def run(history: Sequence[Step]) -> list[str]:
    """Does all of it to both sides. Returns the reasons for eager; raises Differs."""
    ours, eager = new_sides()
    told: list[str] = []
    for i, step in enumerate(history):
        where = f"action {i}, {step}"
        state = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = act(ours, step)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("always")
            want = act(eager, step)
        _same_outcomes(found, want, where)
        drops = any(isinstance(m, nn.Dropout) and m.p for m in eager.core.modules())
        if not drops and not torch.equal(after, torch.get_rng_state()):
            raise Differs(f"{where}: the random state")
        _same_sides(ours, eager, where)
        told += [str(w.message) for w in said if issubclass(w.category, EagerWarning)]
        rest = {str(w.message) for w in said if not issubclass(w.category, EagerWarning)}
        rest = {text for text in rest if ONCE not in text}
        if rest - {str(w.message) for w in others}:
            raise Differs(f"{where}: warns {rest}")
    return told


def _same_outcomes(found: Any, want: Any, where: str) -> None:
    a, b = isinstance(found, BaseException), isinstance(want, BaseException)
    if a != b:
        raise Differs(f"{where}: ours gave {_short(found)}, eager {_short(want)}") from (
            found if a else want
        )
    if a:
        if seen(found) != seen(want):
            raise Differs(f"{where}: {found!r} against {want!r}") from found
        return
    left, spec = pytree.tree_flatten(found)
    right, other = pytree.tree_flatten(want)
    if spec != other:
        raise Differs(f"{where}: {spec} against {other}")
    for x, y in zip(left, right, strict=True):
        _same(x, y, where)


def _short(x: Any) -> str:
    return f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else type(x).__name__


def _same(x: Any, y: Any, where: str) -> None:
    if type(x) is not type(y):
        raise Differs(f"{where}: {type(x)} against {type(y)}")
    if not isinstance(x, torch.Tensor):
        if x != y:
            raise Differs(f"{where}: {x} against {y}")
        return
    said = [(t.dtype, t.shape, t.requires_grad) for t in (x, y)]
    if said[0] != said[1]:
        raise Differs(f"{where}: {said[0]} against {said[1]}")
    loose = {"rtol": 2e-2, "atol": 2e-2} if x.dtype is torch.bfloat16 else CLOSE
    try:
        torch.testing.assert_close(x.detach(), y.detach(), **loose, equal_nan=True)
    except AssertionError as error:
        raise Differs(f"{where}: {error}") from None


def _same_sides(ours: Side, eager: Side, where: str) -> None:
    for kind in ("named_parameters", "named_buffers"):
        left, right = (dict(getattr(s.core, kind)()) for s in (ours, eager))
        if list(left) != list(right):
            raise Differs(f"{where}: {kind} {list(left)} against {list(right)}")
        for name, p in left.items():
            q = right[name]
            _same(p, q, f"{where}: {name}")
            _same_gradient(p.grad, q.grad, f"{where}: gradient of {name}")
    if len(ours.inputs) != len(eager.inputs):
        raise Differs(f"{where}: inputs")
    for p, q in zip(ours.inputs, eager.inputs, strict=True):
        _same_gradient(p.grad, q.grad, f"{where}: gradient of an input")
    if ours.log != eager.log:
        raise Differs(f"{where}: hooks saw {ours.log} against {eager.log}")
    if len(ours.losses) != len(eager.losses):
        raise Differs(f"{where}: {len(ours.losses)} losses against {len(eager.losses)}")


def _same_gradient(g: Any, h: Any, where: str) -> None:
    if (g is None) != (h is None):
        raise Differs(f"{where}: none here is {g is None}, there {h is None}")
    if g is None:
        return
    most = float(h.detach().abs().max()) if h.numel() else 0.0
    if (g.shape, g.dtype) != (h.shape, h.dtype):
        raise Differs(f"{where}: {g.shape} {g.dtype} against {h.shape} {h.dtype}")
    try:
        torch.testing.assert_close(g, h, rtol=1e-3, atol=2e-6 + 5e-5 * most, equal_nan=True)
    except AssertionError as error:
        raise Differs(f"{where}: {error}") from None
