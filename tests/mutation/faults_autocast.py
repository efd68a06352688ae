"""Faults of autocast around and within models, and of products of rounded row counts."""

from __future__ import annotations

from fault import Fault

AUTOCAST = ("module/test_autocast.py",)
BRANCHES = ("module/test_autocast_branches.py",)
ROWS = ("execute/test_spare_rows.py", "kernels/test_row_counts.py")
HEAD = ("kernels/test_low_cross_entropy.py",)

AUTOCAST_FAULTS: tuple[Fault, ...] = (
    Fault(
        "autocast: on or off, a call has the same graph", "module/states.py",
        "return self.flags(), mode, *batch.kind", "return self.flags(), mode.grad, *batch.kind",
        AUTOCAST,
    ),
    Fault(
        "autocast: a block that is off says nothing", "capture/trace/autocast_blocks.py",
        "if block._enabled else DType.FLOAT", "if block._enabled else None", AUTOCAST,
    ),
    Fault(
        "autocast: a block is low although it is off", "capture/trace/autocast_blocks.py",
        "LOW_TYPES.get(block.fast_dtype) if block._enabled else DType.FLOAT",
        "LOW_TYPES.get(block.fast_dtype)", AUTOCAST,
    ),
    Fault(
        "autocast: a block ends with the forward", "capture/trace/autocast_blocks.py",
        "open_blocks.pop(last)[1].close()", "open_blocks[last]", AUTOCAST,
    ),
    Fault(
        "autocast: what a block says of an expanded op is lost", "capture/translate/translator.py",
        'precision=block_of(node))', 'precision="")', AUTOCAST,
    ),
    Fault(
        "autocast: results are fp32", "capture/stages.py",
        "    cast_results,  #", "    #", AUTOCAST,
    ),
    Fault(
        "autocast: a trace does not see that it is on", "capture/trace/autocast_blocks.py",
        "plain_enter(block)", "torch.autocast_increment_nesting()", BRANCHES,
    ),
    Fault(
        "autocast: a trace has no tensors of its types", "capture/dtypes.py",
        "        if autocast:", "        if False:", BRANCHES,
    ),
    Fault(
        "autocast: a gradient of another type is refused", "capture/trace/own_gradients.py",
        "if {dx.dtype, x.dtype} <= _UNDER_AUTOCAST else dx", "if False else dx", BRANCHES,
    ),
    Fault(
        "autocast: recurrent layers are none of its products", "capture/custom_ops/recurrent.py",
        "(*map(as_product, made[:first]), *made[first:])", "tuple(made)", BRANCHES,
    ),
    Fault(
        "autocast: a loss of labels has its input's type", "capture/custom_ops/autocast.py",
        "return y.float() if _is_cast(y) else y", "return y", BRANCHES,
    ),
    Fault(
        "autocast: what hides a score in fp16 is a number", "capture/translate/translator.py",
        "                if self.autocast:", "                if False:", BRANCHES,
    ),
    Fault(
        "autocast: results have the type that they come in", "rewrite/precision/write_casts.py",
        "graph.outputs[name] = writer.cast(value, types[name], None)", "pass", AUTOCAST,
    ),
    Fault(
        "autocast: all that a model says nothing of is low", "rewrite/precision/policy.py",
        "return Policy(said.pop(), everywhere=False)", "return Policy(said.pop())", AUTOCAST,
    ),
    Fault(
        "autocast: the head's gradients in fp16 are rounded before the scale",
        "rewrite/linear_cross_entropy.py",
        "if type_of(loss.inputs[0]).dtype == DType.FLOAT16:", "if False:", AUTOCAST,
    ),
    Fault(
        "autocast: the last of two types wins", "rewrite/precision/policy.py",
        "if len(said) > 1:", "if False:", AUTOCAST,
    ),
    # row counts
    Fault(
        "rows: a sum takes what is behind the rows", "kernels/aten/row_counts.py",
        "[behind(x, more).zero_ for x in (a, b)] if more else []", "[]", ROWS,
    ),
    Fault(
        "rows: a result has as many rows to spare as it likes", "kernels/aten/row_counts.py",
        "*map(spare, (a, y, *rows))", "*map(spare, (a, a, *rows))", ROWS,
    ),
    Fault(
        "rows: a part of a buffer takes the next part's rows", "execute/tensors.py",
        "full = 0 < self.size(buffer.size) == rows * row", "full = True", ROWS,
    ),
    Fault(
        "rows: what is planned for is exceeded", "execute/tensors.py",
        "return buffer.nbytes // row - rows if full else 0", "return rows if full else 0", ROWS,
    ),
    Fault(
        "rows: counts are as they come", "kernels/aten/row_counts.py",
        "return -(-n // step) * step", "return n", ROWS,
    ),
    Fault(
        "rows: the head sums what is behind its rows", "kernels/native/cross_entropy.py",
        "yield behind(x[rows], more).zero_", "yield lambda: None", HEAD,
    ),
)  # fmt: skip
