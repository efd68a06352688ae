"""The options of `onward.Trainer` and `onward.accelerate`, each one field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.errors import OnwardError, check_names, refused
from onward.mesh_sizes import METHODS, read_mesh
from onward.option_conflicts import check_recompute, check_together
from onward.option_fields import documented, option, options_of, read_options
from onward.option_readers import (
    read_budget,
    read_count,
    read_decay,
    read_folder,
    read_microbatches,
    read_names,
    read_norm,
    read_offload,
    read_one_of,
    read_pass_names,
    read_precision,
    read_real,
    read_seconds,
    read_seed,
    read_skips,
    read_spikes,
    read_switch,
    read_threshold,
    read_updates,
    read_zero,
)  # fmt: skip

# ---- the loss scale

LEAST_SCALE = 2.0**-126  # the smallest normal f32


@dataclass(frozen=True)
class LossScale:
    """The rule by which the loss scale of fp16 changes; names and defaults are those of
    `torch.amp.GradScaler`. Raises OnwardError for an invalid value.

    init_scale: the first scale. growth_factor: multiplies the scale after `growth_interval` updates
    in a row with finite gradients. backoff_factor: multiplies it after an update that was skipped
    because a gradient was infinite or NaN.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        limits = {
            "init_scale": (LEAST_SCALE, 1 / LEAST_SCALE, "a number from 2**-126 to 2**126"),
            "growth_factor": (
                math.nextafter(1.0, 2.0), 1 / LEAST_SCALE, "a number above 1, to 2**126"
            ),
            "backoff_factor": (
                LEAST_SCALE, math.nextafter(1.0, 0.0), "a number from 2**-126 to below 1"
            ),
        }  # fmt: skip
        for name, (least, most, words) in limits.items():
            number = read_real(getattr(self, name))
            if number is None or not least <= number <= most:
                raise refused(f"loss_scale: {name}", getattr(self, name), words)
            object.__setattr__(self, name, number)
        interval = read_count("loss_scale: growth_interval", self.growth_interval)
        object.__setattr__(self, "growth_interval", interval)


def _read_loss_scale(name: str, value: object) -> float | LossScale:
    if isinstance(value, LossScale):
        return value
    if isinstance(value, str) and value == "dynamic":
        return LossScale()
    if isinstance(value, Mapping):
        known = [f.name for f in dataclasses.fields(LossScale)]
        check_names(name, "setting", [str(key) for key in value], known)
        return LossScale(**value)
    number = read_real(value)
    if number is None or not LEAST_SCALE <= number <= 1 / LEAST_SCALE:
        fix = '"dynamic", a number from 2**-126 to 2**126, or an onward.LossScale'
        raise refused(name, value, fix)
    return number


# ---- options


