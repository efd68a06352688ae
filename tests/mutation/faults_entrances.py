"""Faults of what leads to runs on many ranks, and of what ranks hold there: the command line,
transformers' Trainer, owners of updates, averaged weights, numbers out of range."""

from __future__ import annotations

from fault import Fault

ZERO = "distribute/test_zero.py"
_DEVICES = ("recipes/test_devices.py",)
_FINETUNE = "recipes/test_finetune_ranks.py::"
FINETUNE = (f"{_FINETUNE}test_ranks_along_other_axes_have_the_rows_of_their_share",)
UPDATES = (f"{_FINETUNE}test_runs_are_the_same_where_their_updates_have_the_same_rows",)
FINETUNES = (f"{_FINETUNE}test_ranks_with_one_share_read_the_same_rows",)
SHARED = ("integrations/test_trainer_ranks.py::test_processes_take_the_batches_of_their_share",)
ITEMS = ("integrations/test_trainer_ranks.py::test_numbers_of_items_count_each_batch_once",)
HF_PARTS = (
    "integrations/test_trainer_ranks.py::"
    "test_parts_of_the_model_are_the_stock_trainer_of_one_process",
)
OWNERS = (
    f"{ZERO}::test_owners_make_updates_of_whole_parameters",
    f"{ZERO}::test_a_rank_that_owns_nothing_writes_what_it_is_sent",
)
AVERAGES = ("train/test_parameter_parts.py::test_averages_of_parts",)
IN_RANGE = ("kernels/test_in_range.py",)

ENTRANCE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "finetune: all processes take the first GPU",
        "recipes/devices.py",
        'torch.device("cuda", number)',
        'torch.device("cuda", 0)',
        _DEVICES,
    ),
    Fault(
        "finetune: a GPU is taken where the CPU was asked for",
        "recipes/devices.py",
        "if config.use_cpu or not",
        "if not",
        _DEVICES,
    ),
    Fault(
        "a batch with tensors on a device is moved",
        "prepare/batch.py",
        ' or any(t.device.type != "cpu" for t in self.tensors)',
        "",
        _DEVICES,
    ),
    Fault(
        "signals: an import may be interrupted",
        "import_signals.py",
        'if frame.f_code.co_filename.startswith("<frozen importlib"):',
        "if frame is None:",
        ("test_import_signals.py::test_the_process_ends_within_an_import",),
    ),
    Fault(
        "finetune: ranks along tp take rows of their own",
        "recipes/run_ranks.py",
        "first = size * mesh.share",
        "first = size * (self.rank % mesh.batches)",
        FINETUNE,
    ),
    Fault(
        "finetune: ranks along tp all count an evaluated batch",
        "recipes/run_ranks.py",
        "yield min(place, count - 1), is_told and place < count",
        "yield min(place, count - 1), place < count",
        FINETUNE,
    ),
    Fault(
        "finetune: ranks with parts of weights evaluate alone",
        "recipes/run_ranks.py",
        "        if not self.has_parts:\n",
        "        if True:\n",
        FINETUNE,
    ),
    Fault(
        "finetune: an update's rows are those of one process",
        "recipes/run_folder.py",
        "return size * times * shares_of(mesh)",
        "return size * times",
        UPDATES,
    ),
    Fault(
        "finetune: a rank saves its own times",
        "recipes/run_checkpoints.py",
        "return self._ranks.from_first(self._own)",
        "return self._own()",
        FINETUNES,
    ),
    Fault(
        "transformers: processes along tp take batches of their own",
        "integrations/trainer_ranks.py",
        "sampler.num_processes, sampler.process_index = mesh.batches, mesh.share",
        "sampler.num_processes = mesh.batches",
        SHARED,
    ),
    Fault(
        "transformers: the last batch of one share is filled",
        "integrations/trainer_ranks.py",
        "        sampler.even_batches = False\n",
        "        pass\n",
        SHARED,
    ),
    Fault(
        "transformers: items are counted once by each process",
        "integrations/trainer_ranks.py",
        "copies = copies_of_batches(mesh) if is_counted else 1",
        "copies = 1",
        ITEMS,
    ),
    Fault(
        "transformers: the model stays in parts to be evaluated",
        "integrations/transformers.py",
        "    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:\n"
        "        self._make_whole()\n",
        "    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:\n",
        HF_PARTS,
    ),
    Fault(
        "owners: another rank's weight is sent",
        "distribute/owned_updates.py",
        "root=int(shard.owner or 0), update=1",
        "root=0, update=1",
        OWNERS,
    ),
    Fault(
        "owners: the weight's part stands for the whole",
        "distribute/owned_updates.py",
        "            node.replace_input_with(0, whole(1))\n",
        "            node.replace_input_with(0, whole(0))\n",
        OWNERS,
    ),
    Fault(
        "owners: a weight that is written alone has no memory",
        "plan/planner.py",
        "kept = {*self.graph.output_values(), *self.graph.state.values()}",
        "kept = self.graph.output_values()",
        OWNERS,
    ),
    Fault(
        "owners: an update that is left out is exchanged by ranks without one",
        "plan/planner.py",
        "return shared or any(",
        "return any(",
        OWNERS,
    ),
    Fault(
        "averages: a whole average stays beside a part",
        "train/averaged_weights.py",
        "            if cut is not None and average.cut is None:\n",
        "            if False:\n",
        AVERAGES,
    ),
    Fault(
        "averages: own numbers are lost where a step cuts weights",
        "train/averaged_weights.py",
        "            own, average.tensor, average.cut = average.tensor, held.clone(), cut\n",
        "            own, average.tensor, average.cut = held.clone(), held.clone(), cut\n",
        AVERAGES,
    ),
    Fault(
        "ids: the first number beyond a table passes",
        "kernels/aten/data.py",
        "bad = (flat >= limit)",
        "bad = (flat > limit)",
        IN_RANGE,
    ),
    Fault(
        "ids: a number that is ignored is refused",
        "kernels/aten/data.py",
        "            bad &= flat != ignored\n",
        "            pass\n",
        IN_RANGE,
    ),
)

__all__ = ["ENTRANCE_FAULTS"]
