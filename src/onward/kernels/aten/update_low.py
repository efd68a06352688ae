"""Updates of Adam with moments of less precision than f32: in chunks, whose moments are converted
to the parameter's precision for torch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from onward.graph.ops.optimizers.quantization import BLOCK, blocks
from onward.kernels import moments
from onward.kernels.aten.random import on_the_cpu
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch, anywhere

aten = torch.ops.aten
_CHUNK = 1 << 16  # elements: a multiple of a block of codes, and of a row of the generator
_WIDE_CHUNK = 1 << 22  # on other devices, since each of fifty operators is a launch
_BYTES = 128  # per element, in all that a chunk allocates


@dataclass(frozen=True)
class _Layout:
    """The layout of an op's inputs. hyper: position of the first hyperparameter; after these come
    the update's number, the seed if `drawn`, and the scale."""

    hyper: int
    drawn: bool

    @property
    def host(self) -> tuple[int, ...]:
        return tuple(range(self.hyper, self.hyper + 6))

    @property
    def scale(self) -> int:
        return self.hyper + 6 + self.drawn


_BF16, _8BIT = _Layout(4, drawn=True), _Layout(6, drawn=False)


def _update(
    args: KernelArguments, layout: _Layout
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Makes a function that calls torch's kernel on `(p, g, m, v)` of one dtype, which updates p, m
    and v. It is made anew for each launch, since it reads the hyperparameters."""
    lr, beta1, beta2, eps, decay = (float(args.x(i)) for i in layout.host[:5])
    count = torch.full((), float(args.x(layout.host[5])), device=args.y.device)
    update = aten._fused_adamw_ if args.attrs["decoupled"] else aten._fused_adam_
    scale = args.inputs[layout.scale] if layout.scale < len(args.inputs) else None

    def move(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        g = g.to(p.dtype)
        update(
            [p], [g if scale is None else g * scale], [m], [v], [], [count], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return move


def _copied(args: KernelArguments) -> torch.Tensor:
    """Copies the parameter to its output's memory, unless it lies there; returns that, flat."""
    if args.y.data_ptr() != args.x().data_ptr():
        args.y.copy_(args.x())
    return args.y.view(-1)


def _bind_bf16(args: KernelArguments, chunk: int) -> Launch:
    g, m, v = (args.x(i).view(-1) for i in (1, 2, 3))
    new_m, new_v = (y.view(-1) for y in args.outputs[1:])
    seed, site, first = args.x(10), int(args.attrs["site"]), int(args.attrs.get("first", 0))

    def launch() -> None:
        move, p = _update(args, _BF16), _copied(args)
        for start in range(0, p.numel(), chunk):
            some = slice(start, min(start + chunk, p.numel()))
            kept = [x[some].to(p.dtype, copy=True) for x in (m, v)]
            move(p[some], g[some], *kept)
            drawn = moments.words(seed, site, first + start, some.stop - start)
            new_m[some] = moments.rounded(kept[0], drawn & 0xFFFF)
            new_v[some] = moments.rounded(kept[1], drawn >> 16)

    return launch


def _bind_8bit(args: KernelArguments, chunk: int) -> Launch:
    g = args.x(1).view(-1)
    held = [args.x(i).view(-1) for i in range(2, 6)]
    made = [y.view(-1) for y in args.outputs[1:]]
    moments.prepare(args.y.dtype, args.y.device)

    def launch() -> None:
        move, p = _update(args, _8BIT), _copied(args)
        for start in range(0, p.numel(), chunk):
            some = slice(start, min(start + chunk, p.numel()))
            rows = slice(start // BLOCK, blocks(some.stop))
            kept = [
                moments.dequantized(held[i][some], held[i + 1][rows], signed, p.dtype)
                for i, signed in ((0, True), (2, False))
            ]
            move(p[some], g[some], *kept)
            for i, (x, signed) in enumerate(zip(kept, (True, False), strict=True)):
                made[2 * i][some], made[2 * i + 1][rows] = moments.quantized(x, signed)

    return launch


def _bytes(spec: KernelSpec, chunk: int) -> int:
    return _BYTES * max(BLOCK, min(spec.outputs[0].numel, chunk))


def _kernels(
    name: str,
    bind: Callable[..., Launch],
    layout: _Layout,
    pairs: tuple[tuple[int, int], ...],
) -> tuple[Kernel, ...]:
    return tuple(
        Kernel(
            f"aten.{name}{suffix}", partial(bind, chunk=chunk), inplace=pairs, contiguous=None,
            workspace=partial(_bytes, chunk=chunk), host=layout.host, where=where,
        )
        for suffix, chunk, where in (("", _CHUNK, on_the_cpu), ("_wide", _WIDE_CHUNK, anywhere))
    )  # fmt: skip


KERNELS: dict[str, tuple[Kernel, ...]] = {
    "AdamUpdateBf16": _kernels("adam_bf16", _bind_bf16, _BF16, ((0, 0), (1, 2), (2, 3))),
    "AdamUpdate8Bit": _kernels(
        "adam_8bit", _bind_8bit, _8BIT, ((0, 0), (1, 2), (2, 3), (3, 4), (4, 5))
    ),
}
