"""Faults of many ranks: collectives, their order, the lockstep evaluator, what ranks hold and agree
upon."""

from __future__ import annotations

from fault import Fault

ORDER = ("plan/test_collective_order.py",)
HALVES = ("graph/test_collectives.py",)
LOCKSTEP = ("distribute/test_lockstep.py",)
ADASUM = ("distribute/test_adasum.py",)
ZERO = ("distribute/test_zero.py",)
GATHERS = ("distribute/test_parameter_gathers.py",)
PARTS = ("train/test_parameter_parts.py",)
GLOO = ("execute/test_exchanges.py",)
TENSOR = ("distribute/test_tensor_models.py",)
CONTEXT = ("distribute/test_context.py",)
STATES = ("train/test_rank_states.py",)
TORCHS = ("checkpoint/test_torch_checkpoint.py",)
LABELS = ("differentiate/test_label_inputs.py",)
EMPTY = ("train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch[uneven rows-2]",)
BOTH = ("distribute/test_zero_of_parts.py",)
FIRSTS = ("kernels/test_kernels.py",)
TRAINERS = ("train/test_ranks.py::test_a_window_a_checkpoint_and_what_ranks_do_differently",)
HF_TRAINER = (
    "integrations/test_trainer_ranks.py::test_two_processes_are_the_stock_trainer_with_ddp",
)
LOST = "faults/test_lost_ranks.py::test_the_others_end_and_name_the_rank_that_is_lost"
UNLIKE = ("faults/test_unlike_ranks.py",)
PREDICTED = ("meshes/test_mesh_predictions.py",)
CHOSEN = ("meshes/test_mesh_choice.py",)
CANDIDATES = ("meshes/test_mesh_candidates.py",)
AUTO = ("meshes/test_auto_mesh.py",)
FSDP = ("integrations/test_fsdp.py",)
FOUR = ("distribute/test_grids.py::test_four_ranks",)
ROWS = ("distribute/test_grids.py::test_state_in_rows",)
ON_PARTS = ("distribute/test_exchanges_on_parts.py",)
POSITIONS = ("distribute/test_sequence_parallel.py::test_exchanges_of_a_layer",)

AWAY = "train/test_offloaded_state.py::test_"

