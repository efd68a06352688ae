"""Faults of many ranks: collectives, their order, and the lockstep evaluator."""

from __future__ import annotations

from fault import Fault

ORDER = ("plan/test_collective_order.py",)
HALVES = ("graph/test_collectives.py",)
LOCKSTEP = ("distribute/test_lockstep.py",)
ADASUM = ("distribute/test_adasum.py",)
ZERO = ("distribute/test_zero.py",)
GATHERS = ("distribute/test_parameter_gathers.py",)
PARTS = ("train/test_parameter_parts.py",)
PIPES = ("distribute/test_pipeline.py",)
STAGES = ("distribute/test_pipeline_stages.py",)
SCHEDULES = ("distribute/test_pipeline_schedules.py",)
GLOO = ("execute/test_exchanges.py",)
TENSOR = ("distribute/test_tensor_models.py",)
TENSOR_RULES = ("distribute/test_tensor_rules.py",)
FIRSTS = ("kernels/test_kernels.py",)
TRAINERS = ("train/test_ranks.py::test_a_window_a_checkpoint_and_what_ranks_do_differently",)
HF_TRAINER = (
    "integrations/test_trainer_ranks.py::test_two_processes_are_the_stock_trainer_with_ddp",
)
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
        "return node.op_type != WAIT and not attributes", "return not attributes", ORDER,
    ),
    Fault(
        "ranks: a smaller plan runs a collective again", "plan/estimate.py",
        "found.shared | taped | joint", "found.shared | taped", ORDER,
    ),
    Fault(
        "ranks: the memory of an input is free before its exchange has ended",
        "graph/ops/collective.py",
        "return [] if start.op_type in IN_PLACE or start.op_type == RECEIVE else "
        "list(start.inputs[:1])", "return []",
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
        "        return Share(before, sum(sizes.values()))\n",
        "        return Share(0, sum(sizes.values()))\n", TRAINERS,
    ),
    Fault(
        "ranks: a window counts the samples of one rank", "train/ranks.py",
        "        return Share(before, sum(sizes.values()))\n",
        "        return Share(before, batch_size)\n", TRAINERS,
    ),
    Fault(
        "ranks: an update alone takes the mean over ranks", "train/prepared_steps.py",
        '            average = "labels" if by_labels else "micro_batches"\n',
        '            average = "micro_batches"\n', TRAINERS,
    ),
    Fault(
        "ranks: a resumed rank has the sums of rank 0", "train/checkpointing.py",
        '            optimizer = {**kept, **own.pop(_SUMS)}\n',
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
        "ranks: dot products are those of one rank's half", "distribute/adasum.py",
        "        total = b.Add(total, other)\n", "", ADASUM,
    ),
    Fault(
        "ranks: a gradient of norm 0 makes NaN", "distribute/adasum.py",
        "b.Where(is_zero, 0.0, b.Div(product, twice))",
        "b.Div(product, b.Mul(square, 2.0))", ADASUM,
    ),
    Fault(
        "ranks: rows are left in the order of the ranks", "distribute/adasum.py",
        "    rows = gathered if ranks == 2 else b.Gather(gathered, b.ints(order), axis=0)\n",
        "    rows = gathered\n", ADASUM,
    ),
    Fault(
        "ranks: a replica's gradient is weighed by the labels of all", "distribute/adasum.py",
        "        rows = [b.Mul(row, factor) for row, factor in zip(rows, by, strict=True)]\n",
        "", ADASUM,
    ),
    Fault(
        "ranks: a window counts the labels of the last micro-batch",
        "differentiate/update/average_labels.py",
        'early.Add(held["replica_labels"], local_sum(gradients, early, "replica_labels", own))',
        'local_sum(gradients, early, "replica_labels", own)', ADASUM,
    ),
    Fault(
        "ranks: partners at a distance are neighbours", "distribute/lockstep.py",
        '[x] = xs[place ^ int(attrs["distance"])]', "[x] = xs[place ^ 1]", ADASUM,
    ),
    Fault(
        "ranks: whole state is taken as a part", "train/optimizer_state.py",
        "                    tensor = self.shards.cut(p, tensor)\n", "", TRAINERS,
    ),
    Fault(
        "ranks: a gathered weight stays for all readers", "distribute/parameter_gathers.py",
        "        while len(alive) > 1 and sum(map(sources.nbytes, alive)) > kept:\n",
        "        while False:\n", GATHERS,
    ),
    Fault(
        "ranks: weights start to be gathered as early as they can", "plan/order.py",
        'return node.op_type != WAIT and not attributes(node).get("placed")',
        "return node.op_type != WAIT", GATHERS,
    ),
    Fault(
        "ranks: the padding of a weight is not cut off", "distribute/parameter_gathers.py",
        "    if shard.padding:\n", "    if False:\n", GATHERS,
    ),
    Fault(
        "ranks: collectives keep the numbers that they were made with", "distribute/zero.py",
        "        number_in_order(graph)\n", "        pass\n", (*GATHERS, *TRAINERS),
    ),
    Fault(
        "ranks: a rank keeps the part of the first", "train/cut_tensors.py",
        "whole.reshape(-1)[start:stop]", "whole.reshape(-1)[: stop - start]", PARTS,
    ),
    Fault(
        "ranks: parts along a dim are the first rank's", "train/cut_tensors.py",
        "cut.ranges(whole.shape[dim])]", "cut.ranges(whole.shape[dim], 0)]", PARTS,
    ),
    Fault(
        "ranks: ranks along tp may have other batches", "train/ranks.py",
        "            if batch != other:\n", "            if False:\n", PARTS,
    ),
    Fault(
        "ranks: state that was whole stays so", "train/optimizer_state.py",
        "held[slot] = part_of(cut, tensor).clone()", "pass", PARTS,
    ),
    Fault(
        "ranks: a model shows its state without its weights", "train/parameter_parts.py",
        "        if not self._is_open:\n", "        if False:\n", PARTS,
    ),
    Fault(
        "ranks: weights that were replaced are not missed", "train/parameter_parts.py",
        "            self.require_parts()\n            return\n", "            return\n", PARTS,
    ),
    Fault(
        "ranks: a load that fails leaves empty weights", "train/state.py",
        "            close()\n", "", PARTS,
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
        "        ids = b.Where(b.Less(ids, np.array(0, dtype)), past, ids)\n",
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
        "split(after.start + k, size // (ranks * stride // tail))",
        "split(after.start + k, found.groups)", TENSOR_RULES,
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
        "self._conversion(value, sharding, REPLICATED) if sums else 0.0",
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
        "ranks: new collectives are numbered last", "distribute/collectives.py",
        "in enumerate(starts, 1):\n        for node",
        "in list[tuple[int, Node]]():\n        for node",
        ("distribute/test_tensor_models.py::test_every_rank_plans_the_same_exchanges",),
    ),
    Fault(
        "ranks: heads are counted from 0 in a kernel", "kernels/native/attention.py",
        '"first_head": int(args.attrs.get("first_head", 0)),',
        '"first_head": 0,', FIRSTS,
    ),
    Fault(
        "ranks: features are counted from 0 in a kernel", "kernels/native/random.py",
        'int(args.attrs.get("first_feature", 0))',
        "0", FIRSTS,
    ),
    Fault(
        "ranks: labels of all processes divide a loss that counts as one process's",
        "integrations/trainer_ranks.py",
        "return float(accelerator.num_processes) if is_shared else 1.0", "return 1.0", HF_TRAINER,
    ),
    Fault(
        "ranks: each process of transformers' Trainer begins with its own weights",
        "integrations/trainer_ranks.py",
        "        distributed.broadcast(tensor, 0)\n", "        pass\n", HF_TRAINER,
    ),
    Fault(
        "ranks: every process trains the rows of the first", "recipes/run_ranks.py",
        "part.split(size)[self.rank]", "part.split(size)[0]",
        ("recipes/test_finetune_ranks.py::test_each_rank_takes_its_own_rows_of_each_micro_batch",),
    ),
    Fault(
        "ranks: a process that is told to stop does so alone", "recipes/loop.py",
        "ranks.largest(signals.stopping or 0) or None", "signals.stopping",
        ("recipes/test_finetune_ranks.py::test_two_processes_are_one_with_twice_the_batch",),
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
        "if launch.op in STARTS:  # its results", "if False:  # its results", UNLIKE,
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
