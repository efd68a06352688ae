"""Ways from parameters to a loss: through complex numbers, and through ops that cut some of them.

Each is a function of x, f32[B,T,8], and of two parameters, w f32[8,8] and v f32[8]; eager PyTorch
says which of them have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pairs(h: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2))


def shown(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def turns(v: torch.Tensor, length: int) -> torch.Tensor:
    """Learned rotary frequencies: complex[T,4]."""
    angles = torch.outer(torch.arange(length).float(), v[:4])
    return torch.polar(torch.ones_like(angles), angles)


def cut(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Complex numbers made within no_grad: w has a gradient by the other factor alone."""
    with torch.no_grad():
        z = pairs(x * v)
    return shown(z * pairs(x @ w))


def written_window(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = pairs(x @ w).clone()
    z[:, 1:3] = pairs(x * v)[:, 1:3]
    return shown(z)


def written_all(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(x.shape[0], x.shape[1], 4, dtype=torch.complex64)
    z[..., :2] = pairs(x @ w)[..., :2]
    z[..., 2:] += pairs(x * v)[..., 2:]
    return shown(z)


def written_as_real(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = pairs(x @ w).clone()
    torch.view_as_real(z)[..., 0] = (x * v)[..., :4]
    return shown(z)


def times_in_place(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = pairs(x @ w).clone()
    z *= turns(v, x.shape[1])
    return shown(z)


def real_assigned(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = pairs(x @ w).clone()
    z.real = (x * v)[..., :4]
    return shown(z)


def imag_assigned(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    z = pairs(x @ w).clone()
    z.imag[...] = (x * v)[..., :4]
    return shown(z)


HELD = torch.polar(torch.ones(4), torch.arange(4.0))  # as models hold their frequencies
COMPLEX: dict[str, Way] = {
    "rotary": lambda x, w, v: shown(pairs(x @ w) * turns(torch.ones(8), x.shape[1])) * v,
    "learned frequencies": lambda x, w, v: shown(pairs(x @ w) * turns(v, x.shape[1])),
    "polar": lambda x, w, v: shown(torch.polar((x @ w).abs() + 0.5, x * v)),
    "complex": lambda x, w, v: shown(torch.complex(x @ w, x * v)),
    "real": lambda x, w, v: torch.complex(x @ w, x * v).real,
    "imag": lambda x, w, v: torch.complex(x @ w, x * v).imag,
    "abs": lambda x, w, v: torch.complex(x @ w, x * v).abs(),
    "angle": lambda x, w, v: torch.complex(x @ w, x * v).angle(),
    "conjugate": lambda x, w, v: shown(pairs(x @ w).conj() * pairs(x * v)),
    "conj_physical": lambda x, w, v: shown(pairs(x @ w).conj_physical() * pairs(x * v)),
    "product of matrices": lambda x, w, v: shown(pairs(x @ w) @ pairs(x * v).transpose(1, 2)),
    "einsum": lambda x, w, v: shown(torch.einsum("btc,buc->btu", pairs(x @ w), pairs(x * v))),
    "fft": lambda x, w, v: shown(torch.fft.fft(x @ w)) * v.repeat(2),
    "fft2": lambda x, w, v: torch.fft.fft2(x @ w).real * v,
    "fftn": lambda x, w, v: torch.fft.fftn(x @ w, dim=(1, 2)).imag * v,
    "filter": lambda x, w, v: torch.fft.ifft(torch.fft.fft(x @ w) * turns(v, 8)[0].repeat(2)).real,
    "rfft": lambda x, w, v: shown(torch.fft.rfft(x @ w)) * v[:1],
    "irfft": lambda x, w, v: torch.fft.irfft(torch.fft.rfft(x @ w) * 1j, n=8) * v,
    "fftshift": lambda x, w, v: torch.fft.fftshift(torch.fft.fft(x @ w)).real * v,
    "hfft": lambda x, w, v: torch.fft.hfft(pairs(x @ w)) * v[:6],
    "where": lambda x, w, v: shown(torch.where(x[..., :4] > 0, pairs(x @ w), pairs(x * v))),
    "index": lambda x, w, v: shown(pairs(x @ w)[:, torch.tensor([2, 0, 0])]) * v,
    "index_select": lambda x, w, v: shown(pairs(x @ w).index_select(1, torch.tensor([2, 0]))) * v,
    "gather": lambda x, w, v: (
        shown(pairs(x @ w).gather(1, torch.zeros(x.shape[0], 2, 4, dtype=torch.long))) * v
    ),
    "cat": lambda x, w, v: shown(torch.cat([pairs(x @ w), pairs(x * v)], dim=1)),
    "stack": lambda x, w, v: shown(torch.stack([pairs(x @ w), pairs(x * v)], dim=1)),
    "sum": lambda x, w, v: shown(pairs(x @ w).sum(1) + pairs(x * v).mean(1)),
    "division": lambda x, w, v: shown(pairs(x @ w) / (pairs(x * v) + 3)),
    "exponential": lambda x, w, v: shown(torch.exp(1j * (x @ w).to(torch.complex64))) * v.repeat(2),
    "power": lambda x, w, v: shown(pairs(x @ w) ** 2) * v,
    "pairs of a conjugate": lambda x, w, v: shown(pairs(x @ w).conj()) * v,
    "imag of a conjugate": lambda x, w, v: pairs(x @ w).conj().imag * v[:4],
    "adjoint": lambda x, w, v: shown(pairs(x @ w).mH @ pairs(x * v)),
    "a detached real part": lambda x, w, v: shown(torch.complex((x @ w).detach(), x * v)),
    "a detached length": lambda x, w, v: shown(torch.polar((x @ w).abs().detach() + 0.5, x * v)),
    "a detached angle": lambda x, w, v: shown(torch.polar((x @ w).abs() + 0.5, (x * v).detach())),
    "real part assigned": real_assigned,
    "imag part assigned": imag_assigned,
    "a real part alone": lambda x, w, v: torch.complex(x @ w, (x * v).detach()).real,
    "detached": lambda x, w, v: shown(pairs(x @ w).detach() * pairs(x * v)),
    "converted": lambda x, w, v: ((x @ w).to(torch.complex64) * (1j + pairs(v)[0])).imag,
    "within no_grad": cut,
    "window written": written_window,
    "all written": written_all,
    "written as real": written_as_real,
    "times in place": times_in_place,
    "masked": lambda x, w, v: shown(pairs(x @ w).masked_fill(x[..., :4] > 0, 0)) * v,
    "padded": lambda x, w, v: shown(F.pad(pairs(x @ w), (0, 2))) * v[0],
    "size alone": lambda x, w, v: x * w[0] + torch.zeros_like(pairs(x * v)).real.sum(),
    "outer": lambda x, w, v: shown(
        pairs(x @ w) * torch.outer(v[:2], v[4:6]).to(torch.complex64).flatten()
    ),
    "norm": lambda x, w, v: torch.linalg.vector_norm(torch.complex(x @ w, x * v), dim=-1),
    "tuple": lambda x, w, v: shown(torch.cat([z * 2 for z in (pairs(x @ w), pairs(x * v))])),
    "split": lambda x, w, v: shown(torch.tensor_split(pairs(x @ w), 2, -1)[1]) * v[:4],
    "by a constant": lambda x, w, v: shown(pairs(x @ w) * HELD) * v,
    "double": lambda x, w, v: shown(torch.complex((x @ w).double(), (x * v).double())).float(),
}


# ways that a graph cannot hold: a Trainer refuses them, an accelerated model runs them in eager
NO_TRANSLATION = (
    "angle", "filter", "rfft", "irfft", "fftshift", "hfft", "where", "gather", "sum", "division",
    "exponential", "power", "window written", "all written", "written as real", "masked", "padded",
    "size alone", "norm", "real part assigned", "imag part assigned",
)  # fmt: skip


class Net(nn.Module):
    """A model with a loss that is not symmetric in the way's result."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.rand(8) + 0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.atleast_1d(self.way(x, self.w, self.v))
        return (self.scale * y * (torch.arange(y.shape[-1]) + 1)).square().mean()


def first(w: torch.Tensor) -> torch.Tensor:
    return w[0] * 1.0


def in_place(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x * first(w))
    return y.copy_(x * v)


def over(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = x * first(w)
    return y.copy_(x * v)


def filled(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = x * first(w)
    y.fill_(2.0)
    return y * v


def by_view(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], x.shape[1], 8)
    y[..., :4].copy_(x[..., :4] * first(w)[:4])
    y[..., 4:].add_(x[..., 4:] * v[4:])
    return y


def later(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A way through a tensor that is read before it is overwritten."""
    y = x * v
    z = y * 2
    y.mul_(first(w))
    return z


def within_no_grad(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = (x * first(w)).tanh()
    return x * v * z


def with_grad_again(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(True):
        y, z = x * v, (x * first(w)).detach()
    return y * z


def in_dict(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    held = {"a": (x * v, [x * first(w)]), "b": x}
    return held["a"][0] * held["b"]


def again(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    made = checkpoint(lambda x, v: (x * v).tanh(), x, v, use_reentrant=False)
    assert isinstance(made, torch.Tensor)
    return made * first(w).detach()


class Own(torch.autograd.Function):
    """A function whose backward gives a gradient to its first input alone."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(w)
        return x * w, x * 2

    @staticmethod
    def backward(ctx, dy, dz):  # type: ignore[no-untyped-def, override]
        (w,) = ctx.saved_tensors
        return dy * w + dz * 2, None


def weighted(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(x.shape[0] * x.shape[1]) % 8
    return F.cross_entropy(x.flatten(0, 1) @ w, labels, weight=v.detach())


def statistics(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = x.flatten(0, 1) @ w
    return F.batch_norm(y, v.detach().clone(), v.detach() * 2, v, training=False)


class Nothing(torch.autograd.Function):
    """A function whose backward returns None."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        return None


def detached_in_place(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh() * 1
    y.detach_()
    return x * v * y


def inferred(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = (x @ w).tanh()
    return x * v * y.clone()


def switched(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    y = x @ w
    torch.set_grad_enabled(True)
    return x * v * y


@torch.no_grad()
def decorated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh()


REAL: dict[str, Way] = {
    "no_grad as a decorator": lambda x, w, v: decorated(x, w) * x * v,
    "inference_mode as a decorator": lambda x, w, v: (
        torch.inference_mode()(lambda: x @ w)().clone() * x * v
    ),
    "within inference_mode": inferred,
    "switched off and on": switched,
    "detached in place": detached_in_place,
    "asking anew for a gradient": lambda x, w, v: (x @ w).detach().requires_grad_() * v,
    "a function without a gradient": lambda x, w, v: Nothing.apply(x @ w) * x * v,
    "a function without one on both sides": lambda x, w, v: (
        Nothing.apply(x @ w) * Nothing.apply(x * v)
    ),
    "copied into zeros": in_place,
    "copied over": over,
    "filled": filled,
    "by views": by_view,
    "read before the write": later,
    "within no_grad": within_no_grad,
    "with gradients on": with_grad_again,
    "in a dict": in_dict,
    "checkpoint": again,
    "own function": lambda x, w, v: Own.apply(x * v, first(w))[0],
    "own function, other result": lambda x, w, v: Own.apply(x * v, first(w))[1],
    "class weights": weighted,
    "labels as shares": lambda x, w, v: F.cross_entropy(x @ w, (x * v).softmax(1)),
    "bce logits, targets": lambda x, w, v: F.binary_cross_entropy_with_logits(
        x @ w, (x * v).sigmoid()
    ),
    "mse targets": lambda x, w, v: F.mse_loss(x @ w, x * v),
    "smooth l1 targets": lambda x, w, v: F.smooth_l1_loss(x @ w, x * v),
    "kl targets": lambda x, w, v: F.kl_div(
        (x @ w).log_softmax(-1), (x * v).softmax(-1), reduction="batchmean"
    ),
    "running statistics": statistics,
    "means of a layer norm": lambda x, w, v: torch.native_layer_norm(x @ w, [8], v, v, 1e-5)[1],
    "its result": lambda x, w, v: torch.native_layer_norm(x, [8], v, first(w), 1e-5)[0],
    "least of two": lambda x, w, v: torch.aminmax(x @ w, dim=-1)[0] * v[0],
    "layer norm": lambda x, w, v: F.layer_norm(x @ w, (8,), v, None),
    "expand_as": lambda x, w, v: v.expand_as(x * first(w)) * x,
    "view_as": lambda x, w, v: (x * v).view_as(x * first(w)),
    "reshape_as": lambda x, w, v: (x * v).reshape_as(x * first(w)),
    "type_as": lambda x, w, v: (x * v).type_as(first(w)),
    "zeros_like": lambda x, w, v: x * v + torch.zeros_like(first(w)),
    "ones_like": lambda x, w, v: x * v * torch.ones_like(first(w)),
    "full_like": lambda x, w, v: x * v * torch.full_like(first(w), 2.0),
    "new_ones": lambda x, w, v: x * v * first(w).new_ones(8),
    "new_full": lambda x, w, v: x * v * first(w).new_full((8,), 3.0),
    "to int": lambda x, w, v: x * v * (first(w) * 10).to(torch.int64),
    "by fp64": lambda x, w, v: (x.double() * v.double()).float() * first(w),
    "bool masks": lambda x, w, v: x * v * (first(w) > 0),
    "masks as numbers": lambda x, w, v: x * v * (first(w) > 0).float(),
    "where": lambda x, w, v: torch.where(first(w) > 0, x * v, x),
    "where, both": lambda x, w, v: torch.where(x > 0, x * v, x @ w),
    "masked_fill": lambda x, w, v: (x * v).masked_fill(first(w) > 0, 0.5),
    "masked_fill of a tensor": lambda x, w, v: (x * v).masked_fill(x > 0, first(w)[0]),
    "round": lambda x, w, v: x * v * torch.round(first(w)),
    "floor": lambda x, w, v: x * v * torch.floor(first(w)),
    "ceil": lambda x, w, v: x * v * torch.ceil(first(w)),
    "trunc": lambda x, w, v: x * v * torch.trunc(first(w)),
    "sign": lambda x, w, v: x * v * torch.sign(first(w)),
    "frac": lambda x, w, v: x * v * torch.frac(first(w)),
    "floor division": lambda x, w, v: x * v * torch.div(first(w), 0.1, rounding_mode="floor"),
    "remainder": lambda x, w, v: x * v * torch.remainder(first(w), 0.3),
    "straight through": lambda x, w, v: (
        x * v * (first(w) + (torch.round(first(w)) - first(w)).detach())
    ),
    "linspace": lambda x, w, v: x * v * torch.linspace(first(w)[0].detach(), 1.0, 8),
    "nan_to_num": lambda x, w, v: x * v * torch.nan_to_num(first(w)),
    "clamp by tensors": lambda x, w, v: torch.clamp(x, -v.abs(), first(w).abs()),
    "maximum": lambda x, w, v: torch.maximum(x * v, first(w)),
    "sort": lambda x, w, v: (x * v).sort(-1).values * first(w),
    "order": lambda x, w, v: (x * first(w)).sort(-1).indices * v,
    "argsort": lambda x, w, v: (x * first(w)).argsort(-1) * v,
    "topk": lambda x, w, v: (x * v).topk(4, -1).values * first(w)[:4],
    "places of topk": lambda x, w, v: (x * first(w)).topk(4, -1).indices * v[:4],
    "max and its place": lambda x, w, v: (x * v).max(-1).values + (x * first(w)).max(-1).indices,
    "cumsum": lambda x, w, v: (x * v).cumsum(-1) * first(w),
    "cummax": lambda x, w, v: (x * v).cummax(-1).values * first(w),
    "gather by order": lambda x, w, v: (x * v).gather(-1, (x @ w).argsort(-1)),
    "lerp": lambda x, w, v: torch.lerp(x, x * v, first(w).sigmoid()),
    "addcmul": lambda x, w, v: torch.addcmul(x, v, first(w)),
    "index_put": lambda x, w, v: (x * v).index_put((torch.tensor([0, 1]),), first(w)),
    "index_add": lambda x, w, v: (x * v).index_add(0, torch.tensor([0]), (x @ w)[:1]),
    "scatter": lambda x, w, v: (x * v).scatter(
        -1, torch.zeros(x.shape[0], x.shape[1], 8, dtype=torch.long), x @ w
    ),
    "embedding": lambda x, w, v: F.embedding((x[..., 0] > 0).long(), w) * v,
    "embedding by a sum": lambda x, w, v: F.embedding_bag(
        (x[..., 0] > 0).long(), w, mode="sum", per_sample_weights=(x * v)[..., 0]
    ),
    "attention mask": lambda x, w, v: F.scaled_dot_product_attention(
        x[:, None],
        x[:, None] @ w,
        x[:, None],
        attn_mask=(v[:5, None] * v[:5]).expand(x.shape[1], x.shape[1]),
    ),
    "attention": lambda x, w, v: F.scaled_dot_product_attention(
        (x * v)[:, None], (x @ w)[:, None], x[:, None]
    ),
    "std and mean": lambda x, w, v: torch.std_mean(x * v, -1)[1][..., None] * first(w),
    "unbind": lambda x, w, v: torch.stack([x * v, x * first(w)]).unbind(0)[0],
    "split": lambda x, w, v: torch.cat([x * v, x @ w], -1).split(8, -1)[0],
    "no rows": lambda x, w, v: torch.cat([(x @ w)[:0], x * v]),
    "to a power of zero": lambda x, w, v: x * v * first(w) ** 0,
    "size alone": lambda x, w, v: x * v * w.shape[0],
    "read by Python": lambda x, w, v: x * v * (2.0 if w.requires_grad else 1.0),
    "einsum": lambda x, w, v: torch.einsum("btc,cd,d->btd", x, w, v),
    "pad by a value": lambda x, w, v: F.pad(x * v, (0, 8), value=1.0) * first(w).repeat(2),
    "roll": lambda x, w, v: (x * v).roll(1, -1) * first(w),
    "rsub": lambda x, w, v: 1.0 - x * v * first(w).detach(),
    "one_hot": lambda x, w, v: F.one_hot((x @ w).argmax(-1), 8) * v,
    "bucketize": lambda x, w, v: torch.bucketize(x @ w, torch.tensor([0.0, 1.0])) * v,
    "prod": lambda x, w, v: x * v * first(w).prod(),
    "logsumexp": lambda x, w, v: (x * v).logsumexp(-1) * first(w)[0],
    "dropout off": lambda x, w, v: F.dropout(x * v, 0.0) * first(w),
    "dropout of all": lambda x, w, v: F.dropout(x @ w, 1.0) + x * v,
    "heaviside": lambda x, w, v: torch.heaviside(x, v.detach()) * first(w),
}
DRAWN: dict[str, Way] = {
    "bernoulli": lambda x, w, v: torch.bernoulli(first(w).sigmoid()) * x * v,
    "rand_like": lambda x, w, v: torch.rand_like(first(w)) * x * v,
    "randn_like": lambda x, w, v: torch.randn_like(first(w)) * x * v,
    "multinomial": lambda x, w, v: torch.multinomial(first(w).softmax(-1), 2)[0] * x * v,
    "gumbel": lambda x, w, v: F.gumbel_softmax(x @ w, hard=True) * v,
    "dropout": lambda x, w, v: F.dropout(x * v, 0.5) * first(w),
}
