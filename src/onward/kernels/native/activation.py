"""Activations, alone and with the bias of the matrix product before them, and their gradients.

Milliseconds at 1024 x 2048 on 2 threads of an AMD EPYC (AVX-512), warm caches, 2026-11-21, from
`benchmarks/kernel_times.py`; in parentheses torch's, without a bias: gelu 0.65 (0.48, with an erf
accurate to 1.5e-7; this one is also accurate where the cdf is small), its gradient 0.71 (0.92);
tanh gelu with bias 0.40, its gradient 0.64 (1.9), with the bias's 0.76. 1 ms is 16.8 GB/s for a
value, 25 for a gradient.

The same size in f32, bf16 and fp16, 2 threads of an AMD EPYC (AVX-512), 2026-11-24, in us: gelu
352, 439, 736; its gradient 413, 495, 814; relu 90, 100, 308; tanh gelu with bias 217, 330, 707, and
its gradient with the bias's 462, 509, 1006. In cache, conversions cost more than fewer bytes save.
"""

from __future__ import annotations

from collections.abc import Callable

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, one_element_type, where

NUMBER = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}  # numbered as in src/activation.cpp


def _gelu(args: KernelArguments) -> str:
    return "gelu_tanh" if args.attrs.get("approximate", "none") == "tanh" else "gelu"


def _plain(activation: Callable[[KernelArguments], str]) -> Callable[[KernelArguments], Launch]:
    def bind(args: KernelArguments) -> Launch:
        c = library()
        assert c is not None
        return c.launch(
            "onward_activation", x=args.x(), y=args.y, n=args.y.numel(),
            kind=NUMBER[activation(args)],
        )  # fmt: skip

    return bind


def _bind_gelu_grad(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    dy, x, dx = args.x(0), args.x(1), args.y
    return c.launch(
        "onward_activation_grad", dy=dy, x=x, dx=dx, n=dx.numel(), kind=NUMBER[_gelu(args)]
    )


def _bind_biased(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    x, bias = args.x(0), args.x(1)
    kind = NUMBER[args.attrs["activation"]]
    return c.launch(
        "onward_bias_activation", x=x, bias=bias, y=args.y,
        rows=x.numel() // max(bias.numel(), 1), features=bias.numel(), kind=kind,
    )  # fmt: skip


def row_parts(rows: int) -> int:
    """The number of parts in which rows are summed: enough for the threads of a large machine, and
    the same on all machines."""
    return max(1, min(64, rows // 16))


def _partial_sums(spec: KernelSpec) -> list[Type]:
    rows, features = _rows(spec.inputs[1])
    return [Type(DType.FLOAT, (row_parts(rows), features))]


def _rows(type: Type | None) -> tuple[int, int]:
    """Rows and features of `f[*S,D]`."""
    assert type is not None
    *outer, features = [int(n) for n in type.shape]  # type: ignore[arg-type]
    rows = 1
    for n in outer:
        rows *= n
    return rows, features


def _bind_biased_grad(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    dy, x, (dx, dbias), (partial,) = args.x(0), args.x(1), args.outputs, args.scratch
    bias = args.inputs[2] if len(args.inputs) > 2 else None
    features = dbias.numel()
    return c.launch(
        "onward_bias_activation_grad", dy=dy, x=x, bias=bias, dx=dx, dbias=dbias, partial=partial,
        rows=x.numel() // max(features, 1), features=features, parts=partial.shape[0],
        kind=NUMBER[args.attrs["activation"]],
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "Gelu": Kernel(
        "native.gelu", _plain(_gelu), unsupported=one_element_type, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
    "GeluGrad": Kernel(
        "native.gelu_grad", _bind_gelu_grad, unsupported=one_element_type, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None,
    ),
    "Relu": Kernel(
        "native.relu", _plain(lambda args: "relu"), unsupported=one_element_type, where=where,
        inplace=((0, 0),), contiguous=None,
    ),
    "BiasActivation": Kernel(
        "native.bias_activation", _bind_biased, unsupported=one_element_type, where=where,
        inplace=((0, 0),), contiguous=None,
    ),
    "BiasActivationGrad": Kernel(
        "native.bias_activation_grad", _bind_biased_grad, unsupported=one_element_type, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_partial_sums,
    ),
}  # fmt: skip