RANKS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "ranks: a collective that is ready does not wait for lower numbers", "plan/order.py",
        "            before.add(self._start)\n", "            pass\n", ORDER,
    ),
    Fault(
        "ranks: the graph's order of collectives wins over their numbers", "graph/chains.py",
        "        before[later].add(earlier)\n", "        pass\n", ORDER,
    ),
    Fault(
        "ranks: a wait runs as early as it can", "plan/order.py",
        "return node.op_type != WAIT and not attributes", "return not attributes", ORDER,
    ),
    Fault(
        "ranks: a smaller plan runs a collective again", "plan/estimate.py",
        "shown_late | found.shared | taped", "shown_late | taped", ORDER,
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
        "ranks: a resumed rank has the sums of rank 0", "train/rank_states.py",
        "            own = saved.states[self._mesh.rank]\n            replica",
        "            own = saved.states[0]\n            replica", STATES,
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
        "replace_record(graph, identity, b.Equal(found, 0))",
        "replace_record(graph, identity, finite)", ZERO,
    ),
    Fault(
        "ranks: each part draws the random bits of the first", "distribute/zero.py",
        '"first", 0)) + shards[name].start', '"first", 0))', (*ZERO, *BOTH),
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
        "tensor if is_cut else self.shards.cut(p, tensor)", "tensor", TRAINERS,
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
        "ranks: collectives keep the numbers that they were made with", "distribute/__init__.py",
        "    if parts or mesh.size(", "    if mesh.size(", (*GATHERS, *TRAINERS),
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
        "ranks: state that was whole is forgotten", "train/optimizer_state.py",
        "        self.adopt(whole)\n        for p", "        for p", (*STATES, *PARTS),
    ),
    Fault(
        "ranks: parts of state are in the blocks of the whole", "train/optimizer_state.py",
        "parts = {slot: self.shards.cut(parameter, shown(tensors, given, slot)) for slot in slots}",
        "parts = {slot: shown(tensors, given, slot) for slot in slots}", STATES,
    ),
    Fault(
        "ranks: every rank takes the total of a window", "train/rank_states.py",
        "is_holder = is_first and not any(map(self._mesh.coordinate, axes))", "is_holder = True",
        STATES,
    ),
    Fault(
        "ranks: one rank alone takes a mean", "train/rank_states.py",
        "(set(DATA_AXES) if is_mean else", "(set(DATA_AXES) if False else", STATES,
    ),
    Fault(
        "ranks: ranks along tp count a sum twice", "train/rank_states.py",
        'if mesh.coordinate("tp") and "dim" not in kinds:', "if False:", STATES,
    ),
    Fault(
        "ranks: parts along dp_shard are terms of a mean", "train/rank_states.py",
        'terms = 1 if "row" in kinds else mesh.batches', "terms = mesh.batches", STATES,
    ),
    Fault(
        "ranks: rows that all replicas have are added up", "train/rank_states.py",
        '(mesh.coordinate("dp_replicate") or mesh.coordinate("cp")):',
        '(False or mesh.coordinate("cp")):', STATES,
    ),
    Fault(
        "ranks: a part is added where the first rank's lies", "train/cut_tensors.py",
        'cut = TensorCut("tp", ranks, place,', 'cut = TensorCut("tp", ranks, 0,', STATES,
    ),
    Fault(
        "ranks: sums of replicas have a total", "train/rank_states.py",
        "        if self._adaptive or saved.adaptive:\n", "        if False:\n", STATES,
    ),
    Fault(
        "ranks: a loader goes on where another one was", "train/rank_states.py",
        "            self._check_registered(saved)\n", "            pass\n", STATES,
    ),
    Fault(
        "ranks: shares that are new draw alike", "train/rank_states.py",
        'share.to_bytes(8, "little")', '(0).to_bytes(8, "little")', STATES,
    ),
    Fault(
        "ranks: state without moments is loaded", "train/state.py",
        'if state["updates"] and not counts and', "if False and", TORCHS,
    ),
    Fault(
        "ranks: labels of rows that stand in count", "train/empty_shares.py",
        "        number = numbers.get(id(leaf))\n", "        number = None\n", EMPTY,
    ),
    Fault(
        "ranks: rows that stand in are samples", "train/trainer.py",
        "size = 0 if is_empty else batch.batch_size", "size = batch.batch_size", EMPTY,
    ),
    Fault(
        "ranks: a contrastive loss over shares is that of the batch",
        "differentiate/mixed_samples.py",
        "    if _power(product(type_of(node.outputs[0]).shape), symbol) > 1:", "    if False:",
        ("differentiate/test_mixed_samples.py",),
    ),
    Fault(
        "ranks: ids are taken for labels", "differentiate/label_inputs.py",
        "        if _is_read_as_ids(value):\n", "        if False:\n", LABELS,
    ),
    Fault(
        "ranks: labels that are padded with others are ignored", "differentiate/label_inputs.py",
        "if array is None or (array != ignored).any():\n                    return",
        "if False:\n                    return", LABELS,
    ),
    Fault(
        "ranks: the order of norms is that of exchanges", "distribute/__init__.py",
        "zero(graph, mesh, here, average, summed, parts, order)",
        "zero(graph, mesh, here, average, summed, parts)", BOTH,
    ),
    Fault(
        "ranks: gradients are exchanged where they are read", "distribute/data_parallel.py",
        "        hoist_gradients(graph, gradients)\n", "", (*BOTH, *TENSOR),
    ),
    Fault(
        "ranks: rows of a part begin with the first rank's", "distribute/zero.py",
        'int(attributes(node).get("first", 0)) + shards', "shards", BOTH,
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
        "ranks: gradients of other positions are left out", "mesh_sizes.py",
        'SUMMED_AXES = ("cp", *DATA_AXES)', "SUMMED_AXES = DATA_AXES", CONTEXT,
    ),
    Fault(
        "ranks: gradients are means over ranks with parts of one mean",
        "distribute/data_parallel.py",
        'return by if axis in DATA_AXES else "sum"', "return by", CONTEXT,
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
        "return float(mesh.batches) if is_shared else 1.0",
        "return 1.0",
        HF_TRAINER,
    ),
    Fault(
        "ranks: each process of transformers' Trainer begins with its own weights",
        "integrations/trainer_ranks.py",
        "        distributed.broadcast(tensor, 0)\n", "        pass\n", HF_TRAINER,
    ),
    Fault(
        "ranks: every process trains the rows of the first",
        "recipes/run_ranks.py",
        "first = size * mesh.share",
        "first = 0",
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
        "ranks: a mesh may fill all of the memory", "meshes/choice.py",
        "_USABLE = 0.9", "_USABLE = 1.0", CHOSEN,
    ),
    Fault(
        "ranks: any mesh that is faster wins over the usual one", "meshes/choice.py",
        "MARGIN = 0.05", "MARGIN = 0.0", CHOSEN,
    ),
    Fault(
        "ranks: a mesh that fits in graphs is not looked for", "meshes/choice.py",
        "        for other in rest[:_MORE]:\n", "        for other in rest[:0]:\n", CHOSEN,
    ),
    Fault(
        "ranks: the rank with most memory decides", "train/mesh_choice.py",
        'least = min(float(one["memory"])', 'least = max(float(one["memory"])', AUTO,
    ),
    Fault(
        "ranks: weights on paper are whole under stage 3", "meshes/on_paper.py",
        "if n in alone} if candidate.zero == 3 else {}", "if n in alone} if False else {}",
        PREDICTED,
    ),
    Fault(
        "ranks: on paper nobody waits for an exchange", "meshes/replayed.py",
        "line.wait(started[number])", "pass", PREDICTED,
    ),
    Fault(
        "ranks: a predicted window has two micro-batches", "meshes/predict.py",
        "cluster)] * more", "cluster)]", PREDICTED,
    ),
    Fault(
        "ranks: on paper ranks along tp have the batch of one", "meshes/predict.py",
        "return self.subject.batch.batch_size * candidate.ranks // candidate.batches",
        "return self.subject.batch.batch_size", PREDICTED,
    ),
    Fault(
        "ranks: a reduce-scatter that is an all-reduce sends half of one", "meshes/replayed.py",
        "kind == kinds.REDUCE_SCATTER and not self._cluster.scatters", "False", PREDICTED,
    ),
    Fault(
        "ranks: weights are shared by ranks with other batches", "meshes/candidates.py",
        "if size == 1 or size > limits.one_batch or limits.one_batch % size:", "if size == 1:",
        CANDIDATES,
    ),
    Fault(
        "ranks: a group with one batch speaks for smaller ones", "train/mesh_choice.py",
        "return gcd(*runs)", "return max(runs)", CANDIDATES,
    ),
    Fault(
        "ranks: shards of FSDP stay gathered behind an evaluation", "module/gathered_shards.py",
        "    if for_backward:\n", "    if True:\n", FSDP,
    ),
    Fault(
        "ranks: blocks are in shards, the model is not, and it is let pass",
        "module/gathered_shards.py",
        "        if len(self._inner) == len(self._modules):\n", "        if False:\n", FSDP,
    ),
    Fault(
        "ranks: FSDP's casts of parameters are let pass", "module/gathered_shards.py",
        "            if any((policy.param_dtype, policy.output_dtype)):\n",
        "            if False:\n", FSDP,
    ),
    Fault(
        "ranks: a scattered sum is the part of another rank", "kernels/collective.py",
        "exchange.whole.view(-1, y.numel())[exchange.part]",
        "exchange.whole.view(-1, y.numel())[exchange.part - 1]", GLOO,
    ),
    Fault(
        "ranks: a buffer of an exchange is given back before it has ended", "kernels/collective.py",
        "        place = dist.get_rank(group)\n",
        "        place = dist.get_rank(group)\n        _ranks(args).give_back(whole)\n", GLOO,
    ),
    Fault(
        "ranks: small tensors beside large ones are left out", "kernels/collective.py",
        "    if together:\n", "    if together and not alone:\n", GLOO,
    ),
    Fault(
        "ranks: two ranks gather without their own part", "kernels/collective.py",
        "            own.copy_(x.reshape(-1))\n", "            pass\n", GLOO,
    ),
    Fault(
        "ranks: on paper Gloo exchanges without copies", "meshes/predict.py",
        "if copies_are_made else 0", "if False else 0", PREDICTED,
    ),
    Fault(
        "ranks: terms of a sum are the largest of largest ones",
        "distribute/tensor/rules/collective.py",
        '_COMMUTES = {SUM: ("sum", "mean"),', '_COMMUTES = {SUM: ("sum", "mean", "max"),', ON_PARTS,
    ),
    Fault(
        "ranks: parts that an exchange cuts are taken for parts beside it",
        "distribute/tensor/rules/collective.py",
        "    if found.dim or (found == PARTIAL and is_sum):\n",
        "    if found.dim is not None or (found == PARTIAL and is_sum):\n", ON_PARTS,
    ),
    Fault(
        "ranks: a wait reads what its start does not", "distribute/tensor/solve.py",
        "    return Way((*start.outputs, *start.inputs[:held]), start.outputs)\n",
        "    return Way(tuple(REPLICATED for _ in node.inputs), start.outputs)\n",
        (*ON_PARTS, *FOUR),
    ),
    Fault(
        "ranks: heads along cp are those of the first rank along tp",
        "distribute/tensor/rules/attention.py",
        "first_head=before + heads * place.at)", "first_head=heads * place.at)", FOUR,
    ),
    Fault(
        "ranks: parts of gradients are not summed along cp", "distribute/data_parallel.py",
        "            if first[i] != axis\n",
        "            if first[i] != axis and axis != \"cp\"\n", (*ROWS, *CONTEXT),
    ),
    Fault(
        "ranks: rows of a window's sums are terms along cp", "distribute/context.py",
        "[name for name in signature.accumulators if name not in summed]",
        "list(signature.accumulators)", ROWS,
    ),
    Fault(
        "ranks: saved rows count once for each rank along cp", "train/rank_states.py",
        'and (mesh.coordinate("dp_replicate") or mesh.coordinate("cp")):',
        'and mesh.coordinate("dp_replicate"):', STATES,
    ),
    Fault(
        "ranks: the first replica alone goes on from rows", "train/rank_states.py",
        "        axes = axes if row_of(cut) is None else set[str]()\n", "", STATES,
    ),
    Fault(
        "ranks: backward keeps the rows that forward has gathered", "distribute/tensor/sequence.py",
        "        found.gathers_again = True\n", "", POSITIONS,
    ),
    Fault(
        "ranks: terms are added up on every rank alike", "distribute/tensor/sequence.py",
        "(*map(split, places), *sorted", "(*[], *sorted", POSITIONS,
    ),
    Fault(
        "ranks: a weight that is cut is gathered for fewer bytes", "distribute/tensor/sequence.py",
        "        if have.dim is not None and want != have and (value in self._of_weights or",
        "        if have.dim is not None and want != have and (", POSITIONS,
    ),
    Fault(
        "offloaded: an update with a number of the whole is made in parts", "plan/offloaded.py",
        "n <= PART or sizes != {n} or not", "n <= PART or not",
        (f"{AWAY}only_updates_of_large_parameters_are_made_in_parts",),
    ),
    Fault(
        "offloaded: a part draws the numbers of the first", "execute/offloaded.py",
        'int(attrs.get("first", 0)) + elements.start', 'int(attrs.get("first", 0))',
        (f"{AWAY}a_part_of_a_rank_draws_the_numbers_of_its_elements",),
    ),
    Fault(
        "offloaded: memory that is no file is released", "execute/state_store.py",
        'x.device.type != "cpu" or x.untyped_storage().data_ptr() not in self._mapped',
        'x.device.type != "cpu"', (f"{AWAY}a_release_of_memory_that_is_no_file_changes_nothing",),
    ),
    Fault(
        "offloaded: a device keeps what it has updated", "execute/state_store.py",
        "                home.copy_(place, non_blocking=True)\n", "                pass\n",
        (f"{AWAY}a_device_gets_its_state_in_a_stage_and_gives_it_back",),
    ),
    Fault(
        "offloaded: no room is set aside", "execute/state_store.py",
        "                os.posix_fallocate(file.fileno(), 0, nbytes)\n",
        "                os.truncate(file.fileno(), nbytes)\n",
        (f"{AWAY}the_error_of_a_full_disk_says_what_is_free",),
    ),
    Fault(
        "offloaded: a plan counts all state as its own", "plan/placement.py",
        "region = MemoryRegion.OFFLOADED if value.name in away else _region(value)",
        "region = _region(value)", (f"{AWAY}an_explanation_counts_a_part_and_names_the_rest",),
    ),
    Fault(
        "offloaded: a tensor that is saved stays in memory", "checkpoint/tensor_file.py",
        "                    written([held])\n            held = bytes_",
        "                    pass\n            held = bytes_",
        (f"{AWAY}memory_falls_by_the_moments",),
    ),
    Fault(
        "offloaded: memory keeps each part behind its update", "execute/offloaded.py",
        "            store.release([home for home, _ in (*part.read, *part.written)])\n",
        "            pass\n", (f"{AWAY}memory_falls_by_the_moments",),
    ),
    Fault(
        "ranks: on paper state beside tp is parts of whole weights", "meshes/on_paper.py",
        "_part_of(shapes[name], ranks, *cut)", "shapes[name]", PREDICTED,
    ),
    Fault(
        "ranks: on paper no rank owns a parameter", "meshes/on_paper.py",
        "owner=owners.get(name)", "owner=None", PREDICTED,
    ),
    Fault(
        "ranks: on paper positions between weights are whole", "meshes/on_paper.py",
        "sequence=candidate.sequence", "sequence=False", PREDICTED,
    ),
    Fault(
        "ranks: counts of sequences in parts are those of whole ones", "meshes/counts.py",
        'shared.memory["activations"] / ranks}\n    return _Shared(',
        'shared.memory["activations"]}\n    return _Shared(', PREDICTED,
    ),
)  # fmt: skip

__all__ = ["RANKS_FAULTS"]
