"""Faults of gradient rules, row demand."""

from __future__ import annotations

from fault import BY_HAND, NODES, ONE_ROW, ROWS, RULES, TORCH_FORMS, Fault

DECODERS = ("rewrite/test_decoder_fusions.py",)
NORMS = ("rewrite/test_layer_norm.py",)
SPELLINGS = ("rewrite/test_exported_spellings.py",)
ENTROPY = ("rewrite/test_cross_entropy.py",)

GRAPH_FAULTS: tuple[Fault, ...] = (
    # gradient rules
    Fault(
        "rule: softmax without its sum", "differentiate/rules/reduce.py",
        "return [b.Mul(b.Sub(dy, inner), y)]", "return [b.Mul(dy, y)]", RULES,
    ),
    Fault(
        "rule: abs at zero", "differentiate/rules/elementwise.py",
        'unary("Abs", lambda b, dy, y, x: b.Mul(dy, b.Sign(x)))',
        'unary("Abs", lambda b, dy, y, x: b.Where(b.Less(x, 0.0), b.Neg(dy), dy))', RULES,
    ),
    Fault(
        "rule: relu passes at zero", "differentiate/rules/elementwise.py",
        "b.Where(b.Greater(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype))",
        "b.Where(b.GreaterOrEqual(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype))", RULES,
    ),
    Fault(
        "rule: a maximum's ties go to one side", "differentiate/rules/elementwise.py",
        "da = b.Where(tie, half, b.Where(a_wins, dy, zero))",
        "da = b.Where(a_wins, dy, zero)", RULES,
    ),
    Fault(
        "rule: ties of a reduced maximum count twice", "differentiate/rules/reduce.py",
        "share = b.Div(dy, b.reduce_sum(hit, dims, keepdims=True))", "share = dy", RULES,
    ),
    Fault(
        "rule: power with exponent zero", "differentiate/rules/elementwise.py",
        "        if e == 0:\n"
        "            return (None, None)  # x^0 has gradient 0; 0 * x^-1 would be NaN at 0\n",
        "", RULES,
    ),
    Fault(
        "rule: a group norm's gradient without its scale", "differentiate/rules/norm.py",
        "    scale = xs[1] if len(xs) > 1 else None\n", "    scale = None\n", RULES,
    ),
    Fault(
        "importer: an exponential that is not taken overflows",
        "graph/importer/decompositions/pointwise.py",
        "    below = b.Where(above, zero, x)\n", "    below = x\n", TORCH_FORMS,
    ),
    Fault(
        "importer: a leaky slope at zero", "graph/importer/decompositions/pointwise.py",
        "b.Where(b.Greater(x, b.scalar(0, c.type().dtype)), x, b.Mul(x, slope))",
        "b.Where(b.Less(x, b.scalar(0, c.type().dtype)), b.Mul(x, slope), x)", TORCH_FORMS,
    ),
    Fault(
        "rule: the padding row learns", "differentiate/rules/indexing.py",
        "    return [_rows_added(b, weight, ids, dy), None]\n\n\n@rule(\"GatherElements\")",
        "    return [_rows_added(b, weight, ids, only(dys)), None]\n\n\n@rule(\"GatherElements\")",
        RULES,
    ),
    Fault(
        "rule: a cumulative sum keeps its direction", "differentiate/rules/reduce.py",
        'reverse = 1 - attrs.get("reverse", 0)', 'reverse = attrs.get("reverse", 0)', RULES,
    ),
    Fault(
        "rule: a product's alpha reaches its addend", "differentiate/rules/product.py",
        "    return [dx, dw, dc]\n", "    return [dx, dw, dc if alpha == 1.0 else dy]\n", RULES,
    ),
    Fault(
        "rule: an added row's gradient", "differentiate/rules/indexing.py",
        "            return [dy, None, read(dy)]\n        case \"none\"",
        "            return [dy, None, None]\n        case \"none\"", RULES,
    ),
    Fault(
        "rule: what a transposed convolution's padding replaces", "differentiate/rules/conv.py",
        "beyond = padding[i] - pads[rank + i]", "beyond = padding[i]",
        ("capture/test_capture_convolutions.py",),
    ),
    Fault(
        "walk: broadcast dims kept", "differentiate/reverse.py",
        "if s == 1 and have[extra + i] != 1]", "if s == 1 and have[extra + i] == 1]", RULES,
    ),
    Fault(
        "walk: the second reader's gradient replaces the first's", "differentiate/reverse.py",
        "return b.Add(b.cast(held, wide), b.cast(dx, wide))", "return dx", RULES,
    ),
    Fault(
        "walk: a stopped gradient passes", "differentiate/reverse.py",
        "        if node.op_type in NO_GRADIENT:\n            continue\n"
        "        if any(x in reached for x in _differentiable_inputs(node)):",
        '        if node.op_type in NO_GRADIENT and node.op_type != "StopGradient":\n'
        "            continue\n"
        "        if any(x in reached for x in _differentiable_inputs(node)):", RULES,
    ),
    # rows
    Fault(
        "rows: NaN lies where the step's own sets leave rows out", "prepare/unread_rows.py",
        "numbers.of(staged, sizes), gradients)", "rows, gradients)", ROWS[2:],
    ),
    Fault(
        "rows: what is read is asked of the graph as it is written", "rewrite/rows/packer.py",
        "self._asks.get(self.reader, ()) if self.reader",
        "self._reads_of(self.reader) if self.reader", ROWS[2:],
    ),
    Fault(
        "rows: causal is forgotten in what is reached", "rewrite/rows/sets.py",
        "return same and covers(b.members, a.members) and (a.causal or not b.causal)",
        "return same and covers(b.members, a.members)", ROWS,
    ),
    Fault(
        "rows: keys before the query are not reached", "rewrite/rows/set_masks.py",
        "behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=1)",
        "behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=0)", ROWS,
    ),
    Fault(
        "rows: a query whose keys are all hidden", "rewrite/rows/set_masks.py",
        "shown = b.Max(clear, none)", "shown = clear", ROWS,
    ),
    Fault(
        "rows: negative indices", "rewrite/rows/set_masks.py",
        "place = b.Where(b.Less(place, np.zeros((), np.int64)), wrapped, place)",
        "place = place", ROWS,
    ),
    Fault(
        "rows: one side of both is enough", "rewrite/rows/set_masks.py",
        "return b.And(condition_value(b, left, count), condition_value(b, right, count))",
        "return condition_value(b, left, count)", ROWS,
    ),
    Fault(
        "rows: a union keeps what is narrower", "rewrite/rows/sets.py",
        "kept = [other for other in kept if not implies(other, condition)]",
        "kept = [other for other in kept if not implies(condition, other)]", ROWS,
    ),
    # ops of read models
    Fault(
        "rule: scattered maxima keep what lost", "differentiate/rules/indexing.py",
        "kept, won = b.cast(b.Equal(x, y), dtype), b.cast(b.Equal(rows, read(y)), dtype)",
        "kept, won = b.cast(b.Equal(x, x), dtype), b.cast(b.Equal(rows, read(y)), dtype)", RULES,
    ),
    Fault(
        "rule: the batch's variance is a constant", "graph/ops/batch_norm.py",
        "        g = b.Sub(g, b.Mul(xhat, channels(b, x, b.Div(dscale, n))))\n", "", RULES,
    ),
    Fault(
        "reader: a loop goes on one step longer", "graph/importer/decompositions/control.py",
        "while going and (most is None or step < most):",
        "while going and (most is None or step <= most):", NODES,
    ),
    Fault(
        "reader: a sequence goes on behind its end", "graph/importer/decompositions/recurrent.py",
        "found = [b.Where(going, new, old) for new, old in zip(found, state, strict=True)]",
        "pass", NODES,
    ),
    # what decoders are made of
    Fault(
        "rule: turned heads are turned on", "differentiate/rules/rotary.py",
        "transposed=int(not transposed))", "transposed=int(transposed))", RULES,
    ),
    Fault(
        "rule: shared keys take one head's gradient", "graph/ops/flash.py",
        "    return b.reduce_sum(parts, [len(shape) - 2], keepdims=False)",
        "    return b.squeeze(b.slice(parts, len(shape) - 2, 0, 1), [len(shape) - 2])", RULES,
    ),
    Fault(
        "rewrite: any repetition of heads is that of neighbours", "rewrite/grouped_keys.py",
        "if narrow != (batch, groups, 1, *rows) or wide != (batch, groups, times, *rows):",
        "if False:", DECODERS,
    ),
    Fault(
        "rewrite: a gate that others read goes", "rewrite/gated_activation.py",
        "if y in outputs or len(y.uses()) > 1:", "if False:", DECODERS,
    ),
    Fault(
        "rewrite: a norm over any dim is one over the last", "rewrite/matching.py",
        "axes is not None and axes in ((rank - 1,), (-1,))", "axes is not None", DECODERS,
    ),
    Fault(
        "rewrite: any mean is taken off before a norm", "rewrite/layer_norm.py",
        "node.inputs[0] is x and _sign_of_mean(node.inputs[1], x) == 1", "node.inputs[0] is x",
        NORMS,
    ),
    Fault(
        "rewrite: a sum over any number is a mean", "rewrite/layer_norm.py",
        "return total.inputs[0] if type_of(total.inputs[0]).shape[-1] == count else None",
        "return total.inputs[0]", NORMS,
    ),
    Fault(
        "rewrite: a norm keeps one of two scales", "rewrite/layer_norm.py",
        "        elif scale is None:\n", "        else:\n", NORMS,
    ),
    Fault(
        "rewrite: a bias is added before the mean is taken off", "rewrite/layer_norm.py",
        "_Norm(last, scale, _flat(minuend))", "_Norm(last, scale, None)", NORMS,
    ),
    Fault(
        "rewrite: hidden keys are zeros by any mask", "rewrite/fuse_attention.py",
        "kept is probabilities and alike(condition, mask)", "kept is probabilities", SPELLINGS,
    ),
    Fault(
        "rewrite: a row without a key is no row of zeros", "rewrite/fuse_attention.py",
        "if filled is not None and filled is hidden:", "if False:", SPELLINGS,
    ),
    Fault(
        "rewrite: a lowest number that is added lets no gradient through",
        "rewrite/fuse_attention.py", "self.fill_is_added = True", "pass",
        ("models/test_rows_without_a_key.py",),
    ),
    Fault(
        "rule: hidden scores have no gradient where a number is added", "graph/ops/flash.py",
        'and not attrs.get("fill_is_added")', "", ("kernels/test_attention.py",),
    ),
    Fault(
        "rule: a hidden score is as low as a bias may be", "graph/ops/attention.py",
        "-np.inf if adds(inputs) else np.finfo", "np.finfo",
        ("models/test_rows_without_a_key.py",),
    ),
    Fault(
        "rewrite: queries and keys of a turned product change places",
        "rewrite/fuse_attention.py",
        "q, turned = _transposed(b, turned), _transposed(b, q)", "pass", SPELLINGS,
    ),
    Fault(
        "rewrite: one-hot rows of classes in any order", "rewrite/cross_entropy.py",
        "if right and type_of(label)", "if type_of(label)", ENTROPY,
    ),
    Fault(
        "rewrite: a label of no class is class 0", "rewrite/cross_entropy.py",
        "label = b.Where(known, label, b.scalar(IGNORED, DType.INT64))",
        "label = b.Where(known, label, zero)", ENTROPY,
    ),
    Fault(
        "rewrite: masked losses are summed", "rewrite/cross_entropy.py",
        "            masks.append(held)\n", "", ENTROPY,
    ),
    Fault(
        "rewrite: a mean of losses is their sum", "rewrite/cross_entropy.py",
        'mean = node.op_type == "ReduceMean"', "mean = False", ENTROPY,
    ),
    Fault(
        "rewrite: halves in any order are turned", "rewrite/rotary.py",
        "fits = first[1] == 0 and second[1] == apart and type_of(x)", "fits = type_of(x)", DECODERS,
    ),
    Fault(
        "rows: a softmax over hidden scores alone gives no weight", "rewrite/rows/set_masks.py",
        "return b.reshape(b.cast(b.Max(found, none), DType.BOOL), flat)",
        "return b.reshape(b.cast(found, DType.BOOL), flat)", ROWS,
    ),
    Fault(
        "rows: any low number hides a score", "rewrite/rows/zeros.py",
        "node, lambda fill: bool((fill <= sets.HIDDEN).all()), self.shown",
        "node, lambda fill: bool((fill < 0).all()), self.shown", ROWS,
    ),
    Fault(
        "rows: a softmax hides rows along any dim", "rewrite/rows/zeros.py",
        "if axis not in shown.dims or shown.rows is None:",
        "axis = shown.dims[-1]\n    if shown.rows is None:", ROWS,
    ),
    Fault(
        "rows: conditions of dims that are gone choose rows of none", "rewrite/rows/demand.py",
        "if not kept:  # rows", "if False:  # rows", ONE_ROW,
    ),
    Fault(
        "rows: a reduction over a dim of 1 keeps its rows' place", "rewrite/rows/rules/reduce.py",
        " or len(asked.dims) != len(demand.dims):", ":", ONE_ROW,
    ),
    Fault(
        "rows: transposed rows keep their numbers", "rewrite/rows/rules/shape.py",
        "rows = sets.permuted(demand.rows, tuple(q.y[d] for d in demand.dims), order)",
        "rows = demand.rows", ROWS,
    ),
    Fault(
        "rows: a mask that hides too little is no reason", "rewrite/rows/rules/attention.py",
        'low = next(filter(None, map(too_weak, batch_masks(q))), "") or', 'low =',
        ("models/test_row_reasons.py",),
    ),
    Fault(
        "rows: where scores are filled, hidden keys are left out",
        "rewrite/rows/rules/attention.py",
        "if key_mask(mask, keys) and not filled:", "if key_mask(mask, keys):", BY_HAND,
    ),
    Fault(
        "rows: packed rows forget what fills scores", "rewrite/rows/rules/attention.py",
        'if "fill" in question.attrs:', 'if question.attrs.get("fill") == 1:', BY_HAND,
    ),
    Fault(
        "rows: rows stay where they are in any other shape", "rewrite/rows/packer.py",
        "if product(shape[:last]) == product(y[d] for d in range(dims_y[-1]) if d not in dims_y):",
        "if True:", ROWS,
    ),
    Fault(
        "rows: a dim of size 1 where rows lie is one of features", "rewrite/rows/packer.py",
        "        others = [d for d in range(len(shape)) if d not in dims]\n"
        "        ones = [d for d in dims if d >= 0 and d not in present]  # dims of size 1\n",
        "        others, ones = [d for d in range(len(shape)) if d not in present], []\n", ROWS,
    ),
    Fault(
        "a class of -infinity makes a loss NaN", "graph/ops/linear_cross_entropy.py",
        "log_prob = b.Where(at, log_prob, b.scalar(0.0, type_of(x).dtype))", "pass",
        ("kernels/test_head.py",),
    ),
    Fault(
        "cross-entropy: labels checked up to another number are classes",
        "rewrite/cross_entropy.py", "return number_of(checked.inputs[1]) == classes", "return True",
        ENTROPY,
    ),
    Fault(
        "capture: a number that is no class is a row of zeros", "capture/aten/indexing.py",
        'numbers = c.b.InRange(index64(c, x), count, what="label")', "numbers = index64(c, x)",
        ("capture/test_capture_losses.py",),
    ),
    Fault(
        "a batch goes through pinned memory where the host reads it", "execute/runtime.py",
        ' or place.device.type == "cpu"', "", ("execute/test_recording.py",),
    ),
)  # fmt: skip
