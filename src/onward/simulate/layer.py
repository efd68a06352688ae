"""The kernels of a layer, of the head and of the update, on one rank: `Work` by `Work`.

Bytes of elementwise kernels count what each reads and writes, an element of 2 bytes (4 in fp32) at
a time; `fused` has one kernel where PyTorch's eager mode has several, some of them in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onward.simulate.layout import MeshLayout
from onward.simulate.transformer import Transformer
from onward.simulate.work import Work

# Bytes of an element, forward and backward, of kernels over 16-bit values: fused, and by eager
# PyTorch. A LayerNorm is one kernel in eager mode too; an RMSNorm of composed ops is in fp32.
_NORM = {"gpt": ((4, 6), (4, 6)), "llama": ((4, 6), (32, 64))}
_ROPE = ((4, 4), (20, 20))
_ACTIVATION = {"gpt": ((4, 6), (4, 6)), "llama": ((6, 10), (10, 18))}
_ADD = ((6, 2), (6, 6))
# under autocast, where weights are gathered in fp32: sums of residuals stay in fp32, norms cast
# them; a weight's gradient becomes fp32 (6 bytes), goes into a flat buffer (8), and to the dtype
# that is reduced (6)
_AUTOCAST_NORM = (10, 12)
_AUTOCAST_ADD = (10, 18)
_AUTOCAST_GRADIENT = 20
_DROPOUT_ADD = (7, 5)  # with the mask's byte
_SOFTMAX = (4, 6)  # scale, mask and softmax in one kernel
_DROPOUT = (5, 5)
# attention in pieces, a piece: its result becomes fp32, and is merged by five operations, of three
# quarters of the rows on average, as half of the ranks need half of them; backward, three gradients
# become fp32 and are added to sums
_MERGE = (30, 48)
_LOSS = ((8, 6), (16, 14))  # of fp32 logits: log-softmax forward, its gradient
_QUANTIZE = 5  # fp8: the largest value is found (2), then the tensor is read and written (3)
_TRANSPOSE = 2  # fp8: products of an H100 take operands whose rows are what is summed over
_FLASH_HALF = 300  # tokens with which flash attention reaches half of its rate
_BACKWARD_OF_FLASH = 2.5  # products: 5 of two operands against 2, scores made again
# AdamW in mixed precision reads gradient, master weight and two moments, and writes the latter and
# a 16-bit weight; the norm of the gradients reads them once more
_UPDATE = 16 + 14 + 4


@dataclass(frozen=True)
class RankSizes:
    """What one rank holds of a micro-batch: tokens, and those that norms and dropout see."""

    model: Transformer
    layout: MeshLayout
    tokens: int

    @property
    def rows(self) -> float:
        """Tokens of a micro-batch on this rank."""
        return self.layout.micro_batch * self.tokens / self.layout.cp

    @property
    def norm_rows(self) -> float:
        return self.rows / self.layout.sequence_tp

    @property
    def element(self) -> int:
        """Bytes of an element of the activations."""
        return 4 if self.layout.dtype == "fp32" else 2

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the activations between layers, of all ranks along tp together."""
        return self.rows * self.model.hidden * self.element

    @property
    def gathered_bytes(self) -> float:
        """`hidden_bytes` as a product takes them: fp8 training gathers what is quantized."""
        return self.hidden_bytes / (2 if self.layout.dtype == "fp8" else 1)

    @property
    def autocast(self) -> bool:
        """Whether weights are gathered in fp32 and cast before each product."""
        return self.layout.gather_bytes > self.element

    def elementwise(self, pair: tuple[int, int], elements: float, way: int) -> Work:
        """A kernel over `elements`, of the pair (forward, backward) of bytes for 16-bit values."""
        return Work(nbytes=pair[way] * elements * self.element / 2)

    def choose(self, both: tuple[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
        return both[0] if self.layout.fused else both[1]


def product(sizes: RankSizes, rows: float, inner: float, outer: float, way: int) -> list[Work]:
    """A linear layer f32[rows,inner] to f32[rows,outer] in one direction.

    way 1: the gradient of its input, and of its weight, which is added to the sum of earlier
    micro-batches.
    """
    layout, e = sizes.layout, sizes.element
    low = layout.dtype == "fp8"
    weight = inner * outer
    operand = 1 if low else e
    nbytes = operand * (rows * inner + weight) + e * rows * outer
    one = Work(2 * rows * weight, nbytes, layout.dtype)
    if way == 0:
        works = [one]
        if low:
            works.append(Work(nbytes=_QUANTIZE * (rows * inner + weight)))
        if sizes.autocast:
            works.append(Work(nbytes=(layout.gather_bytes + e) * weight))
        return works
    works = [one]
    if low:
        works.append(Work(nbytes=_QUANTIZE * rows * outer + _TRANSPOSE * weight))
        works.append(Work(nbytes=_TRANSPOSE * rows * (inner + outer), of_weight=True))
    if layout.fused_accumulation and layout.zero < 2:
        # the sum is read and written where the gradient would be written
        summed = nbytes + (2 * layout.grad_bytes - e) * weight
        return [*works, replace(one, nbytes=summed, beside=True, of_weight=True)]
    # added to the sum so far; or copied to where it is reduced
    each = e + 2 * layout.grad_bytes if layout.zero < 2 else e + layout.grad_bytes
    each = _AUTOCAST_GRADIENT if sizes.autocast else each
    return [*works, replace(one, of_weight=True), Work(nbytes=each * weight, of_weight=True)]


def attention_core(sizes: RankSizes, way: int) -> list[Work]:
    """Scores, softmax and the weighted sum of values, of all heads of this rank."""
    model, layout = sizes.model, sizes.layout
    width = model.hidden / layout.tp
    pairs = sizes.rows * sizes.tokens
    first = layout.attention == "flash-1"
    if first or layout.attention == "flash":
        share = 0.5 if layout.causal and model.family != "bert" else 1.0
        flops = 4 * pairs * width * share * (_BACKWARD_OF_FLASH if way else 1)
        kv = model.kv_width / layout.tp * layout.micro_batch * sizes.tokens
        works = list[Work]()
        if layout.repeat_keys and model.kv_width < model.hidden:
            many = width * sizes.rows
            works.append(Work(nbytes=2 * sizes.element * (many + kv / layout.cp)))
            kv = width * layout.micro_batch * sizes.tokens
        nbytes = sizes.element * (2 + 2 * way) * (sizes.rows * width + kv)
        rate = sizes.tokens / (sizes.tokens + _FLASH_HALF) * (0.5 if first else 1.0)
        works.append(Work(flops, nbytes, attention=rate))
        if layout.ring and layout.cp > 1:
            works += [Work(nbytes=_MERGE[way] * sizes.rows * width)] * (layout.cp - 1)
        return works
    scores = pairs * model.heads / layout.tp
    once = Work(2 * pairs * width, sizes.element * (scores + 2 * sizes.rows * width), _wide(layout))
    works = [once] * (2 if way == 0 else 4)
    works.append(sizes.elementwise(_SOFTMAX, scores, way))
    if layout.dropout:
        works.append(sizes.elementwise(_DROPOUT, scores, way))
    return works


def _wide(layout: MeshLayout) -> str:
    """The dtype of products that fp8 training leaves in bf16."""
    return "bf16" if layout.dtype == "fp8" else layout.dtype


def norm(sizes: RankSizes, way: int) -> Work:
    """One norm, over the tokens that this rank normalizes."""
    kind = "llama" if sizes.model.family == "llama" else "gpt"
    pair = _AUTOCAST_NORM if sizes.autocast else sizes.choose(_NORM[kind])
    return sizes.elementwise(pair, sizes.norm_rows * sizes.model.hidden, way)


def residual(sizes: RankSizes, way: int) -> Work:
    """The sum at the end of a residual branch, with dropout where there is one."""
    pair = _DROPOUT_ADD if sizes.layout.dropout else sizes.choose(_ADD)
    pair = _AUTOCAST_ADD if sizes.autocast else pair
    return sizes.elementwise(pair, sizes.norm_rows * sizes.model.hidden, way)


def attention_in(sizes: RankSizes, way: int) -> list[Work]:
    """The products to queries, keys and values, and rotary positions."""
    model, t, rows = sizes.model, sizes.layout.tp, sizes.rows
    outer = (model.hidden + 2 * model.kv_width) / t
    works = product(sizes, rows, model.hidden, outer, way)
    if model.family == "llama":
        elements = rows * (model.hidden + model.kv_width) / t
        works.append(sizes.elementwise(sizes.choose(_ROPE), elements, way))
    return works


def attention_out(sizes: RankSizes, way: int) -> list[Work]:
    """The product after attention."""
    model = sizes.model
    return product(sizes, sizes.rows, model.hidden / sizes.layout.tp, model.hidden, way)


def mlp_in(sizes: RankSizes, way: int) -> list[Work]:
    """The first product of the MLP, or two with a gate, and the activation."""
    model, t = sizes.model, sizes.layout.tp
    width = model.width / t
    kind = "llama" if model.gated else "gpt"
    works = product(sizes, sizes.rows, model.hidden, (2 if model.gated else 1) * width, way)
    return [*works, sizes.elementwise(sizes.choose(_ACTIVATION[kind]), sizes.rows * width, way)]


def mlp_out(sizes: RankSizes, way: int) -> list[Work]:
    """The last product of the MLP."""
    model = sizes.model
    return product(sizes, sizes.rows, model.width / sizes.layout.tp, model.hidden, way)


def embedding(sizes: RankSizes, way: int) -> list[Work]:
    """Rows of the embedding's table are read and written, or added to in backward."""
    elements = sizes.rows * sizes.model.hidden
    return [Work(nbytes=(2 + way) * sizes.element * elements)]


def head(sizes: RankSizes, way: int) -> list[Work]:
    """The last norm, the product to logits, and the loss. fp8 leaves this product in bf16."""
    model, t = sizes.model, sizes.layout.tp
    rows, vocab = sizes.rows, model.vocab / t
    e = sizes.element
    nbytes = e * (rows * model.hidden + model.hidden * vocab + rows * vocab)
    once = Work(2 * rows * model.hidden * vocab, nbytes, _wide(sizes.layout))
    loss = _LOSS[0] if sizes.layout.fused and sizes.layout.fused_loss else _LOSS[1]
    return [norm(sizes, way), *([once] * (1 + way)), Work(nbytes=loss[way] * rows * vocab)]


def copied_weights(sizes: RankSizes, parameters: float) -> Work:
    """The copy of gathered weights to their places."""
    return Work(nbytes=2 * sizes.layout.gather_bytes * parameters / sizes.layout.tp)


def pieces_summed(sizes: RankSizes) -> Work:
    """The sum of what all ranks along tp sent of a result in tp pieces."""
    return Work(nbytes=sizes.hidden_bytes * (1 + 1 / sizes.layout.tp))


def keys_bytes(sizes: RankSizes) -> float:
    """Bytes of the keys and values of all tokens, as attention along cp needs them."""
    model, layout = sizes.model, sizes.layout
    width = model.hidden if layout.repeat_keys else model.kv_width
    return 2 * layout.micro_batch * sizes.tokens * width / layout.tp * sizes.element


def update(parameters: float) -> list[Work]:
    """AdamW and the norm of the gradients, over the parameters that this rank updates."""
    return [Work(nbytes=_UPDATE * parameters)]


__all__ = [
    "RankSizes",
    "attention_core",
    "attention_in",
    "attention_out",
    "copied_weights",
    "embedding",
    "head",
    "keys_bytes",
    "mlp_in",
    "mlp_out",
    "norm",
    "pieces_summed",
    "product",
    "residual",
    "update",
]  # fmt: skip
