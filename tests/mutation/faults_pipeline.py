"""Faults of pipelines: stages, schedules, messages."""

from __future__ import annotations

from fault import Fault

PIPES = ("distribute/test_pipelines.py",)
STAGES = ("distribute/test_pipeline_stages.py",)
SCHEDULES = ("distribute/test_pipeline_schedules.py",)
SHARES = ("distribute/test_pipelines_of_shares.py",)
POSITIONS = ("distribute/test_pipelines_of_positions.py",)
WEIGHTS = ("distribute/test_pipelines_of_weights.py",)
PARTS = ("distribute/test_pipelines_of_parts.py",)
GLOO = ("execute/test_exchanges.py",)
PREDICTED = ("meshes/test_mesh_predictions.py",)
CANDIDATES = ("meshes/test_mesh_candidates.py",)

PIPELINE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "pipeline: one stage's gradient of a tied weight is left out",
        "distribute/pipeline/sums.py",
        "total = of[rank] if total is None else b.Add(total, of[rank])", "total = of[rank]", PIPES,
    ),
    Fault(
        "pipeline: a tied weight counts twice in the norm", "distribute/pipeline/sums.py",
        "own.get(name, here) == here and ", "", PIPES,
    ),
    Fault(
        "pipeline: gradients are those of the last micro-batch", "distribute/pipeline/write.py",
        "wide if held is None else b.Add(held, wide)", "wide", PIPES,
    ),
    Fault(
        "pipeline: micro-batches have the same masks", "distribute/pipeline/write.py",
        "offset = b.Add(offset, b.squeeze(b.size(self.sizes[m][self.rows]), [0]))", "pass",
        PIPES,
    ),
    Fault(
        "pipeline: the labels of one micro-batch alone are counted", "differentiate/loss_sum.py",
        "    for divisor in divisors[1:]:\n", "    for divisor in divisors[1:1]:\n", PIPES,
    ),
    Fault(
        "pipeline: a message's wait is where it starts", "distribute/pipeline/write.py",
        "            and (action is None or starts[m.needed] < starts[action])\n", "",
        PIPES,
    ),
    Fault(
        "pipeline: messages are numbered whenever they are sent",
        "distribute/pipeline/messages.py", "return timeline.ends[sent], ", "return 0, ", STAGES,
    ),
    Fault(
        "pipeline: gradients of weights are waited for", "distribute/pipeline/partition.py",
        "            made.part[node] = Part.INPUT\n            makers",
        "            makers", STAGES,
    ),
    Fault(
        "pipeline: a backward is on no stage", "differentiate/reverse.py",
        "marks=handed_on(node))", "marks={})", (*STAGES, *PIPES),
    ),
    Fault(
        "pipeline: one forward more comes first", "distribute/pipeline/schedules.py",
        "first = min(micro_batches, ranks - 1 - rank)", "first = min(micro_batches, ranks - rank)",
        SCHEDULES,
    ),
    Fault(
        "pipeline: gradients of weights wait without end", "distribute/pipeline/schedules.py",
        "is_due = len(late[rank]) > rank", "is_due = False", SCHEDULES,
    ),
    Fault(
        "pipeline: cuts do not look at what is slow", "distribute/pipeline/stages.py",
        "                (max(slowest, pieces.cost(start, stop)), ",
        "                (slowest + pieces.cost(start, stop), ", STAGES,
    ),
    Fault(
        "pipeline: launches run ahead of their action", "plan/order.py",
        ' or node.meta.get("action", 0) > self._action', "", ("plan/test_collective_order.py",),
    ),
    Fault(
        "pipeline: messages of two ranks may come in any order", "distribute/pair_streams.py",
        "        if len(mine) <= len(theirs):\n", "        if False:\n", PIPES,
    ),
    Fault(
        "pipeline: the hash does not know the messages", "distribute/pipeline/messages.py",
        'return blake2b("\\n".join(lines).encode(), ', "return blake2b(b\"\", ", PIPES,
    ),
    Fault(
        "pipeline: a message is received under another number", "kernels/collective.py",
        'work = dist.irecv(args.y, source, group, int(args.attrs["sequence"]))',
        "work = dist.irecv(args.y, source, group, 0)", GLOO,
    ),
    Fault(
        "pipeline: gradients are added when their action ends", "distribute/pipeline/write.py",
        "for name in due.pop(node, ()):", "for name in ():", SHARES,
    ),
    Fault(
        "pipeline: exchanges are numbered in the order of the graph",
        "distribute/pipeline/numbers.py",
        "chained(nodes, sorted(numbered, key=sequence_of))", "chained(nodes, [])",
        SHARES,
    ),
    Fault(
        "pipeline: tied gradients are exchanged with each micro-batch",
        "distribute/pipeline/stage_records.py",
        "if maker is not None and value in maker.inputs:", "if False:", SHARES,
    ),
    Fault(
        "pipeline: a tied weight that is frozen is exchanged", "distribute/pipeline/sums.py",
        "if trained is None or name in trained", "if True", SHARES,
    ),
    Fault(
        "pipeline: samples are not summed over pipelines", "distribute/pipeline/stage_records.py",
        "    if all(mesh.size(axis) == 1 for axis in SUMMED_AXES):\n", "    if True:\n", SHARES,
    ),
    Fault(
        "pipeline: terms of positions are not summed", "distribute/pipeline/stage_records.py",
        "all(mesh.size(axis) == 1 for axis in SUMMED_AXES)", "mesh.batches == 1", POSITIONS,
    ),
    Fault(
        "pipeline: each rank sums the gradients of all positions in each micro-batch",
        "distribute/context.py", "in self._windows | self._summed_later", "in self._windows",
        POSITIONS,
    ),
    Fault(
        "pipeline: ranks along cp have whole sequences", "distribute/pipeline/__init__.py",
        "    graph = context_parallel(graph, mesh)\n", "", POSITIONS,
    ),
    Fault(
        "pipeline: messages are told by names of values", "distribute/pipeline/messages.py",
        """what = f"{maker.op_type} of {where(maker) or 'the step'}\"""", "what = self.value.name",
        POSITIONS,
    ),
    Fault(
        "pipeline: positions between the weights stay whole", "distribute/pipeline/__init__.py",
        "cuts=given, sequence=sequence)", "cuts=given)", PARTS,
    ),
    Fault(
        "pipeline: a stage reads its own part of a weight", "distribute/pipeline/stage_records.py",
        "held=parts, order=order", "order=order", WEIGHTS,
    ),
    Fault(
        "pipeline: an evaluation reads parts of weights", "distribute/pipeline/__init__.py",
        "gathered_ahead(made.graph, mesh, parts)", "made.graph", WEIGHTS,
    ),
    Fault(
        "pipeline: whole weights count twice in the norm along tp", "distribute/pipeline/sums.py",
        "(is_first or name in cuts)", "True", PARTS,
    ),
    Fault(
        "pipeline: a part that is not finite is one rank's alone", "distribute/pipeline/sums.py",
        'self._along_tp(b, broken, "gradients of parts that are not finite", "max")', "broken",
        PARTS,
    ),
    Fault(
        "pipeline: the parts of other stages are forgotten", "train/cut_tensors.py",
        "    if is_elsewhere(cut):\n        return (0,)\n", "", ("train/test_nested_cuts.py",),
    ),
    Fault(
        "pipeline: on paper a message is there at once", "meshes/replayed.py",
        "self._meetings = (*self._meetings, other)", "pass", PREDICTED,
    ),
    Fault(
        "pipeline: on paper a rank holds the weights of all stages", "meshes/on_paper.py",
        "{**shares, **dict.fromkeys(absent, 0.0)}", "dict(shares)", PREDICTED,
    ),
    Fault(
        "pipeline: on paper a batch has the rows of the example", "meshes/on_paper.py",
        "if rows != subject.batch.batch_size:", "if False:", PREDICTED,
    ),
    Fault(
        "pipeline: ranks with other batches share layers", "meshes/candidates.py",
        "limits.one_batch % size:\n            continue\n        for stages",
        "False:\n            continue\n        for stages", CANDIDATES,
    ),
    Fault(
        "pipeline: chosen beside what is refused there", "meshes/candidates.py",
        'allows({"pp": 2}, 0) and', "True and", CANDIDATES,
    ),
)  # fmt: skip

__all__ = ["PIPELINE_FAULTS"]
