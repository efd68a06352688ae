"""Faults of weights and sequences in parts: shardings, their rules and their choice."""

from __future__ import annotations

from fault import Fault

TENSOR = ("distribute/test_tensor_models.py",)
CONTEXT = ("distribute/test_context.py",)
RING = ("distribute/test_ring.py",)
EXPERTS = ("distribute/test_experts.py",)
TENSOR_RULES = ("distribute/test_tensor_rules.py",)
PADDED = ("distribute/test_tensor_models.py",)
STATES = ("train/test_rank_states.py",)
BOTH = ("distribute/test_zero_of_parts.py",)

TENSOR_FAULTS: tuple[Fault, ...] = (
    Fault(
        "ranks: ids from the end of a table are those of its padding",
        "distribute/tensor/padding.py", "behind = b.Add(ids, np.array(rows, kind))",
        "behind = b.Add(ids, np.array(size, kind))", PADDED,
    ),
    Fault(
        "ranks: classes of padding are likely", "distribute/tensor/padding.py",
        "np.full(size - rows, -np.inf, dtype)", "np.zeros(size - rows, dtype)", PADDED,
    ),
    Fault(
        "ranks: other readers see the padding", "distribute/tensor/padding.py",
        "node.replace_input_with(i, b.slice(value, 0, 0, rows))", "pass", PADDED,
    ),
    Fault(
        "ranks: heads with smoothed labels are padded", "distribute/tensor/padding.py",
        'not has_weights and not attrs.get("label_smoothing")', "not has_weights", PADDED,
    ),
    Fault(
        "ranks: a part ends with the vocabulary", "distribute/tensor/sharding.py",
        "return -(-size // (self.sharding.pieces * self.ranks))",
        "return size // (self.sharding.pieces * self.ranks)", (*STATES, *PADDED),
    ),
    Fault(
        "ranks: parts draw the bits of the first", "distribute/tensor/rules/update.py",
        "first=place.at * rows * ROW)", "first=0)",
        BOTH,
    ),
    Fault(
        "ranks: a group's parts are neighbours", "distribute/tensor/sharding.py",
        "[(group * self.ranks + at) * inner for",
        "[(at * groups + group) * inner for", TENSOR_RULES,
    ),
    Fault(
        "ranks: a bias is added by every rank", "distribute/tensor/rules/product.py",
        "            found[2] = PARTIAL\n",
        "            found[2] = REPLICATED\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: sums over parts are whole", "distribute/tensor/rules/reduce.py",
        "({0: found}), (Sharding(terms=terms),))\n",
        "({0: found}), (REPLICATED,))\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: heads draw the masks of the first rank", "distribute/tensor/rules/attention.py",
        "first_head=before + heads * place.at)",
        "first_head=before)", TENSOR_RULES,
    ),
    Fault(
        "ranks: features draw those of the first rank", "distribute/tensor/rules/elementwise.py",
        "first_feature=before + size * place.at)",
        "first_feature=before)", TENSOR_RULES,
    ),
    Fault(
        "ranks: rows of other ranks are read as the first", "distribute/tensor/rules/indexing.py",
        "    return [b.Where(own, y, b.scalar(0.0, type_of(y).dtype))]",
        "    return [y]", TENSOR_RULES,
    ),
    Fault(
        "ranks: a row of -1 is no rank's", "distribute/tensor/rules/indexing.py",
        "        ids = b.Where(b.Less(ids, zero), past, ids)\n",
        "        del past\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: each rank has a softmax of its own", "distribute/tensor/rules/loss.py",
        '    [highest] = place.reduced(b, [highest], f"the highest logits of {what}", "max")\n',
        "", TENSOR_RULES,
    ),
    Fault(
        "ranks: labels are counted from 0 on every rank", "distribute/tensor/rules/loss.py",
        "np.array(classes * place.at, ignored.dtype)",
        "np.array(0, ignored.dtype)", TENSOR_RULES,
    ),
    Fault(
        "ranks: a reshape keeps the groups", "distribute/tensor/rules/shape.py",
        "return split(after.start + k, groups)",
        "return split(after.start + k, found.groups)", TENSOR_RULES,
    ),
    Fault(
        "ranks: every rank has the first one's part", "distribute/tensor/conversions.py",
        "        return b.slice(x, dim, place.at * size, (place.at + 1) * size)",
        "        return b.slice(x, dim, 0, size)", TENSOR,
    ),
    Fault(
        "ranks: a norm is a sum of norms", "distribute/tensor/conversions.py",
        "b.Mul(wide, wide), place",
        "wide, place", TENSOR,
    ),
    Fault(
        "ranks: a rank's finite gradients are all that count", "distribute/tensor/conversions.py",
        "late.Equal(started.wait(late)[0], 0)",
        "x", ("distribute/test_tensor_models.py::test_cuts_and_exchanges_are_those_of_megatron",),
    ),
    Fault(
        "ranks: a bias is a term of every rank", "distribute/tensor/conversions.py",
        "b.const(np.array(place.at == 0)), x,",
        "b.const(np.array(True)), x,", TENSOR,
    ),
    Fault(
        "ranks: parts are joined as they come", "distribute/tensor/conversions.py",
        "late.reshape(late.transpose(rows, perm), whole.shape)",
        "late.reshape(rows, whole.shape)", TENSOR,
    ),
    Fault(
        "ranks: terms owe nothing", "distribute/tensor/solve.py",
        "self._conversion(value, sharding, REPLICATED) if is_own else 0.0",
        "0.0", ("distribute/test_tensor_models.py::test_cuts_and_exchanges_are_those_of_megatron",),
    ),
    Fault(
        "ranks: sums of gradients are whole", "distribute/tensor/solve.py",
        "    held += signature.accumulators.items()\n",
        "", ("distribute/test_tensor_models.py::test_a_window_sums_parts",),
    ),
    Fault(
        "ranks: a region runs on parts", "distribute/tensor/__init__.py",
        "    if region is not None:\n",
        "    if False:\n", ("distribute/test_tensor_models.py::test_what_is_refused",),
    ),
    Fault(
        "ranks: positions of a rank are counted from 0", "distribute/tensor/rules/drawn_rows.py",
        "    if place.at:\n", "    if False:\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: rows of a group are counted from those of the rank before",
        "distribute/tensor/rules/drawn_rows.py",
        "b.size(inner * place.ranks)", "b.size(inner)", TENSOR_RULES,
    ),
    Fault(
        "ranks: all samples have one mask", "distribute/tensor/rules/drawn_rows.py",
        "for dim in range(len(local)):", "for dim in range(1, len(local)):", TENSOR_RULES,
    ),
    Fault(
        "ranks: a query sees keys as if it were among the first",
        "distribute/tensor/rules/attention_queries.py",
        "numbers_along(b, (samples, queries), 1, split(1), place)", "b.arange(queries)",
        TENSOR_RULES,
    ),
    Fault(
        "ranks: padding is seen", "distribute/tensor/rules/attention_queries.py",
        "        sample = b.Where(seen, sample, np.array(-1))\n", "        seen = seen\n",
        TENSOR_RULES,
    ),
    Fault(
        "ranks: a mask for each query hides what it hides from the first ones",
        "distribute/tensor/rules/attention_methods.py",
        "shape[0] in (1, q.shape[0]) and shape[1:3] == (1, 1)", "shape[0] in (1, q.shape[0])",
        TENSOR_RULES,
    ),
    Fault(
        "ranks: samples are told apart in another order",
        "distribute/tensor/rules/attention_queries.py",
        "(samples, rows, heads, *more)", "(rows, samples, heads, *more)", TENSOR_RULES,
    ),
    Fault(
        "ranks: the gradient of keys is of the rank's own queries",
        "distribute/tensor/rules/attention_queries.py",
        "(_QUERIES, PARTIAL, PARTIAL, of_bias)", "(_QUERIES, REPLICATED, REPLICATED, of_bias)",
        TENSOR_RULES,
    ),
    Fault(
        "ranks: heads are exchanged whatever it costs",
        "distribute/tensor/rules/attention_methods.py",
        "4 * heads + 4 * groups < 6 * groups * call.ranks", "True", RING,
    ),
    Fault(
        "ranks: backward exchanges heads once more",
        "distribute/tensor/rules/attention_exchange.py",
        'place.shared["heads", results[i]] = made[i]', "pass", CONTEXT,
    ),
    Fault(
        "ranks: a mean is over the labels of one rank", "distribute/tensor/rules/loss_rows.py",
        '[place.shared[key]] = place.reduced(', '[place.shared[key]] = (lambda b, xs, *_: xs)(',
        TENSOR_RULES,
    ),
    Fault(
        "ranks: the mean of parts is their sum", "distribute/tensor/rules/reduce.py",
        "    return [b.Mul(y, 1.0 / place.ranks)]\n", "    return [y]\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: whole keys are kept for backward", "distribute/context.py",
        "    solution.gathers_again = True\n", "", CONTEXT,
    ),
    Fault(
        "ranks: keys are gathered again as soon as they can be",
        "distribute/tensor/write.py", "value, want, placed=1)", "value, want, placed=0)", CONTEXT,
    ),
    Fault(
        "ranks: a window's terms are summed with each micro-batch", "distribute/context.py",
        "return PARTIAL if name in self._windows | self._summed_later else REPLICATED",
        "return PARTIAL if name in self._summed_later else REPLICATED", CONTEXT,
    ),
    Fault(
        "ranks: a length is cut to what ranks divide", "distribute/lengths.py",
        "        if length % ranks:\n", "        if False:\n", CONTEXT,
    ),
    Fault(
        "ranks: rows of other experts are added up", "distribute/tensor/conversions.py",
        "    return b.Where(shaped, x, b.scalar(0, type_of(x).dtype))\n", "    return x\n", EXPERTS,
    ),
    Fault(
        "ranks: rows of two routers are one another's", "distribute/tensor/rules/grouped.py",
        'return Sharding(terms=ROWS, owner=ends.name or "")', "return Sharding(terms=ROWS)",
        EXPERTS,
    ),
    Fault(
        "ranks: groups end where they end among those of all ranks",
        "distribute/tensor/rules/grouped.py",
        "b.Mod(b.Add(number, first), size), b.Sub(own, first)",
        "b.Mod(b.Add(number, first), size), own", TENSOR_RULES,
    ),
    Fault(
        "ranks: rows of experts stay at the front", "distribute/tensor/rules/grouped.py",
        "    return [b.Gather(y, back, axis=0)]\n", "    return [y]\n", TENSOR_RULES,
    ),
    Fault(
        "ranks: a sum over rows has those of other experts", "distribute/tensor/rules/grouped.py",
        "b.Where(seen, y, b.scalar(0.0, type_of(y).dtype))", "y", TENSOR_RULES,
    ),
    Fault(
        "ranks: rows are told apart after a sum over them", "distribute/tensor/rules/grouped.py",
        "    if 0 in along or any(", "    if any(", TENSOR_RULES,
    ),
)  # fmt: skip

__all__ = ["TENSOR_FAULTS"]