@documented
@dataclass(frozen=True)
class TrainerOptions:
    """Options of `onward.Trainer`. Raises OnwardError for an invalid value."""

    gradient_accumulation_steps: int = option(
        1,
        read_count,
        "updates the weights after every 4th `train_step`",
        "4",
        {"gradient_accumulation_steps": "micro-batches per optimizer update"},
    )
    """Micro-batches per optimizer update; each `train_step` is one."""

    max_grad_norm: float | None = option(
        None,
        read_norm,
        "clips gradients to this global norm, over the optimizer's parameters alone; parameters "
        "of the model that it does not hold are not counted",
        "1.0",
        {"max_grad_norm": "clip the gradient to this global 2-norm; 0 or null: no clipping"},
    )
    """Bound of the global 2-norm of the gradients of the optimizer's parameters; None does not
    clip."""

    max_grad_value: float | None = option(
        None,
        read_norm,
        "clips each element of the gradients to this value, as `torch.nn.utils.clip_grad_value_`; "
        "not together with `max_grad_norm`",
        "0.5",
    )
    """Bound of each element of the gradients, up and down; None does not clip. An infinite gradient
    is not clipped: its update is skipped (`skip_nonfinite`)."""

    seed: int | None = option(
        None,
        read_seed,
        'seeds dropout masks and the rounding of `optimizer_state="bf16"`; without it they follow '
        "`torch.manual_seed`",
        "0",
        {"seed": "seed of start weights, batch order and dropout masks"},
    )
    """Seed of the dropout masks, and of the rounding of moments in bf16; None has them follow from
    `torch.manual_seed` and the number of the update."""

    verify: bool = option(
        False,
        read_switch,
        "compares the first batch with eager PyTorch and stock onnxruntime before training goes "
        "on; in mixed precision with `torch.autocast` too",
        "True",
    )
    """Compares loss and gradients with eager PyTorch (and stock onnxruntime where installed) on the
    first batch; raises OnwardError where they differ."""

    memory_budget: int | float | str | None = option(
        None,
        read_budget,
        "recomputes values in backward until the step fits; `0.6` keeps 60 % of what can be "
        "spared. The results are the same to the bit",
        '"2GB"',
        {
            "memory_budget": "most memory of a training step beyond the parameters: bytes (2GB, "
            "512MiB), or a fraction (0.6) of what recomputing can spare, 1.0 spares nothing; null: "
            "no limit"
        },
    )
    """The most memory that a step's plan may hold beyond the user's parameters; values are
    recomputed in backward until it fits. In bytes (`2_000_000_000`, "2GB", "1.5 GiB"): too few
    raise OnwardError, which names the smallest possible. Or as a fraction (float, above 0.0 to 1.0)
    of what recomputation can save: 1.0 recomputes nothing, 0.5 goes half of the way to the smallest
    possible, and near 0.0 is the smallest. A fraction is never too small, since memory that
    recomputation cannot save (optimizer state, gradients that wait for their update) is not counted
    in it. None: no limit."""

    auto_micro_batch: bool = option(
        False,
        read_switch,
        "splits a batch whose step does not fit into the free memory into micro-batches, as few as "
        "fit; loss, gradients and dropout masks are those of the whole batch",
        "True",
    )
    """Splits a batch whose step does not fit into the free memory. Its loss must be a mean over
    labels or elements, and no sample may depend on another one; otherwise the batch is refused."""

    recompute: str = option(
        "auto",
        read_one_of("auto", "layers", "none"),
        "keeps of each layer what it passes on and computes the rest again in backward, "
        'as gradient checkpointing does, with the same results to the bit; `"auto"` does so where '
        'the model is set to, by `gradient_checkpointing_enable()`; `"none"` keeps everything',
        '"layers"',
    )
    """"layers" keeps of each layer (a module in a numbered list) only what it passes on, and
    computes the rest again in backward, as gradient checkpointing does; the results are the same to
    the bit. "auto" does so where the model is set to do it in eager mode, by transformers'
    `gradient_checkpointing_enable()`. "none" keeps everything. `memory_budget` decides value by
    value instead, and excludes the other two."""

    skip_nonfinite: bool = option(
        True,
        read_switch,
        "updates also where a gradient is infinite or NaN, as eager PyTorch does; otherwise such "
        "an update is left out and the step says `skipped`",
        "False",
        {
            "skip_nonfinite": "leave out updates with infinite or NaN gradients; false, with "
            "--max_grad_norm 0, updates each weight as soon as its gradient is known"
        },
    )
    """Skips an update with an infinite or NaN gradient: weights, optimizer state and counts stay as
    they are, and the step's result has `skipped` set. False updates even so, as eager PyTorch
    does."""

    max_skipped_updates: int | None = option(
        8,
        read_skips,
        "raises `NonfiniteError` after so many skipped updates in a row, and names the op or the "
        "input that the infinite or NaN numbers come from; None: never",
        "8",
    )
    """The number of updates skipped in a row after which `train_step` raises NonfiniteError, which
    names the op or the input that the infinite or NaN numbers come from; None: never. Skips by
    which a dynamic loss scale of 1 or more finds its size do not count."""

    loss_spikes: str | None = option(
        None,
        read_spikes,
        'looks for updates whose loss is far above those before. `"warn"` logs them; '
        '`"skip"` leaves them out, and the step says `skipped`; `"raise"` leaves them out and '
        "raises `LossSpikeError`, which names the last checkpoint",
        '"skip"',
    )
    """What becomes of an update whose loss is a spike: above the median of the last 9 losses of
    updates by `loss_spike_threshold` standard deviations of their noise, as the median difference
    of neighbours estimates it, or by that many percent of the median if these are more. "warn" logs
    it; "skip" leaves the update out, and raises LossSpikeError after `max_skipped_updates` in a
    row; "raise" leaves it out and raises LossSpikeError. None: losses are not looked at. No update
    is left out before 32 losses are known."""

    loss_spike_threshold: float = option(
        8.0,
        read_threshold,
        "is how far above the median a loss is a spike, in standard deviations or percent",
        "6.0",
    )
    """How far above the median of the last losses a loss is a spike (`loss_spikes`)."""

    strict: bool = option(
        False,
        read_switch,
        "raises `CaptureError`, with every reason, where a part of the model cannot be captured or "
        "the optimizer has no update in a graph; otherwise that part or the optimizer's own "
        "`step()` runs in PyTorch, and a warning says which and why",
        "True",
    )
    """Raises CaptureError, with every reason, where a part of the model cannot be captured, and
    where the optimizer has no update in a graph. Otherwise that part runs in PyTorch within the
    graph, and an EagerWarning says which and why; and the optimizer makes its own step."""

    mixed_precision: str = option(
        "no",
        read_precision,
        "computes products, attention and activations in bfloat16, as `torch.autocast` does; "
        'weights and optimizer state stay fp32. `"fp16"`: in float16, with a loss scale. `"auto"`: '
        "bf16 where the processor multiplies it",
        '"bf16"',
        {
            "bf16": "mixed precision: products in bfloat16, weights and optimizer state in fp32",
            "fp16": "mixed precision: products in float16, with dynamic loss scaling",
        },
    )
    """"bf16" computes matrix products, attention and activations in bfloat16, as `torch.autocast`
    does: weights, optimizer state, norms' statistics, softmax, losses and sums over a batch stay
    fp32. "fp16": the same in float16, whose range needs a loss scale. "auto": bf16 where the
    processor multiplies bf16 itself, else fp32. "no": fp32."""

    loss_scale: float | str | Mapping[str, Any] | LossScale = option(
        "dynamic",
        _read_loss_scale,
        "multiplies the loss of fp16 for backward by a scale that changes as "
        "`torch.amp.GradScaler`'s does; a number is a fixed scale, and an `onward.LossScale` is "
        "the same rule with other numbers",
        '"dynamic"',
    )
    """A factor of the loss in backward, for fp16 only, by which gradients are divided before they
    are clipped and applied, so that small ones do not become 0. "dynamic" uses the rule and numbers
    of `torch.amp.GradScaler`; a LossScale, or a dict of its fields, the same rule with other
    numbers; a number is a fixed factor. Needs `skip_nonfinite`, unless it is a number."""

    mesh: Mapping[str, int] | str | None = option(
        None,
        read_mesh,
        "trains on several processes of torchrun, each of which gives `train_step` its own share "
        'of the batch; the update is that of the whole batch. `"auto"`: on all that there are, by '
        "the mesh that is predicted to be fastest and to fit",
        '{"dp_replicate": 2}',
        {
            "mesh": "processes of torchrun that train together, by axis: dp_replicate=2, dp_shard, "
            "tp, cp, pp, or several with commas; auto or null: all that were started"
        },
    )
    """The number of ranks that train the model together, by axis: {"dp_replicate": 2} for two
    processes of torchrun that share each micro-batch. Ranks along `dp_shard` do so too; they are
    neighbours, so that gradients are summed along it first, and `zero` cuts state along it. Ranks
    along `tp` take the same micro-batch, and each holds a part of large weights and computes with
    it (Megatron-LM, arXiv 1909.08053); how weights are cut follows from the graph, and `zero` cuts
    the parts along `dp_shard` once more. Ranks along `cp` take the same micro-batch too, and each
    works on its part of the positions (context parallelism). Loss, gradients, updates and dropout
    masks are those of one process with the batches of all ranks in the order of their numbers.
    "auto": all processes of torch.distributed along `dp_replicate`, or with `zero` along
    `dp_shard`, unless that does not fit or another mesh is predicted to be faster by more than 5 %;
    chosen for the first batch, `zero` with it. One process where torch.distributed is not
    initialized. None: one process."""

    zero: int = option(
        0,
        read_zero,
        "cuts the optimizer's state over the ranks along `dp_shard`, each of which updates its "
        "part of the weights (ZeRO stage 1); `2`: the sums of a window's gradients too; `3`: the "
        "weights too, which are gathered for each use",
        "1",
        {"zero": "cut state along dp_shard: stage 1, 2 or 3 of ZeRO, 3 the weights too; 0: no"},
    )
    """The stage of ZeRO (arXiv 1910.02054): 1 keeps on each rank along the axis `dp_shard` of the
    `mesh` the optimizer's state of its part of every large parameter, and updates that part; 2 also
    keeps of the sums of a window's gradients that part alone, and exchanges the gradients of every
    micro-batch. 3 also keeps of the weights that part alone, from the first step on, and gathers
    each ahead of its use in forward and backward; the model shows NaN until `Trainer.gather`. A
    parameter whose update reads all of it, as LAMB's, Adafactor's and Muon's do, has an owner among
    the ranks, which alone has its state and updates it for all. 0: every rank has all state."""

    adasum: bool = option(
        False,
        read_switch,
        "combines the gradients of the replicas along `dp_replicate` by AdaSum instead of their "
        "mean: orthogonal ones are added, equal ones averaged",
        "True",
    )
    """Combines the gradients of the ranks along the axis `dp_replicate` of the `mesh`, whose number
    is a power of two, by adaptive summation (Maleki et al., MLSys 2021, arXiv 2006.02924), tensor
    by tensor: `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` for each two. Orthogonal gradients are
    added, equal ones averaged. Each gradient is that of the mean over one replica's own labels;
    ranks along `dp_shard` make up one replica. The loss is still that of all ranks. Not together
    with `zero`. False: the mean over all labels."""

    sequence_parallel: bool = option(
        False,
        read_switch,
        "has ranks along `tp` also work on parts of the positions, between the products whose "
        "weights are cut: less memory for activations, for as many bytes sent",
        "True",
        {"sequence_parallel": "with --mesh tp=2: share norms and dropout by positions too"},
    )
    """Gives each rank along the axis `tp` of the `mesh` its part of the positions where weights are
    not cut: norms, dropout and residual sums (Korthikanti et al., arXiv 2205.05198). Activations
    there take an N-th of the memory, with N ranks; an all-reduce becomes a reduce-scatter and an
    all-gather, and a weight's gradient gathers what it reads once more. N has to divide the lengths
    of batches, and padded rows are computed. False: every rank has all of them."""

    context_parallel_method: str = option(
        "auto",
        read_one_of(*METHODS),
        "how ranks along `cp` attend to the positions of others: keys and values are gathered "
        '(`"allgather"`), positions are exchanged for heads (`"alltoall"`), or keys and values go '
        "round a ring, so that no rank has all of them",
        '"ring"',
        {"context_parallel_method": "with --mesh cp=2: how attention reaches other positions"},
    )
    """The method by which the ranks along the axis `cp` of the `mesh` attend to the positions of
    others. "allgather": keys and values of all positions on every rank (Llama 3, arXiv 2407.21783).
    "alltoall": positions are exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509). "ring":
    keys and values go from rank to rank, so that none has all of them (ring attention, arXiv
    2310.01889). A call that cannot take the method, such as one whose heads the ranks do not
    divide, has that of "auto": "alltoall" where it passes fewer bytes, else "ring" where gathered
    keys would be large beside a rank's queries, else "allgather"."""

    pipeline_schedule: str = option(
        "1F1B",
        read_one_of("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
        "the order in which ranks along `pp` run their layers on the micro-batches, by its name in "
        "torch.distributed.pipelining",
        '"GPipe"',
        {"pipeline_schedule": "with --mesh pp=...: the order in which processes run micro-batches"},
    )
    """The schedule of the ranks along the axis `pp` of the `mesh`, each of which holds some of the
    layers: "GPipe" (arXiv 1811.06965), "1F1B" (1806.03377), with two pieces of the model a rank
    "Interleaved1F1B" (2104.04473) and "InterleavedZeroBubble" (2401.10241)."""

    pipeline_microbatches: int | None = option(
        None,
        read_microbatches,
        "the number of micro-batches that ranks along `pp` make of each batch, by rows; by default "
        "as many as there are ranks along it",
        "8",
        {
            "pipeline_microbatches": "with --mesh pp=...: micro-batches that are made of each "
            "batch, by rows; null: as many as processes along pp"
        },
    )
    """The number of parts in which a batch runs through the ranks along `pp`, cut by rows, as equal
    as they can be. None: the number of ranks along `pp`."""

    compare_ranks_every: int | None = option(
        None,
        read_updates,
        "compares weights and buffers of all ranks after so many updates again; they are always "
        "compared before the first step",
        "1000",
    )
    """The number of updates after which the ranks of a `mesh` compare their weights and buffers
    again, bit for bit; a difference raises OnwardError. None: before the first step only."""

    ranks_timeout: float | None = option(
        None,
        read_seconds,
        "gives up on a rank that does not come within so many seconds, names it, and ends the run; "
        "by default after those of `init_process_group(timeout=...)`, which are half an hour",
        "600",
    )
    """The seconds after which a rank of a `mesh` that waits for another one gives up, and raises an
    error that says which rank did not come and where it is. It has to be longer than the longest
    time for which ranks are legitimately apart: a capture, a checkpoint that rank 0 writes, a slow
    batch. A rank that has ended or failed is found at once or within seconds, whatever the number.
    None: the seconds of torch.distributed's default process group."""

    optimizer_state: str = option(
        "fp32",
        read_one_of("fp32", "bf16", "8bit"),
        "keeps the moments of Adam and AdamW in codes of 8 bits, 2.03 bytes a weight instead of 8 "
        '(small parameters and embeddings stay fp32); `"bf16"`: in 4 bytes, rounded '
        "stochastically, by the seed",
        '"8bit"',
        {"optimizer_state": "what AdamW's moments are kept in: 8, 4 or 2.03 bytes a weight"},
    )
    """"bf16" or "8bit" keeps the moments of Adam and AdamW in 4 or 2.03 bytes per weight instead of
    8. bf16 is rounded stochastically, without bias, by the seed. 8 bits are codes in blocks of 256;
    parameters of fewer than 4096 elements and embeddings stay fp32. "fp32": like the weights."""

    offload_optimizer: str | None = option(
        None,
        read_offload,
        "keeps the optimizer's state in files of `offload_dir`, of which a part at a time is in "
        'memory; `"cpu"`: beside a GPU in the memory of the host; the results are the same to the '
        "bit",
        '"disk"',
        {"offload_optimizer": "keep AdamW's moments in files of --offload_dir; cpu: beside a GPU"},
    )
    """"disk" keeps the optimizer's moments in files in `offload_dir` (ZeRO-Infinity, arXiv
    2104.07857), which are mapped into memory: an update reads and writes them part by part, and no
    more than a part is in memory. The files have no names, and are gone when the process ends.
    "cpu" keeps them in the host's memory while weights are on a GPU (ZeRO-Offload, arXiv
    2101.06840); without a GPU they are there anyway. Sums of gradients stay where they are. None:
    moments are beside the weights."""

    offload_dir: str | None = option(
        None,
        read_folder,
        'is the folder of `offload_optimizer="disk"`, on a fast disk, best an NVMe drive',
        '"/scratch/state"',
        {"offload_dir": "folder on a fast disk that takes these files, which have no names"},
    )
    """The folder that takes the files of `offload_optimizer="disk"`, which has to be there. Ranks
    on several hosts each use the folder of this name on their own host."""

    gradient_accumulation_dtype: str = option(
        "fp32",
        read_one_of("fp32", "bf16"),
        "keeps the sums of a window's gradients in 2 bytes a weight instead of 4",
        '"bf16"',
    )
    """"bf16" keeps the sums of a window's gradients in 2 bytes per weight instead of 4, rounded
    once per micro-batch; the last sum, which the update reads, is not rounded. "fp32": like the
    weights."""

    gradient_accumulation_average: str = option(
        "auto",
        read_one_of("auto", "labels", "micro_batches"),
        "takes the mean of the micro-batches' losses even where they hold different numbers of "
        "labels; otherwise a window's loss is the mean over all its labels, as of one big batch",
        '"micro_batches"',
    )
    """"labels" makes a window equal to one big batch: its loss is the mean over all labels that
    count, however many each micro-batch holds. The loss must be a mean cross entropy, a mean over
    elements, or `(losses * mask).sum() / mask.sum()`; others raise OnwardError. "micro_batches":
    the mean of the micro-batches' losses. "auto": "labels" where the loss is such a mean, else
    "micro_batches", with a line in the log."""

    ema_decay: float | None = option(
        None,
        read_decay,
        "keeps an exponential moving average of the weights, for `ema_weights()` and "
        "`ema_state_dict()`",
        "0.999",
    )
    """The share of the averaged weights that stays in each update, as `AveragedModel` of
    `torch.optim.swa_utils` with `get_ema_multi_avg_fn`; None keeps no average. It takes as many
    bytes as the weights."""

    keep_in_fp32: Sequence[str] = option(
        (),
        read_names,
        "keeps modules and ops in fp32 in mixed precision, by path or name, as a shell's pattern",
        '"lm_head"',
    )
    """Module paths and op names whose ops stay fp32 in mixed precision, as patterns of a shell
    ("decoder.*", "lm_head", "Conv"); a string is one pattern."""

    disable: Sequence[str] = option(
        (),
        read_pass_names,
        "leaves passes out, by name; `row_demand` computes every row",
        '"gemm_add"',
    )
    """Names of rewrite passes to leave out, and `row_demand`; a string is one name, or several with
    commas."""

    fetch: Sequence[str] = option(
        (), read_names, "returns outputs of the model with every step", '"logits"'
    )
    """Names of model outputs every step returns besides the loss; a string is one name."""

    def __post_init__(self) -> None:
        read_options(self)
        check_together(vars(self))
        if self.mixed_precision != "fp16" and self.loss_scale != LossScale():
            raise OnwardError(
                f"loss_scale is for fp16 only, but mixed_precision={self.mixed_precision!r}; "
                'fix: leave loss_scale out, or mixed_precision="fp16"'
            )
        if isinstance(self.scaling, LossScale) and not self.skip_nonfinite:
            raise OnwardError(
                "skip_nonfinite=False contradicts a dynamic loss_scale, which skips updates "
                "with infinite gradients to find its scale; fix: skip_nonfinite=True, or a "
                "number as loss_scale"
            )

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of a pipeline that each rank along `pp` has."""
        return 2 if self.pipeline_schedule.startswith("Interleaved") else 1

    @property
    def scaling(self) -> float | LossScale | None:
        """The scale of the loss: a rule, or a fixed number; None where the loss is not scaled."""
        if self.mixed_precision != "fp16":
            return None
        assert isinstance(self.loss_scale, float | LossScale), "as it was read"
        return self.loss_scale

    @classmethod
    def of(cls, options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
        """Converts options given as TrainerOptions, a mapping, or None (the defaults)."""
        return options_of(cls, options)


@documented
@dataclass(frozen=True)
class ModuleOptions:
    """Options of `onward.accelerate` and `onward.Module`. Raises OnwardError for an invalid
    value."""

    outputs: str = option(
        "auto",
        read_one_of("auto", "all", "loss"),
        'computes what the calls before have read; `"all"`: every output in each call; `"loss"`: '
        "the loss alone",
        '"auto"',
    )
    """"auto" computes the outputs that earlier calls have read; another one is computed when it is
    read, by a second run of the forward. It needs a Hugging Face ModelOutput; for other outputs it
    means "all". "all" computes every output in each call. "loss" computes only the loss; other
    outputs are None."""

    strict: bool = option(
        False,
        read_switch,
        "raises `CaptureError` where a call cannot run as a graph; otherwise parts of the model, "
        "or the whole call, run in eager PyTorch, and a warning says which and why",
        "True",
    )
    """Raises CaptureError where a call cannot run as a graph; otherwise parts of the model that
    cannot be captured, or the whole call, run in eager PyTorch, and an EagerWarning says which and
    why, once."""

    memory_budget: int | float | str | None = option(
        None, read_budget, "as in TrainerOptions, for a call's forward and backward", '"2GB"'
    )
    recompute: str = option(
        "auto", read_one_of("auto", "layers", "none"), "as in TrainerOptions", '"layers"'
    )
    disable: Sequence[str] = option((), read_pass_names, "as in TrainerOptions", '"gemm_add"')

    def __post_init__(self) -> None:
        read_options(self)
        check_recompute(self.recompute, self.memory_budget)


def switch_lines() -> dict[str, str]:
    """The `--help` line of each switch that sets an option of a Trainer."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(TrainerOptions):
        found |= field.metadata["switches"]
    return found
