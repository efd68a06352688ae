"""Adam and AdamW in one pass, including gradient clipping, with moments of f32 or less precision.

50257 x 512 on 2 threads of an AMD EPYC (AVX-512), 2026-11-21, from `benchmarks/kernel_times.py`:
12.7 ms, 57 GB/s (torch's fused kernel 12.8), clipped 12.5 (12.8); 512 x 2048, in cache, 0.22 ms
(0.25). With a gradient of f32, bf16 and fp16 1024 x 2048 in 329, 230 and 281 us, 2026-11-24.
"""

from __future__ import annotations

from typing import Any

import torch

from onward.graph.ops.optimizers.quantization import SIGNED, UNSIGNED
from onward.graph.ops.optimizers.rounding import ROW
from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, not_f32, not_one_element, where

_HYPER_NAMES = ("lr", "first", "second", "epsilon", "weight_decay")  # f64[], read at each launch


def _hyper(args: KernelArguments, start: int) -> dict[str, Any]:
    """The hyperparameters, the update's number and the kind of weight decay, as arguments of the C
    functions."""
    given = zip(_HYPER_NAMES, args.inputs[start : start + 5], strict=True)
    return {**dict(given), "step": args.x(start + 5), "decoupled": int(args.attrs["decoupled"])}


def _scale(args: KernelArguments, i: int) -> torch.Tensor | None:
    return args.inputs[i] if len(args.inputs) > i else None


def _not_f32(spec: KernelSpec, hyper: int, kept: tuple[int, ...]) -> str | None:
    """The reason why a call is not an f32 update with a gradient of any supported dtype; None where
    it is. kept: positions of moments that the caller checks; each output is one position
    earlier."""
    if any(t is None or t.dtype != DType.DOUBLE for t in spec.inputs[hyper : hyper + 5]):
        return "hyperparameters that are not doubles"
    given = [t for i, t in enumerate(spec.inputs) if i not in (1, *kept, *range(hyper, hyper + 5))]
    made = [t for i, t in enumerate(spec.outputs) if i + 1 not in kept]
    return not_f32((*given, *made)) or not_one_element(spec.inputs[1:2])


def _unsupported(spec: KernelSpec) -> str | None:
    return _not_f32(spec, 5, ())


def _unsupported_bf16(spec: KernelSpec) -> str | None:
    reason = _not_f32(spec, 4, (2, 3))
    if reason is not None:
        return reason
    g, m, v = (t.dtype for t in spec.inputs[1:4] if t is not None)
    if m != v or m not in (DType.FLOAT, DType.BFLOAT16) or (g in LOW and m in LOW and g != m):
        return f"moments of {m.name.lower()} and {v.name.lower()} by a gradient of {g.name.lower()}"
    return None


def _unsupported_8bit(spec: KernelSpec) -> str | None:
    return _not_f32(spec, 6, ())


def _bind_adam(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    p, g, m, v = (args.x(i) for i in range(4))
    new_p, new_m, new_v = args.outputs[:3]
    new_most = args.outputs[3] if len(args.outputs) > 3 else None
    return c.launch(
        "onward_adam", p=p, g=g, m=m, v=v, most=args.inputs[4], new_p=new_p, new_m=new_m,
        new_v=new_v, new_most=new_most, n=p.numel(), scale=_scale(args, 11), **_hyper(args, 5),
    )  # fmt: skip


def _bind_bf16(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    p, g, m, v = (args.x(i) for i in range(4))
    new_p, new_m, new_v = args.outputs
    return c.launch(
        "onward_adam_bf16", p=p, g=g, m=m, v=v, new_p=new_p, new_m=new_m, new_v=new_v, n=p.numel(),
        seed=args.x(10), site=int(args.attrs["site"]), scale=_scale(args, 11),
        first_row=int(args.attrs.get("first", 0)) // ROW, **_hyper(args, 4),
    )  # fmt: skip


def _bind_8bit(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    p, g, m, m_absmax, v, v_absmax = (args.x(i) for i in range(6))
    new_p, new_m, new_m_absmax, new_v, new_v_absmax = args.outputs
    return c.launch(
        "onward_adam_8bit", p=p, g=g, m=m, m_absmax=m_absmax, v=v, v_absmax=v_absmax, new_p=new_p,
        new_m=new_m, new_m_absmax=new_m_absmax, new_v=new_v, new_v_absmax=new_v_absmax,
        n=p.numel(), scale=_scale(args, 12), m_values=_VALUES[0], v_values=_VALUES[1],
        m_levels=_LEVELS[0], v_levels=_LEVELS[1], **_hyper(args, 6),
    )  # fmt: skip


# module variables, since launches hold their addresses
_VALUES = [torch.from_numpy(codes.values) for codes in (SIGNED, UNSIGNED)]
_LEVELS = [torch.from_numpy(codes.levels) for codes in (SIGNED, UNSIGNED)]

KERNELS: dict[str, Kernel] = {
    "AdamUpdate": Kernel(
        "native.adam", _bind_adam, unsupported=_unsupported, where=where,
        inplace=((0, 0), (1, 2), (2, 3), (3, 4)), contiguous=None,
    ),
    "AdamUpdateBf16": Kernel(
        "native.adam_bf16", _bind_bf16, unsupported=_unsupported_bf16, where=where,
        inplace=((0, 0), (1, 2), (2, 3)), contiguous=None,
    ),
    "AdamUpdate8Bit": Kernel(
        "native.adam_8bit", _bind_8bit, unsupported=_unsupported_8bit, where=where,
        inplace=((0, 0), (1, 2), (2, 3), (3, 4), (4, 5)), contiguous=None,
    ),
}  # fmt: skip
