"""Faults of many ranks: collectives, their order, and the lockstep evaluator."""

from __future__ import annotations

from fault import Fault

ORDER = ("plan/test_collective_order.py",)
HALVES = ("graph/test_collectives.py",)
LOCKSTEP = ("distribute/test_lockstep.py",)
ZERO = ("distribute/test_zero.py",)
GLOO = ("execute/test_exchanges.py",)
TRAINERS = ("train/test_ranks.py::test_a_window_a_checkpoint_and_what_ranks_do_differently",)
LOST = "faults/test_lost_ranks.py::test_the_others_end_and_name_the_rank_that_is_lost"
UNLIKE = ("faults/test_unlike_ranks.py",)

RANKS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "ranks: a collective that is ready does not wait for lower numbers", "plan/order.py",
        "            before.add(self._start)\n", "            pass\n", ORDER,
    ),
    Fault(
        "ranks: the graph's order of collectives wins over their numbers", "plan/order.py",
        "        before[later].add(earlier)\n", "        pass\n", ORDER,
    ),
    Fault(
        "ranks: a wait runs as early as it can", "plan/order.py",
        "            return node.op_type != WAIT  # starts run early, waits late\n",
        "            return True\n", ORDER,
    ),
    Fault(
        "ranks: a smaller plan runs a collective again", "plan/estimate.py",
        "found.shared | taped | joint", "found.shared | taped", ORDER,
    ),
    Fault(
        "ranks: the memory of an input is free before its exchange has ended",
        "graph/ops/collective.py",
        "return [] if start.op_type in IN_PLACE else list(start.inputs[:1])", "return []",
        (*ORDER, *HALVES),
    ),
    Fault(
        "ranks: a number is used twice", "graph/ops/collective.py",
        "        if number in numbers:\n", "        if False:\n", HALVES,
    ),
    Fault(
        "ranks: the hash does not see the axis", "plan/sequence.py",
        '_SAID = ("axis", "size", ', '_SAID = ("size", ', ORDER,
    ),
    Fault(
        "ranks: sums are in no stated order", "distribute/lockstep.py",
        "    total = xs[0].copy()\n    for x in xs[1:]:\n",
        "    total = xs[-1].copy()\n    for x in xs[-2::-1]:\n", LOCKSTEP,
    ),
    Fault(
        "ranks: all parts go to the first", "distribute/lockstep.py",
        "    return np.split(x, parts)[place]\n", "    return np.split(x, parts)[0]\n", LOCKSTEP,
    ),
    Fault(
        "ranks: different collectives meet", "distribute/lockstep.py",
        "            if other.terms != first.terms:\n", "            if False:\n", LOCKSTEP,
    ),
    Fault(
        "ranks: all ranks of the mesh meet, whatever the axis", "distribute/lockstep.py",
        "        return (*mesh.coordinates[:at], *mesh.coordinates[at + 1 :])\n",
        "        return ()\n", LOCKSTEP,
    ),
    Fault(
        "ranks: an axis of one rank has collectives", "distribute/collectives.py",
        "        if size == 1:\n", "        if size == 0:\n", LOCKSTEP,
    ),
    Fault(
        "ranks: a mean is a sum", "kernels/collective.py",
        "        if exchange.divisor > 1:\n", "        if False:\n", GLOO,
    ),
    Fault(
        "ranks: a decision is that of one rank", "execute/process_mesh.py",
        "        return all(row[0] for row in self.gathered(MeetingKind.DECISION, [int(value)]))\n",
        "        return value\n", GLOO,
    ),
    Fault(
        "ranks: each rank numbers its samples from 0", "train/ranks.py",
        "        return Share(sum(sizes[: self.mesh.rank]), sum(sizes))\n",
        "        return Share(0, sum(sizes))\n", TRAINERS,
    ),
    Fault(
        "ranks: a window counts the samples of one rank", "train/ranks.py",
        "        return Share(sum(sizes[: self.mesh.rank]), sum(sizes))\n",
        "        return Share(sum(sizes[: self.mesh.rank]), batch_size)\n", TRAINERS,
    ),
    Fault(
        "ranks: an update alone takes the mean over ranks", "train/prepared_steps.py",
        '            average = "labels" if by_labels else "micro_batches"\n',
        '            average = "micro_batches"\n', TRAINERS,
    ),
    Fault(
        "ranks: a resumed rank has the sums of rank 0", "train/checkpointing.py",
        '            optimizer = {**state["optimizer"], **own.pop(_SUMS)}\n',
        '            optimizer = {**own.pop(_SUMS), **state["optimizer"]}\n', TRAINERS,
    ),
    Fault(
        "ranks: weights are not compared", "train/ranks.py",
        'facts[f"the value of {name}"] = digest(tensor)\n',
        'facts[f"the value of {name}"] = ""\n', TRAINERS,
    ),
    Fault(
        "ranks: every rank counts the norm of a whole gradient", "distribute/zero.py",
        "[is_first or name in shards for name in order]", "[True for name in order]", ZERO,
    ),
    Fault(
        "ranks: a rank looks for what is not finite in its own parts", "distribute/zero.py",
        "replaced(graph, identity, b.Equal(found, 0))", "replaced(graph, identity, finite)", ZERO,
    ),
    Fault(
        "ranks: each part draws the random bits of the first", "distribute/zero.py",
        'ir.AttrInt64("first", shards[name].start)', 'ir.AttrInt64("first", 0)', ZERO,
    ),
    Fault(
        "ranks: a parameter's last part is as long as the others", "distribute/zero.py",
        "    if shard.size < shard.length:\n", "    if False:\n", ZERO,
    ),
    Fault(
        "ranks: parts are gathered beside the parameter", "plan/storages.py",
        "following = result if node.op_type not in STARTS else wait_of(node).outputs[out]",
        "following = result", ZERO,
    ),
    Fault(
        "ranks: an update waits for what reads it", "plan/order.py",
        "            if n not in self._late\n", "            if n not in self._updates\n", ZERO,
    ),
    Fault(
        "ranks: whole state is taken as a part", "train/optimizer_state.py",
        "                    tensor = self.shards.cut(p, tensor)\n", "", TRAINERS,
    ),
    Fault(
        "ranks: an exchange waits for the half hour of torch", "execute/process_mesh.py",
        "dist.new_subgroups_by_enumeration(ranks, timeout=timeout)",
        "dist.new_subgroups_by_enumeration(ranks)", (f"{LOST}[stopped in a step]",),
    ),
    Fault(
        "ranks: a rank that has failed tells nobody", "train/ranks.py",
        "                self.mesh.leave(error)\n", "                pass\n",
        (f"{LOST}[failed in a step]",),
    ),
    Fault(
        "ranks: a rank that is away does not tell where it is", "execute/rank_watch.py",
        '            self.records.tell("away", {"seconds": seconds, "at": at})\n', "",
        (f"{LOST}[hung in its loader]",),
    ),
    Fault(
        "ranks: a process that is stopped is taken for a busy one", "execute/rank_records.py",
        'return "is stopped" if letter in "Tt" else ""', 'return ""',
        (f"{LOST}[stopped before the first step]",),
    ),
    Fault(
        "ranks: what an exchange brings is looked at before it has come",
        "explanation/nonfinite.py",
        "        if launch.op in STARTS:  # its results", "        if False:  # its results",
        UNLIKE,
    ),
    Fault(
        "ranks: a flag that ranks have exchanged hides the origin", "explanation/nonfinite.py",
        "            todo += wrote[: bisect_left(wrote, number)][-1:]\n",
        "            pass\n", UNLIKE,
    ),
    Fault(
        "ranks: options are not compared", "train/ranks.py",
        "repr(getattr(options, field.name))", '""', UNLIKE,
    ),
)  # fmt: skip
