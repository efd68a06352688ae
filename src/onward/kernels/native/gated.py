"""The product of gated linear units and its gradient, each in one pass over memory.

Operands may be strided: both halves are windows of one product's result. silu of 1024 x 2048 in
f32, bf16 and fp16 on 2 threads of an AMD EPYC (AVX-512), 2026-11-24: 194, 275 and 584 us, the
gradient 551, 672 and 1162.
"""

from __future__ import annotations

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.activation import NUMBER
from onward.kernels.native.layouts import layouts, more_dims, of_four_dims
from onward.kernels.native.library import library, one_element_type, where


def _unsupported(spec: KernelSpec) -> str | None:
    return more_dims(spec) or one_element_type(spec)


def _bind(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    gate, up, y = map(of_four_dims, (args.x(0), args.x(1), args.y))
    return c.launch(
        "onward_gated_activation", **layouts(gate=gate, up=up, y=y), sizes=y.shape,
        kind=NUMBER[args.attrs["activation"]],
    )  # fmt: skip


def _bind_grad(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    dy, gate, up = (of_four_dims(args.x(i)) for i in range(3))
    dgate, dup = map(of_four_dims, args.outputs)
    return c.launch(
        "onward_gated_activation_grad",
        **layouts(dy=dy, gate=gate, up=up, dgate=dgate, dup=dup), sizes=dy.shape,
        kind=NUMBER[args.attrs["activation"]],
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "GatedActivation": Kernel(
        "native.gated_activation", _bind, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), strided=(0,),
    ),
    "GatedActivationGrad": Kernel(
        "native.gated_activation_grad", _bind_grad, unsupported=_unsupported, where=where,
        inplace=((0, 1), (1, 2), (0, 0), (1, 0)), strided=(0, 1),
    ),
}  # fmt: skip
