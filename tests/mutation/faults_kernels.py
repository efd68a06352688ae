"""Faults of kernels, and the question which of them takes a call."""

from __future__ import annotations

from fault import BIASED, CALLS, KERNELS, PLAN, TARGET, Fault

AGAIN = ("rewrite/test_activation_again.py",)

KERNELS_FAULTS: tuple[Fault, ...] = (
    # kernels
    Fault(
        "kernel: integer division rounds down", "kernels/aten/elementwise.py",
        'mode = None if args.y.is_floating_point() else "trunc"',
        'mode = None if args.y.is_floating_point() else "floor"', KERNELS,
    ),
    Fault(
        "kernel: where may be written over its condition's side", "kernels/aten/elementwise.py",
        '"Where": Kernel("aten.where", _bind_where, inplace=((0, 1), (0, 2))),',
        '"Where": Kernel("aten.where", _bind_where, inplace=((0, 0), (0, 2))),', (*KERNELS, *PLAN),
    ),
    Fault(
        "kernel: no label counts", "kernels/aten/loss.py",
        "        share.masked_fill_(ignored, 0.0)  # 0/0 where no label counts\n", "",
        ("kernels", "capture/test_capture_losses.py"),
    ),
    Fault(
        "kernel: smoothing ignores the labels that count for nothing", "kernels/aten/loss.py",
        "        rows.masked_fill_(ignored, 0.0)\n        if reduction",
        "        if reduction", ("kernels", "capture/test_capture_losses.py"),
    ),
    Fault(
        "kernel: rows are summed though other dims are asked for", "kernels/native/reduce.py",
        "if sorted(dims) != list(range(count)) or not x.is_contiguous():",
        "if not x.is_contiguous():", KERNELS,
    ),
    Fault(
        "kernel: strided rows are summed as if they lay together", "kernels/native/reduce.py",
        "if sorted(dims) != list(range(count)) or not x.is_contiguous():",
        "if sorted(dims) != list(range(count)):", (*KERNELS, *PLAN),
    ),
    Fault(
        "library: OpenMP is looked for where Linux alone tells", "kernels/native/library.py",
        'maps.read_text(encoding="utf-8") if maps.exists() else ""',
        'maps.read_text(encoding="utf-8")', ("release",),
    ),
    Fault(
        "native call: a tensor of any dtype is taken", "kernels/native/signatures.py",
        "if given.dtype == dtype and given.device.type", "if given.device.type", CALLS,
    ),
    Fault(
        "native call: a tensor with gaps counts as whole", "kernels/native/signatures.py",
        "argument.numel() if argument.is_contiguous() else 1", "argument.numel()", CALLS,
    ),
    Fault(
        "native call: fewer numbers than the call reads", "kernels/native/signatures.py",
        "if argument is not None and _numbers_behind(argument) < least:",
        "if argument is not None and _numbers_behind(argument) + 1 < least:", CALLS,
    ),
    Fault(
        "native call: negative sizes", "kernels/native/signatures.py",
        "            if given[name] < 0:\n", "            if given[name] < -(2**62):\n", CALLS,
    ),
    Fault(
        "native source: what is not understood is passed over", "kernels/native/signatures.py",
        "if _WITHOUT_ARGUMENTS.match(text, place.start()):", "if True:", CALLS,
    ),
    Fault(
        "native kernels: a file's name decides which is tried first", "kernels/native/__init__.py",
        "            if op in table:\n", "            if False:\n", ("kernels/test_new_kernel.py",),
    ),
    Fault(
        "bad input: nobody reads the flags", "execute/binder.py",
        "            raise\n        self.raise_input_errors(numbers)\n",
        "            raise\n", ("execute/test_executable.py",),
    ),
    Fault(
        "bad input: a flag stays set for the next run", "execute/binder.py",
        "            self.flags.zero_()\n", "            pass\n",
        ("execute/test_executable.py",),
    ),
    Fault(
        "bad input: a later launch's failure is told", "execute/binder.py",
        "            self.raise_input_errors(numbers)\n            raise\n",
        "            raise\n", ("execute/test_executable.py",),
    ),
    Fault(
        "bad input: a foreign row is read", "kernels/aten/data.py",
        "within = rows.clamp(least, most)", "within = rows.clone()",
        ("kernels/test_host_reads.py",),
    ),
    Fault(
        "launch: the host reads a label", "kernels/aten/linear_cross_entropy.py",
        "        torch.aminmax(label, out=ends)\n",
        "        torch.aminmax(label, out=ends)\n        assert int(ends[0]) > -1\n",
        ("kernels/test_host_reads.py",),
    ),
    Fault(
        "launch: hyperparameters lie on the device", "execute/tensors.py",
        "return memory.named(name, type, on_host=index in self._on_host)",
        "return memory.named(name, type)", ("execute/test_executable.py",),
    ),
    Fault(
        "kernel: the upper triangle's diagonal", "kernels/aten/elementwise.py",
        "return partial(function, args.x(0), diagonal=k, out=args.y)",
        "return partial(function, args.x(0), diagonal=0, out=args.y)", KERNELS,
    ),
    # fusions, where kernels take them
    Fault(
        "fusion: nobody asks about the gradient", "plan/fusible.py",
        "if reason is None and fusion.gradient:", "if False:", TARGET,
    ),
    Fault(
        "fusion: the whole gradient's graph is asked", "plan/fusible.py",
        'if n.domain == ONWARD and n.meta.get("backward")]', "if n.domain == ONWARD]", TARGET,
    ),
    Fault(
        "fusion: what is refused is written", "rewrite/context.py",
        "return reason is None or self.missed(place, op, reason)",
        "return reason is None or not self.missed(place, op, reason)", TARGET,
    ),
    Fault(
        "fusion: what is added to a trained bias is lost", "rewrite/flash_attention.py",
        "(_sum(b, fixed) if fixed else None)", "None", BIASED,
    ),
    Fault(
        "rows: packed rows lose their bias", "rewrite/rows/rules/attention.py",
        "[*new, None, *draw, *at, *bias]", "[*new, None, *draw, *at]", BIASED,
    ),
    Fault(
        "rows: rows go by the bias of another sample", "rewrite/rows/rules/attention.py",
        "if _of_samples(q.node):", "if False:", BIASED,
    ),
    Fault(
        "attention: a bias that samples share is one sample's", "kernels/native/attention.py",
        "samples = 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)", "samples = 0",
        ("kernels/test_attention.py",),
    ),
    Fault(
        "fusion: a product that others read", "rewrite/bias_activation.py",
        "if u in outputs or any(user not in readers for user in u.consumers()):", "if False:",
        ("rewrite/test_bias_activation.py",),
    ),
    Fault(
        "again: activations are kept", "rewrite/activation_again.py",
        "if recompute(graph, names):", "if False:", AGAIN,
    ),
    Fault(
        "again: one that is handed out too", "rewrite/activation_again.py",
        "not outputs & values and _kept(node)", "_kept(node)", AGAIN,
    ),
    Fault(
        "again: of an operand that need not be kept", "rewrite/activation_again.py",
        "not outputs & values and _kept(node)", "not outputs & values", AGAIN,
    ),
    Fault(
        "again: of a parameter, which may change", "rewrite/activation_again.py",
        "return all(source(x).producer() is not None for x in computed) and all(", "return all(",
        ("module/test_gradients.py",),
    ),
    Fault(
        "again: what a region holds on to", "rewrite/view_closure.py",
        "return not held and ", "return ", ("module/test_region_effects.py",),
    ),
    Fault(
        "again: beside the gradient that is as wide", "rewrite/activation_again.py",
        "if all(place[last] < place[n] for n in moved):", "if False:", AGAIN,
    ),
    Fault(
        "again: copies of biases are their views", "graph/ops/copy.py",
        "b.Concat(inputs[0], axis=0)", "b.Identity(inputs[0])", ("module/test_gradients.py",),
    ),
    Fault(
        "again: a bias may not change before the backward", "rewrite/kept_biases.py",
        "if bias is None or bias not in late:", "if True:",
        ("module/test_gradients.py",),
    ),
    Fault(
        "kernel_for: measured sizes are asked for before they are known", "kernels/__init__.py",
        "kernel.faster(spec) if spec.is_static else None", "kernel.faster(spec)", TARGET,
    ),
    Fault(
        "kernel_for: the target is not asked", "kernels/__init__.py",
        "reason = kernel.where(target) or kernel.unsupported(spec)",
        "reason = kernel.unsupported(spec)", TARGET,
    ),
    Fault(
        "rows: a kernel that refuses packed rows gets them", "rewrite/rows/rules/attention.py",
        "if not p.context.takes(node, node.op_type, packed, attributes(node)):",
        "if False:", TARGET,
    ),
)  # fmt: skip
