"""Faults of captures, and what a forward does beside its result."""

from __future__ import annotations

from fault import (
    AS_EAGER,
    BUFFERS,
    BY_HAND,
    CACHE_POSITION,
    CAPTURE,
    CHOSEN,
    CONVOLUTIONS,
    CORE,
    CTC,
    EFFECTS,
    EINSUM,
    FORMS,
    GUARDS,
    HOOKS,
    IN_PLACE,
    INDEXING,
    KINKS,
    OWN_GRADIENTS,
    PATCHES,
    PLAN,
    RANDOM,
    RECURRENT,
    RECURRENT_STEPS,
    SAME_TENSOR,
    SLICES,
    SPECIAL,
    STATE,
    Fault,
)

CAPTURE_FAULTS: tuple[Fault, ...] = (
    # capture
    Fault(
        "capture: attention that is never causal is that of a mask",
        "capture/huggingface/attention.py",
        'return re.search(r"is_causal = attention_mask is None and", text) is not None',
        "return True", ("capture/test_capture_masks.py",),
    ),
    Fault(
        "capture: a mean's only window ends before the padding", "capture/aten/pool.py",
        "room = [n + 2 * p for n, p", "room = [n + p for n, p", CONVOLUTIONS,
    ),
    Fault(
        "capture: a question reads the numbers of the tensor whose shape it takes",
        "capture/trace/data_branches.py", "            return args[0].expand(args[1].shape)",
        "            return func(*args, **kwargs)", ("capture/test_pins.py",),
    ),
    Fault(
        "capture: any cache_position counts from zero", "capture/huggingface/cache_position.py",
        "        return version == positions._version", "        return True", CACHE_POSITION,
    ),
    Fault(
        "capture: a range of other steps counts from zero",
        "capture/huggingface/cache_position.py",
        "type(start) is int and start == 0 and type(step) is int and step == 1",
        "type(start) is int and start == 0", CACHE_POSITION,
    ),
    Fault(
        "capture: an element that is not included shares no gradient", "capture/aten/scatter.py",
        "    return c.b.Where(c.b.And(written, c.b.Equal(own, best)), own, lost)",
        "    return lost", FORMS,
    ),
    Fault(
        "capture: the largest differences share their gradient", "capture/aten/distance.py",
        "return c.b.squeeze(c.b.Where(several, shared, most), [last])",
        "return c.b.squeeze(most, [last])", FORMS,
    ),
    Fault(
        "capture: labels one after the other begin at each end", "capture/aten/ctc.py",
        "c.b.Sub(ends, lengths), [1])", "ends, [1])", CTC,
    ),
    Fault(
        "capture: the gradient of ctc is that of its value", "capture/aten/ctc.py",
        '"normal": 1}', '"normal": 0}', CTC,
    ),
    Fault(
        "capture: a layer read backwards ends at its last step", "capture/aten/recurrent.py",
        "last = 0 if way else count - 1", "last = count - 1", RECURRENT,
    ),
    Fault(
        "capture: dropout of a recurrent layer's result", "capture/aten/recurrent.py",
        "layer < layers - 1:", "layer < layers:", RECURRENT,
    ),
    Fault(
        "capture: dropout between recurrent layers in evaluation",
        "capture/custom_ops/recurrent.py",
        "dropout if train else 0.0", "dropout", RECURRENT,
    ),
    Fault(
        "capture: the biases of a recurrent layer are one", "capture/aten/recurrent.py",
        "(own[2], own[3]) if biases", "(own[2], own[2]) if biases", RECURRENT,
    ),
    Fault(
        "recurrent: what a gru keeps of its state has no gradient", "kernels/aten/recurrent.py",
        "dh.mul_(keep[step]).addmm_(dby_state[step], layer.r)",
        "dh.zero_().addmm_(dby_state[step], layer.r)", RECURRENT_STEPS,
    ),
    Fault(
        "recurrent: nobody reads the cells", "kernels/aten/recurrent.py",
        "        if dcells is not None:\n            dc.add_(dcells[step])\n", "",
        RECURRENT_STEPS,
    ),
    Fault(
        "scan: what backward steps have made stays turned", "graph/scan.py",
        "return ends, [_turned(b, x) if backwards else x for x in made]", "return ends, made",
        RECURRENT,
    ),
    Fault(
        "capture: the upper of the two in the middle", "capture/aten/order.py",
        "at = c.b.Div(c.b.Max(c.b.Sub(count, one), c.b.scalar(0, DType.INT64)), two)",
        "at = c.b.Div(count, two)", FORMS,
    ),
    Fault(
        "capture: the median of all gives one its gradient", "capture/aten/order.py",
        "    middle = stop_gradient(c.b, middle)\n", "    return c.b.reshape(middle, ())\n", FORMS,
    ),
    Fault(
        "capture: erfc is flat at 0", "capture/aten/special.py",
        "return below, c.b.Where(below, c.b.Neg(x), x)", "return below, c.b.Abs(x)", SPECIAL,
    ),
    Fault(
        "capture: the mean over batches of a biased variance",
        "capture/trace/torch_nn/running_mean.py",
        "unbiased=True", "unbiased=False", BUFFERS,
    ),
    Fault(
        "capture: adaptive windows do not overlap", "capture/aten/pool.py",
        "[range(i * size // n, -(-(i + 1) * size // n)) for i in range(n)]",
        "[range(i * size // n, (i + 1) * size // n) for i in range(n)]", FORMS,
    ),
    Fault(
        "capture: what is likely is seldom drawn", "capture/aten/random.py",
        "rank = c.b.Div(p, c.b.Neg(c.b.Log(drawn)))",
        "rank = c.b.Mul(p, c.b.Log(drawn))", RANDOM,
    ),
    Fault(
        "capture: reflections do not turn", "capture/aten/sample.py",
        "b.Where(odd, b.Sub(span, rest), rest)", "rest", FORMS,
    ),
    Fault(
        "ctc: equal labels need no blank between them", "graph/ops/ctc.py",
        "far = self.b.Where(other, self.moved(x, 2 * by, self.dead), self.dead)",
        "far = self.moved(x, 2 * by, self.dead)", CTC,
    ),
    Fault(
        "ctc: what torch adds to its gradient stays", "kernels/aten/ctc.py",
        '        if args.attrs["normal"]:', "        if True:", CTC,
    ),
    Fault(
        "capture: a bag counts its padding", "capture/aten/bag.py",
        "if live is None else c.b.cast(live, dtype)", "if True else c.b.cast(live, dtype)", FORMS,
    ),
    Fault(
        "capture: of equal rows of a bag the last has the gradient", "capture/aten/bag.py",
        'axis=0, reduction="min")', 'axis=0, reduction="none")', FORMS,
    ),
    Fault(
        "capture: at its bounds a hardtanh has a slope", "capture/aten/activation.py",
        "    y = c.b.Where(c.b.LessOrEqual(x, bottom), bottom, x)\n",
        "    y = c.b.Where(c.b.Less(x, bottom), bottom, x)\n", KINKS,
    ),
    Fault(
        "capture: at a tie the larger one's gradient is shared", "capture/aten/elementwise.py",
        '_chosen("GreaterOrEqual"): "fmax.default"', '_chosen("Greater"): "fmax.default"', KINKS,
    ),
    Fault(
        "capture: 0 times a logarithm has no slope", "capture/aten/elementwise.py",
        "c.b.Or(c.b.LessOrEqual(y, 0.0), c.b.Equal(y, math.inf))", "c.b.Equal(y, y)", KINKS,
    ),
    Fault(
        "capture: places in a padded plane stay", "capture/aten/pool.py",
        "    if tuple(held) == tuple(sizes):", "    if True:", FORMS,
    ),
    Fault(
        "capture: the means of a layer norm pass a gradient on", "capture/aten/norm.py",
        "stop_gradient(c.b, s) for s in made.outputs[1:]", "s for s in made.outputs[1:]", FORMS,
    ),
    Fault(
        "capture: an op with a reason is expanded", "capture/translate/translator.py",
        'if node.op != "call_function" or reason(_op_name(node.target)):',
        'if node.op != "call_function":', CORE,
    ),
    Fault(
        "capture: a probability left out is the tensor", "capture/aten/random.py",
        "p: Any = 0.5, generator", "p: Any = 0.0, generator", RANDOM,
    ),
    Fault(
        "capture: samples are features of a row of random numbers", "capture/aten/random.py",
        "last = not shape or (shape[-1] == batch and batch not in shape[:-1])",
        "last = not shape", RANDOM,
    ),
    Fault(
        "capture: what a region hands on has no gradient", "capture/translate/identities.py",
        "next((n for n, x in given.items() if x is result), None)", "None", SAME_TENSOR,
    ),
    Fault(
        "capture: what a region copies is what it was given", "capture/translate/identities.py",
        "if x is result), None)", "if x.shape == result.shape), None)", SAME_TENSOR,
    ),
    Fault(
        "capture: a slice's start before a tensor's is past it", "capture/aten/call.py",
        "return 0 if number < 0 else", "return size if number < 0 else", SLICES,
    ),
    Fault(
        "capture: a size below zero does not count from the end", "capture/aten/call.py",
        "if number < 0:", "if number < 0 and isinstance(place, int):", SLICES,
    ),
    Fault(
        "capture: views of memory that was written are not taken anew",
        "capture/translate/functionalize.py",
        "        take(node)\n", "        pass\n", IN_PLACE,
    ),
    Fault(
        "capture: a transposed view is written as it was turned",
        "capture/translate/functionalize.py",
        "[order.index(d) for d in range(len(order))]", "order", IN_PLACE,
    ),
    Fault(
        "capture: a copy shares memory", "capture/trace/aliasing.py",
        "    if found is None:\n        return node.args[0] if annotated else None",
        "    if found is None or annotated:\n        return node.args[0] if annotated else None",
        IN_PLACE,
    ),
    Fault(
        "capture: an op that turns a tensor in place writes into it", "capture/trace/aliasing.py",
        "return mutates(target) and torch.Tag.inplace_view in target.tags",
        "return mutates(target) and False", IN_PLACE,
    ),
    Fault(
        "capture: two results that are one tensor have one gradient", "capture/aten/copies.py",
        "c.b.GradientOf(y, result=result)", "c.b.GradientOf(y, result=0)", OWN_GRADIENTS,
    ),
    Fault(
        "capture: a new tensor returned twice has two gradients", "capture/trace/own_gradients.py",
        "i if id(found[i]) in inputs else last[id(found[i])]", "i", OWN_GRADIENTS,
    ),
    Fault(
        "attention by hand: what fills scores hides them", "rewrite/fuse_attention.py",
        'attrs["fill"] = fill', "pass", BY_HAND,
    ),
    Fault(
        "attention by hand: others read its probabilities", "rewrite/fuse_attention.py",
        "        if others:\n", "        if False:\n", BY_HAND,
    ),
    Fault(
        "attention by hand: what is added is not scaled", "rewrite/fuse_attention.py",
        "value if addend.factor == 1.0 else b.Mul(value, addend.factor)", "value", BY_HAND,
    ),
    Fault(
        "attention by hand: a cap is a scale", "rewrite/fuse_attention.py",
        "return self.factor * (self.softcap or 1.0)", "return self.factor", BY_HAND,
    ),
    Fault(
        "attention by hand: a bias is added to what was filled", "rewrite/fuse_attention.py",
        "if walk.added and number != -math.inf:", "if False:", BY_HAND,
    ),
    Fault(
        "einsum: a dim of 1 is not copied", "graph/einsum.py",
        "y.size(n) if x.size(n) == 1 else x.size(n)", "y.size(n)", EINSUM,
    ),
    Fault(
        "capture: equal parts with a backward of their own are one", "capture/aten/copies.py",
        '"site": c.t.order[c.node]', '"site": 0', OWN_GRADIENTS,
    ),
    Fault(
        "walk: a part with a backward of its own has the gradient of its forward",
        "differentiate/rules/own_gradient.py",
        "made[place] = b.full(0, type_of(y)) if dy is None else dy", "made[place] = y",
        OWN_GRADIENTS,
    ),
    Fault(
        "capture: dims of indices with gaps stay where they are", "capture/aten/indexing.py",
        "at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0", "at = dims[0]", INDEXING,
    ),
    Fault(
        "capture: a running variance divides by the count", "capture/aten/norm.py",
        "c.value(count - 1, dtype)", "c.value(count, dtype)", BUFFERS,
    ),
    Fault(
        "capture: running statistics swap their shares", "capture/aten/norm.py",
        "running, now, 1.0 - momentum, momentum)", "running, now, momentum, 1.0 - momentum)",
        BUFFERS,
    ),
    Fault(
        "capture: a buffer keeps a value that gradients pass", "capture/buffer_updates.py",
        "if trained and _has_gradient(", "if False and _has_gradient(", BUFFERS,
    ),
    Fault(
        "capture: a run to ask tensors moves running statistics", "model_state/effects.py",
        "                if not torch.equal(buffer, before):", "                if False:", BUFFERS,
    ),
    Fault(
        "capture: what a no_grad region writes is lost", "capture/translate/translator.py",
        "            if self.env[inner] is not self.env[buffer]:", "            if False:", BUFFERS,
    ),
    Fault(
        "capture: a clamp's bounds are exchanged", "capture/aten/elementwise.py",
        "        low, high = None, low\n", "        pass\n", CAPTURE,
    ),
    Fault(
        "capture: an uneven padding goes before", "capture/aten/conv.py",
        "ends = c.b.ints([*outer, *[0] * dims, *outer, *odd])",
        "ends = c.b.ints([*outer, *odd, *outer, *[0] * dims])", CONVOLUTIONS,
    ),
    Fault(
        "capture: a mean counts the padding", "capture/aten/pool.py",
        "    if not any(ends) and (count_padding or divisor is not None or not any(pads)):\n",
        "    if not any(ends):\n",
        CONVOLUTIONS,
    ),
    Fault(
        "capture: a size stays open that has to be a number", "capture/translate/translator.py",
        "        self._require_numbers()\n", "", CONVOLUTIONS,
    ),
    Fault(
        "held: a size that is no multiple is served", "capture/captured_module.py",
        "if rest or count < 2 or", "if count < 2 or", ("capture/test_held_sizes.py",),
    ),
    Fault(
        "pins: any answer will do", "capture/batch_guards/pinned.py",
        "return bool(said(made, type(self.answer)) == self.answer)", "return True",
        ("capture/test_pins.py",),
    ),
    Fault(
        "pins: what is written before a question is left out", "capture/translate/batch_program.py",
        "            waiting += writers\n", "", ("capture/test_pins.py",),
    ),
    Fault(
        "pins: a number that is read holds for every batch", "capture/batch_guards/pinned.py",
        "    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:\n",
        "    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:\n"
        "        if type(self.answer) is not bool:\n            return True\n",
        ("capture/test_read_numbers.py",),
    ),
    Fault(
        "pins: rows that a mask leaves out are there", "capture/trace/data_branches.py",
        "said = bool(mask.all()) if first else", "said = True if first else",
        ("capture/test_read_numbers.py",),
    ),
    Fault(
        "capture: as_strided takes turned memory as it is shown", "capture/aten/indexing.py",
        "x = x if order == sorted(order) else c.b.transpose(x, order)", "pass", FORMS,
    ),
    Fault(
        "capture: bits of whole numbers", "capture/aten/elementwise.py",
        "c.b.Not(x) if dtype == DType.BOOL else c.b.Sub(c.value(-1, dtype), x)",
        "c.b.Not(c.value(x, DType.BOOL))", CAPTURE,
    ),
    Fault(
        "capture: a reversed difference", "capture/aten/elementwise.py",
        'return _binary("Sub")(c, b, a if alpha == 1 else c.b.Mul(a, alpha))',
        'return _binary("Sub")(c, b, a)', CAPTURE,
    ),
    Fault(
        "capture: a negative index", "capture/aten/call.py",
        "place, number = size + place", "place, number = size + place - 1", CAPTURE,
    ),
    Fault(
        "capture: padding starts with the first dim", "capture/aten/shape.py",
        "begin[rank - 1 - i], end[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]",
        "begin[i], end[i] = pads[2 * i], pads[2 * i + 1]", CAPTURE,
    ),
    Fault(
        "capture: a softmax moves its dim and leaves it", "capture/aten/norm.py",
        "    return c.b.transpose(y, back)\n", "    return c.b.transpose(y, swap)\n", CAPTURE,
    ),
    # what a forward does beside its result
    Fault(
        "effects: what is left is not compared", "capture/side_effects.py",
        "if not (_equal(given, again[0]) and _alike(left, again[1])):",
        "if not _equal(given, again[0]):", EFFECTS,
    ),
    Fault(
        "effects: what is given is not compared", "capture/side_effects.py",
        "if not (_equal(given, again[0]) and _alike(left, again[1])):",
        "if not _alike(left, again[1]):", EFFECTS,
    ),
    Fault(
        "effects: tensors stay set", "capture/side_effects.py",
        "effects.left = steady or all(_told(fact) == fact for fact in kept)",
        "effects.left = True", EFFECTS,
    ),
    Fault(
        "effects: tables do not stay", "capture/side_effects.py",
        "effects.left = steady or all(", "effects.left = all(", EFFECTS,
    ),
    Fault(
        "effects: tables that stay are not watched", "capture/stages.py",
        "        result.constants += flat.effects.tensors", "        pass", EFFECTS,
    ),
    Fault(
        "effects: no other batch in between", "capture/side_effects.py",
        "self._give([_another(t, all_differ) for t in self._batch])", "pass", EFFECTS,
    ),
    Fault(
        "effects: no smaller batch in between", "capture/side_effects.py",
        "            self._give(self._smaller())", "            pass", EFFECTS,
    ),
    Fault(
        "effects: no other parameters in between", "capture/side_effects.py",
        "changed = _another(t.detach(), t.is_floating_point())", "changed = t.detach()", EFFECTS,
    ),
    Fault(
        "effects: what is set on parameters is not seen", "model_state/snapshot.py",
        'self.visit(value, f"{path}.{name}")', "pass", EFFECTS,
    ),
    Fault(
        "guard: what is set on a tensor", "model_state/walk.py",
        "        self._attributes(x, path, self.depth)\n        try:", "        try:", GUARDS,
    ),
    Fault(
        "guard: the class of a tensor", "model_state/sweep.py",
        'attrgetter("__class__", "requires_grad"', 'attrgetter("requires_grad"',
        ("train/test_batches.py",),
    ),
    Fault(
        "effects: the other mode is not looked at", "capture/side_effects.py",
        "if not effects.left and not self._other_mode_is_blind():", "if False:", EFFECTS,
    ),
    Fault(
        "effects: names of a module are not put back", "model_state/snapshot.py",
        "                scope[name] = value", "                pass", EFFECTS,
    ),
    Fault(
        "effects: graphs outlive what another capture sets", "train/prepared_steps.py",
        "            state.train.clear()\n            state.eval.clear()\n",
        "            pass\n", EFFECTS,
    ),
    Fault(
        "effects: an iterator's place is not seen", "model_state/facts.py",
        "    if left >= 0 or not depth:\n        return left",
        "    if left >= 0 or not depth:\n        return None", EFFECTS,
    ),
    Fault(
        "encoder: hidden tokens before visible ones",
        "capture/trace/torch_nn/transformer_encoder.py",
        "torch.where((hidden & last)[..., None], empty, y)",
        "torch.where(hidden[..., None], empty, y)", ("capture/test_transformer_encoder.py",),
    ),
    Fault(
        "capture: a size that the trace fixes stays open", "capture/translate/forced_sizes.py",
        "                found |= {size: first[size] for size in sizes}", "                pass",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: a relation of two sizes fixes them", "capture/translate/forced_sizes.py",
        "len(factors) == 1 and _solved(factor)", "False",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: sizes that two dims have in common stay open",
        "capture/translate/forced_sizes.py",
        "len(factors) == 1 and _solved(factor)", "_solved(factor)",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: tensors of a class of their own pass", "model_state/refusals.py",
        "return None if plain else", "return None if True else",
        ("train/test_batches.py",),
    ),
    Fault(
        "capture: inference_mode stops no gradient", "capture/trace/as_eager.py",
        "torch.set_grad_enabled(not context.mode)", "torch.set_grad_enabled(True)", AS_EAGER,
    ),
    Fault(
        "capture: a trace says that it compiles", "capture/trace/as_eager.py",
        "and not self._asked() and self._plain()", "and self._plain()", AS_EAGER,
    ),
    Fault(
        "capture: another thread hears of the trace", "capture/trace/as_eager.py",
        "threading.get_ident() == self._thread and not", "not", AS_EAGER,
    ),
    Fault(
        "capture: a name for is_compiling is not seen", "capture/trace/as_eager.py",
        "x.__name__ in _COMPILERS.get(x.__module__, ())", "False", AS_EAGER,
    ),
    Fault(
        "capture: a trace's tensors are of a class of their own", "capture/trace/as_eager.py",
        "if type(x) is FakeTensor or type(x) is MaskedRows:", "if False:", AS_EAGER,
    ),
    Fault(
        "capture: a size is no int", "capture/trace/as_eager.py",
        "if type(x) in _NUMBERS else isinstance", "if False else isinstance", AS_EAGER,
    ),
    Fault(
        "capture: a written size stays open", "capture/trace/as_eager.py",
        "*spec) if asked() else", "*spec) if False else", AS_EAGER,
    ),
    Fault(
        "capture: layouts that were asked for are not watched", "capture/stages.py",
        "    if traced.layouts_matter:", "    if False:", AS_EAGER,
    ),
    Fault(
        "capture: a question through the class is not seen", "capture/trace/as_eager.py",
        "yield torch.Tensor, name, of_layout", "yield FakeTensor, name, of_layout", AS_EAGER,
    ),
    Fault(
        "capture: a name for a question is not seen", "capture/trace/as_eager.py",
        "if id(x) in known_as]", "if False]", AS_EAGER,
    ),
    Fault(
        "patches: all threads see them", "model_state/patches.py",
        "replacement if threading.get_ident() == here else plain", "replacement", PATCHES,
    ),
    Fault(
        "patches: what is put back last is lost to an interrupt", "model_state/patches.py",
        "                _put(*before[-1])\n                before.pop()\n",
        "                _put(*before.pop())\n", PATCHES,
    ),
    Fault(
        "patches: the first place is put back first", "model_state/patches.py",
        "                _put(*before[-1])\n                before.pop()\n",
        "                _put(*before[0])\n                before.pop(0)\n", PATCHES,
    ),
    Fault(
        "patches: an interrupt comes before a place is noted", "model_state/patches.py",
        "            before.append((owner, name, own))  # first, in case an interrupt follows\n"
        "            _put(owner, name, visible)\n",
        "            _put(owner, name, visible)\n            before.append((owner, name, own))\n",
        PATCHES,
    ),
    Fault(
        "patches: what was absent stays", "model_state/patches.py",
        "        delattr(owner, name)", "        pass", PATCHES,
    ),
    Fault(
        "capture: hooks on nodes pass", "capture/trace/as_eager.py",
        "if name in _NODE_HOOKS:", "if False:", HOOKS,
    ),
    Fault(
        "capture: parameters may be frozen in a forward", "capture/trace/as_eager.py",
        "if changed.setdefault(id(x), value) != value:", "if False:", HOOKS,
    ),
    Fault(
        "capture: saved tensors hooks pass", "capture/trace/gradient_code.py",
        "if not keeps_numbers(context.pack_hook):", "if False:", HOOKS,
    ),
    Fault(
        "capture: saved tensors hooks around a step pass", "model_state/refusals.py",
        "if packing and not", "if False and not", HOOKS,
    ),
    Fault(
        "capture: parameters that no one lists are constants", "capture/stages.py",
        "        refuse_unlisted(read, model, traced.request.loss_fn)", "        pass",
        ("train/test_unlisted.py",),
    ),
    Fault(
        "capture: numbers before sizes", "capture/captured_module.py",
        "        dims: dict[str, int] = {}\n        for leaf, dim, size in self._sizes:",
        "        if not self.suits(tensors):\n            return None\n"
        "        dims: dict[str, int] = {}\n        for leaf, dim, size in self._sizes:",
        ("kernels/test_hidden_rows.py",),
    ),
    Fault(
        "chosen rows: those that do not count stay", "capture/masked_rows/rows.py",
        "torch.where(wide(member, rows), rows, copies)", "rows", CHOSEN,
    ),
    Fault(
        "chosen rows: any two masks choose the same", "capture/masked_rows/rows.py",
        "if any(c.key != chosen[0].key for c in chosen):", "if False:", CHOSEN,
    ),
    Fault(
        "chosen rows: a mean is of all rows", "capture/masked_rows/reductions.py",
        "total / (own.count * each)", "total / (len(own.member) * each)", CHOSEN,
    ),
    Fault(
        "chosen rows: a mask written into is the same mask", "capture/trace/row_choices.py",
        "if held is None or held[1] != x._version:", "if held is None:", CHOSEN,
    ),
    Fault(
        "updates: counts of what is gone", "train/torch_optimizer.py",
        "        if self.updates.restart(self.names_kept()):\n",
        "        if self.updates.restart(self.names_kept()) and False:\n", STATE,
    ),
    Fault(
        "specialize: sizes asked for late", "rewrite/specialize.py",
        "    noop(made)  # removing no-ops may add new `Shape` nodes\n"
        "    if open:\n        name_sizes(made)\n",
        "    if open:\n        name_sizes(made)\n    noop(made)\n", PLAN,
    ),
)  # fmt: skip
