"""Actions that call a module, differentiate, and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from history_sides import Side, W, action, mutation
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

# ---- the surroundings


@action
def surroundings(s: Side, k: int) -> None:
    """From here on calls are made within other modes."""
    modes: list[dict[str, Any]] = [
        {}, {"grad": False}, {"inference": True}, {"autocast": True}, {"device": "cpu"},
        {"dtype": torch.float64}, {"anomaly": True}, {"checkpoint": True},
    ]  # fmt: skip
    s.modes = modes[k % 8]
    s.rounded = s.rounded or "autocast" in s.modes


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
