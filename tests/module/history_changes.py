"""Actions that change a module, its hooks, or what stands around it."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251
import types
from collections.abc import Callable
from typing import Any

import torch
from history_sides import Apart, Config, Part, Side, Stop, W, action, mutation
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree

import onward
from onward.module import accelerated

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
                lin.weight.copy_(lin.weight.detach().clone() * 1.25)


@mutation
def bias(s: Side, k: int) -> None:
    lin: Any = _linears(s.core)[k % 3]
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
def apart(s: Side, k: int) -> None:
    """A part that runs in PyTorch comes, changes and goes."""
    held = [m for m in s.core.extra if isinstance(m, Apart)]
    dtype = next(s.core.parameters()).dtype
    torch.manual_seed(k)
    if not held:
        s.core.extra.append(Apart().to(dtype))
        return
    match k % 7:
        case 0:
            held[0].scale = 0.25 * (k // 7 % 3)
        case 1:
            held[0].sizes.append(0.25 * (k // 7 % 3))
        case 2:
            held[0].calls = 7
        case 3:
            held[0].inner = nn.Sequential(nn.Linear(W, W), nn.Tanh()).to(dtype)
        case 4:
            held[0].requires_grad_(bool(k // 7 % 2))
        case 5:
            s.core.extra.append(held[0])
        case 6:
            s.core.extra = nn.ModuleList(m for m in s.core.extra if m is not held[0])


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
