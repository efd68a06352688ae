"""Faults of mixed precision: the policy, its casts, exports in a low type, verification."""

from __future__ import annotations

from fault import Fault

CASTS = ("rewrite/test_precision.py",)
LOW_GRAPHS = ("models/test_mixed_precision.py", "models/test_low_evaluators.py")
SUMS, LOW_ATTENTION = ("rewrite/test_wide_sum.py",), ("rewrite/test_low_attention.py",)
LOW_FILES = ("train/test_low_export.py",)
LOW_VERIFIED = ("faults/test_planted_in_mixed_precision.py",)

PRECISION_FAULTS: tuple[Fault, ...] = (
    # the policy
    Fault(
        "policy: softmax is low", "rewrite/precision/policy.py",
        '("Add", "Sub", "Max", "Min"),', '("Add", "Sub", "Max", "Min", "Softmax"),',
        CASTS,
    ),
    Fault(
        "policy: the residual stream is low", "rewrite/precision/policy.py",
        'Precision.WIDEST,\n        ("Add", ', 'Precision.LOW,\n        ("Add", ', CASTS,
    ),
    Fault(
        "policy: scores with an addend are low", "rewrite/precision/policy.py",
        "        alone=True,\n", "", CASTS,
    ),
    Fault(
        "policy: angles are low", "rewrite/precision/policy.py",
        "        others_stay=True,\n", "", (*CASTS, *LOW_GRAPHS),
    ),
    Fault(
        "policy: products are fp32", "rewrite/precision/policy.py",
        '("MatMul", "Gemm", ', '("Gemm", ', CASTS,
    ),
    Fault(
        "policy: what is kept in fp32 is not", "rewrite/precision/policy.py",
        "return _REST if self._kept(node) or (", "return _REST if (", (*CASTS, *LOW_GRAPHS),
    ),
    Fault(
        "policy: a module's inner modules are not kept", "rewrite/precision/policy.py",
        'fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")',
        "fnmatchcase(name, pattern)", LOW_GRAPHS,
    ),
    # casts that the policy asks for
    Fault(
        "casts: none before what is fp32", "rewrite/precision/write_casts.py",
        "        if line.precision is Precision.FULL:\n            return DType.FLOAT\n",
        "        if line.precision is Precision.FULL:\n            return None\n", CASTS,
    ),
    Fault(
        "casts: types are not settled behind a low operand", "rewrite/precision/write_casts.py",
        "if changed or any(x is not None and type_of(x).is_low for x in node.inputs):",
        "if changed:", CASTS,
    ),
    Fault(
        "casts: constants are rounded", "rewrite/precision/write_casts.py",
        "return low if exact else DType.FLOAT", "return low", CASTS,
    ),
    Fault(
        "casts: a mixed sum is low", "rewrite/precision/write_casts.py",
        "if not computed or any(type_of(x).dtype != low for x in computed):",
        "if not computed:", CASTS,
    ),
    Fault(
        "casts: a weight is cast for each reader", "rewrite/view_closure.py",
        'WHOLE = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "StopGradient")',
        'WHOLE = ("Reshape",)', (*CASTS, *LOW_GRAPHS),
    ),
    Fault(
        "casts: copies of weights are kept for the backward", "rewrite/precision/cast_again.py",
        "recompute(graph, names)", "pass", LOW_GRAPHS,
    ),
    Fault(
        "casts: views of copies are kept for the backward", "rewrite/precision/cast_again.py",
        "names |= {y.name for y in values if y.name}", "names.add(made.name or '')", LOW_GRAPHS,
    ),
    Fault(
        "casts: a weight may not change before the backward", "rewrite/precision/cast_again.py",
        "if graph.signature.split_halves:", "if False:", ("module/test_autocast.py",),
    ),
    Fault(
        "casts: up is moved too", "rewrite/precision/move_casts.py",
        "if x is None or not type_of(made).is_low or type_of(x).is_low:", "if x is None:", CASTS,
    ),
    Fault(
        "casts: one that loses numbers is cancelled", "rewrite/precision/cancel_casts.py",
        "if type_of(x).dtype not in _WIDER.get(type_of(inner).dtype, ()):",
        "if type_of(x).dtype == type_of(inner).dtype:", CASTS,
    ),
    Fault(
        "casts: whatever reads a gradient reads the low one", "rewrite/precision/fold_casts.py",
        "or not all(_reads_gradients(u.node) for u in uses)", "",
        ("train/test_mixed_precision_steps.py",),
    ),
    Fault(
        "sums: what is broadcast is a term too", "rewrite/wide_sum.py",
        "return y.dtype == DType.FLOAT and all(x is not None and type_of(x) == y for x in "
        "node.inputs)", "return y.dtype == DType.FLOAT", SUMS,
    ),
    Fault(
        "sums: one that others read is taken too", "rewrite/wide_sum.py",
        "x not in outputs and len(x.uses()) == 1", "x not in outputs", SUMS,
    ),
    Fault(
        "sums: two low types are one", "rewrite/wide_sum.py",
        " or len({type_of(x).dtype for x in low}) > 1", "", SUMS,
    ),
    Fault(
        "sums: casts stay", "rewrite/wide_sum.py", "            _remove_unread(graph, x, outputs)",
        "            pass", SUMS,
    ),
    Fault(
        "attention: a result is rounded to another type", "rewrite/precision/low_attention.py",
        " or {type_of(cast.outputs[0]).dtype for cast in casts} != dtypes", "", LOW_ATTENTION,
    ),
    Fault(
        "accumulation: the sum that the update reads is rounded too",
        "differentiate/update/accumulate.py",
        "total = gradients.of[name] = b.Add(before, g)",
        "total = b.Add(before, g); gradients.of[name] = total if low is None else "
        "b.Cast(b.Cast(total, to=low), to=own.dtype)", ("train/test_low_accumulation.py",),
    ),
    Fault(
        "accumulation: bf16 that is asked for is not there", "train/torch_optimizer.py",
        'accumulator = DType.BFLOAT16 if sums == "bf16" else None', "accumulator = None",
        ("train/test_low_accumulation.py",),
    ),
    Fault(
        "casts: gradients of several readers are added low", "differentiate/reverse.py",
        "wide = type_of(dx).accumulated.dtype", "wide = type_of(dx).dtype", CASTS,
    ),
    # exports
    Fault(
        "export: an output is low", "rewrite/precision/write_casts.py",
        "graph.outputs[name] = writer.cast(value, types[name], None)",
        "graph.outputs[name] = value", LOW_FILES,
    ),
    Fault(
        "export: a weight that fp32 reads too is stored low", "train/low_export.py",
        "if held or not nodes or len(rows) + len(casts) < len(nodes):",
        "if held or not rows + casts:", LOW_FILES,
    ),
    Fault(
        "export: tables stay fp32", "train/low_export.py",
        'rows = [n for n in nodes if n.op_type == "Gather" and n.inputs[0] is value]',
        "rows = list[Node]()", LOW_FILES,
    ),
    Fault(
        "export: weights overflow", "train/low_export.py",
        "    if lost.any():\n", "    if False:\n", LOW_FILES,
    ),
    # verification
    Fault(
        "verify: mixed precision is not what is compared", "train/verify/step.py",
        "low = Compiler(target, disable, Journal(keep_stages=bisect), policy)",
        "low = Compiler(target, disable, Journal(keep_stages=bisect))", LOW_VERIFIED,
    ),
    Fault(
        "verify: eager PyTorch is not under autocast", "train/verify/engines.py",
        "with torch.autocast(self._device, self.low):", "with torch.enable_grad():", LOW_VERIFIED,
    ),
    Fault(
        "verify: fp32's run stands for autocast's", "train/verify/engines.py",
        '        vars(twin).pop("own", None)\n', "", LOW_VERIFIED,
    ),
    Fault(
        "verify: the Trainer's precision is not asked", "train/trainer_views.py",
        "policy = policy_of(self.options, host(self.device))", "policy = None", LOW_VERIFIED,
    ),
)  # fmt: skip
