"""Additions to the library's own sources, each as a developer writes it: files and their edits.

`test_extend.py` makes all of them on a copy, and trains there. `limit`: of files touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Edit: TypeAlias = Callable[[str], str]  # from a file's text, "" where it is new


@dataclass(frozen=True)
class Addition:
    """limit: how many files it may touch. edits: by path within the package."""

    limit: int
    edits: dict[str, Edit]


def new(text: str) -> Edit:
    def write(before: str) -> str:
        assert not before, "the file is there already"
        return text

    return write


def last(text: str) -> Edit:
    """Lines at the end of a file."""
    return lambda before: f"{before}\n\n{text}\n"


def behind(*pairs: tuple[str, str]) -> Edit:
    """Lines, each behind one that is there once."""

    def write(before: str) -> str:
        for line, more in pairs:
            assert before.count(f"{line}\n") == 1, line
            before = before.replace(f"{line}\n", f"{line}\n{more}\n")
        return before

    return write


OP = """
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes


def _arsinh(b, inputs, attrs):
    (x,) = inputs
    return [b.Log(b.Add(x, b.Sqrt(b.Add(b.Mul(x, x), 1.0))))]


OPS = (
    Op(
        "Arsinh", lambda call: call.type(), body=_arsinh, doc="The inverse of sinh.",
        cases=(({}, ("f32[3,5]",)),), elementwise=True, axes=no_axes,
    ),
)
"""

OPTIMIZER = '''
from dataclasses import dataclass

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import one_less, scaled
from onward.graph.ops.optimizers.record import Optimizer, setting, updated_types
from onward.graph.ops.record import Op


@dataclass
class Adadelta:
    """Adadelta (arXiv 1212.5701), in torch's form."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0


def _adadelta(b, inputs, attrs):
    p, g, square, moved, lr, rho, eps, decay = inputs[:8]
    dtype = type_of(p).dtype
    g = scaled(b, g, inputs[9] if len(inputs) > 9 else None)
    g = b.Add(g, b.Mul(p, b.cast(decay, dtype)))
    keep, take, eps = (b.cast(x, dtype) for x in (rho, one_less(b, rho), eps))
    square = b.Add(b.Mul(square, keep), b.Mul(b.Mul(g, g), take))
    step = b.Mul(b.Div(b.Sqrt(b.Add(moved, eps)), b.Sqrt(b.Add(square, eps))), g)
    moved = b.Add(b.Mul(moved, keep), b.Mul(b.Mul(step, step), take))
    return [b.Sub(p, b.Mul(step, b.cast(lr, dtype))), square, moved]


OPTIMIZERS = (
    Optimizer(
        Adadelta,
        "torch.optim.Adadelta",
        Op(
            "AdadeltaUpdate", updated_types(slots=2), body=_adadelta, doc="p', slots' of Adadelta.",
            cases=(({}, ("f32[4,6]",) * 4 + ("f64[]",) * 4 + ("i64[]",)),),
        ),
        ("square_avg", "acc_delta"),
        {name: setting(name) for name in ("lr", "rho", "eps", "weight_decay")},
    ),
)
'''

PASS = '''
from onward.graph.graph import Graph


def double_negation(graph: Graph) -> int:
    """`Neg(Neg(x))  =>  x`."""
    edits = 0
    for node in list(graph):
        inner = node.inputs[0].producer() if node.op_type == "Neg" else None
        if inner is not None and inner.op_type == "Neg":
            graph.replace(node.outputs[0], inner.inputs[0])
            graph.remove([node])
            edits += 1
    return edits
'''

GRADIENT = '''
@rule("Clip")
def _clip(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """`dy` where x is within its bounds, else 0."""
    zero = b.scalar(0.0, type_of(xs[0]).dtype)
    return [b.Where(b.Equal(xs[0], ys[0]), only(dys), zero), *[None for _ in xs[1:]]]
'''

ADDITIONS = {
    "own op with gradient, kernel and row rule": Addition(
        3,
        {
            "graph/ops/arsinh.py": new(OP),  # the row rule is its trait's
            "differentiate/rules/elementwise.py": last(
                'unary("Arsinh", lambda b, dy, y, x: b.Div(dy, b.Sqrt(b.Add(b.Mul(x, x), 1.0))))'
            ),
            "kernels/aten/elementwise.py": last(
                'KERNELS["Arsinh"] = Kernel("aten.asinh", _out(torch.asinh, 1), inplace=((0, 0),))'
            ),
        },
    ),
    "optimizer": Addition(1, {"graph/ops/optimizers/adadelta.py": new(OPTIMIZER)}),
    "gradient rule": Addition(1, {"differentiate/rules/elementwise.py": last(GRADIENT)}),
    "pass": Addition(
        2,
        {
            "rewrite/double_negation.py": new(PASS),
            "rewrite/lists.py": behind(
                (
                    "from onward.rewrite.dead_code_elimination import dead_code_elimination",
                    "from onward.rewrite.double_negation import double_negation",
                ),
                (
                    "    Pass(noop),  # identities would hide equal expressions from the next pass",
                    "    Pass(double_negation),  # likewise",
                ),
            ),
        },
    ),
    "translation": Addition(
        1,
        {
            "capture/aten/elementwise.py": last(
                'TABLE |= table({_unary("Arsinh"): "asinh.default"})'
            )
        },
    ),
}
