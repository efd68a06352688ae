"""Faults of pipelines: stages, schedules, messages."""

from __future__ import annotations

from fault import Fault

PIPES = ("distribute/test_pipelines.py",)
STAGES = ("distribute/test_pipeline_stages.py",)
SCHEDULES = ("distribute/test_pipeline_schedules.py",)
GLOO = ("execute/test_exchanges.py",)

PIPELINE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "pipeline: one stage's gradient of a tied weight is left out",
        "distribute/pipeline/sums.py",
        "total = of[rank] if total is None else b.Add(total, of[rank])", "total = of[rank]", PIPES,
    ),
    Fault(
        "pipeline: a tied weight counts twice in the norm", "distribute/pipeline/sums.py",
        "[own.get(name, here) == here for name in order]", "[True for name in order]", PIPES,
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
        ' or node.meta.get("action", 0) > self._action', "", PIPES,
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
)  # fmt: skip

__all__ = ["PIPELINE_FAULTS"]
