"""Convolutions."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, dtype_name


def each(numbers: Any, rank: int) -> list[int]:
    """Returns one number for each of `rank` dims, from torch's `1`, `[1]` or `[1, 1]`. Raises
    CaptureError for another count."""
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    given = given * rank if len(given) == 1 else given
    if len(given) != rank or not all(isinstance(n, int) for n in given):
        raise CaptureError(
            f"the value {numbers} does not fit {rank} dims; fix: give one int, "
            "or one int for each dim"
        )
    return given


def batched(c: AtenCall, x: Value, dims: int) -> Value:
    """Returns x with a batch dim: f[C,*S] as f[1,C,*S], where S has `dims` dims. The caller removes
    the dim from the result."""
    return x if type_of(x).rank == dims + 2 else c.b.unsqueeze(x, [0])


def _convolve(
    c: AtenCall, x: Value, w: Value, bias: Value | None, stride: Any, pads: list[int],
    dilation: Any, groups: int, transposed: bool = False, more: Any = 0,
) -> Value:  # fmt: skip
    dims = type_of(w).rank - 2
    if not type_of(x).is_floating or type_of(x).dtype == DType.FLOAT16:
        raise CaptureError(f"a convolution of {dtype_name(type_of(x).dtype)} has no translation")
    attrs: dict[str, Any] = {"pads": pads * 2} if any(pads) else {}
    given = (("strides", stride, 1), ("dilations", dilation, 1), ("output_padding", more, 0))
    for name, numbers, default in given:
        if any(n != default for n in each(numbers, dims)):
            attrs[name] = each(numbers, dims)
    if groups != 1:
        attrs["group"] = groups
    inputs = [batched(c, x, dims), w, *([] if bias is None else [bias])]
    y = c.b.one("ConvTranspose" if transposed else "Conv", inputs, attrs)
    return c.b.squeeze(y, [0]) if type_of(x).rank == dims + 1 else y


def _conv(
    c: AtenCall, x: Value, w: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Value:  # fmt: skip
    dims = type_of(w).rank - 2
    if not isinstance(padding, str):
        return _convolve(c, x, w, bias, stride, each(padding, dims), dilation, groups)
    pads = [0] * dims
    if padding == "same":  # an odd amount puts the extra element at the end
        kernel = each([int(k) for k in type_of(w).shape[2:]], dims)  # type: ignore[arg-type]
        whole = [d * (k - 1) for d, k in zip(each(dilation, dims), kernel, strict=True)]
        pads = [n // 2 for n in whole]
        odd = [n % 2 for n in whole]
        if any(odd):
            outer = [0] * (type_of(x).rank - dims)
            ends = c.b.ints([*outer, *[0] * dims, *outer, *odd])
            x = c.b.Pad(x, ends, c.b.scalar(0.0, type_of(x).dtype))
    elif padding != "valid":
        raise CaptureError(f"a convolution with padding={padding!r} has no translation")
    return _convolve(c, x, w, bias, stride, pads, dilation, groups)


def _convolution(
    c: AtenCall, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, more: Any, groups: int,
) -> Value:  # fmt: skip
    pads = each(padding, type_of(w).rank - 2)
    return _convolve(c, x, w, bias, stride, pads, dilation, groups, transposed, more)


def _conv_transpose(
    c: AtenCall, x: Value, w: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
    more: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Value:  # fmt: skip
    return _convolution(c, x, w, bias, stride, padding, dilation, True, more, groups)


TABLE = table(
    {
        _conv: "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding "
        "conv3d.padding",
        _convolution: "convolution.default",
        _conv_transpose: "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input",
    }
)
