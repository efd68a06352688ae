"""`Conv(x, w)` with strides as large as its kernel  =>  `Gemm(patches of x, w)`, if rows are
wanted.

Each element of x is then read once, and a patch embedding is one product, forward and backward.
Where the next op wants channels before positions, the convolution stays: it writes them so.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.ops import named
from onward.graph.ops.conv import ConvWindow
from onward.graph.types import Size, product

_RESHAPES = named("reshapes")


def patch_convolution(graph: Graph) -> int:
    """Turns convolutions over patches that do not overlap into products, if their results are
    turned into rows (ViT, arXiv 2010.11929)."""
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        window = _tiling(node)
        if window is None or not _turned(node.outputs[0], outputs):
            continue
        graph.replace(node.outputs[0], _product(Builder.at(graph, node), node, window))
        graph.remove([node])
        edits += 1
    return edits


def _tiling(node: Node) -> ConvWindow | None:
    """The window of a convolution whose patches neither overlap nor leave gaps; None for others."""
    if node.op_type != "Conv" or attributes(node).get("group", 1) != 1:
        return None
    x, w = type_of(node.inputs[0]), type_of(node.inputs[1])
    kernel = [k for k in w.shape[2:] if isinstance(k, int)]
    window = ConvWindow(attributes(node), kernel)
    plain = not any(window.before + window.after) and max(window.dilations) == 1
    if len(kernel) < w.rank - 2 or not plain or window.strides != kernel or max(kernel) == 1:
        return None
    places = type_of(node.outputs[0]).shape[2:]
    rests = [n - p * k for n, p, k in zip(x.shape[2:], places, kernel, strict=True)]
    return window if all(isinstance(n, int) for n in rests) else None


def _turned(y: Value, outputs: set[Value]) -> bool:
    """Whether every reader of y, through reshapes, is a Transpose that puts channels last."""
    if y in outputs or not y.consumers():
        return False
    for reader in y.consumers():
        if reader.op_type in _RESHAPES and type_of(reader.outputs[0]).rank > 2:
            if not _turned(reader.outputs[0], outputs):
                return False
        elif reader.op_type != "Transpose" or attributes(reader).get("perm", [1])[-1] != 1:
            return False
    return True


def _product(b: Builder, conv: Node, window: ConvWindow) -> Value:
    """Writes the convolution as a product of x f[N,C,*S] as rows f[N*P,C*K], for P patches per
    sample and K elements of a kernel."""
    x, w, *bias = conv.inputs
    assert x is not None and w is not None
    (n, channels, *sizes), (m, *inner) = type_of(x).shape, type_of(w).shape
    places = list(type_of(conv.outputs[0]).shape[2:])
    rank, apart = len(places), list[Size]()
    for i, (count, k) in enumerate(zip(places, window.kernel, strict=True)):
        if sizes[i] != count * k:
            x = b.slice(x, 2 + i, 0, count * k)
        apart += [count, k]
    x = b.reshape(x, (n, channels, *apart))
    steps = list(range(2, 2 + 2 * rank))
    x = b.transpose(x, [0, *steps[::2], 1, *steps[1::2]])
    rows = b.reshape(x, (product([n, *places]), product(inner)))
    y = b.Gemm(rows, b.reshape(w, (m, product(inner))), *bias, transB=1)
    # keep the patches as one dim first, so that the reader's Transpose joins this one
    y = b.transpose(b.reshape(y, (n, product(places), m)), [0, 2, 1])
    return b.reshape(y, (n, m, *places))
