"""docs/what-works-where.md: what works with which way in, each cell with the test that holds it.

`python tests/support/what_works.py` writes the page of the table below; other pages link to it.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what-works-where.md"
WAYS = (
    "`onward.Trainer`", "transformers' Trainer, one graph", "`onward.accelerate`, `onward.Module`",
    '`torch.compile(backend="onward")`',
)  # fmt: skip
_LED, _OWN = "tests/integrations/test_transformers_trainer.py::", "tests/module/"
_COMPILE, _BESIDE = "tests/integrations/test_torch_compile.py::", "tests/integrations/"
_STOCK = f"{_BESIDE}test_trainer_ranks.py::test_two_processes_are_the_stock_trainer_with_ddp"
_OF_PARTS = (
    f"{_BESIDE}test_trainer_ranks.py::test_parts_of_the_model_are_the_stock_trainer_of_one_process"
)
_SHARDS = "no: parameters in shards have no graph"

# a cell for each way to train: its text, and the test that holds it where it works
Cell = tuple[str, str | None]
ROWS: dict[str, tuple[Cell, Cell, Cell, Cell]] = {
    "fp32": (
        ("yes", "tests/models/test_parity.py"), ("yes", f"{_LED}test_a_language_model"),
        ("yes", f"{_OWN}test_gradients.py"),
        ("yes", f"{_COMPILE}test_training_and_evaluation_have_each_its_graph"),
    ),
    "bf16": (
        ('`mixed_precision="bf16"`', "tests/models/test_mixed_row_laws.py"),
        ("`bf16=True`", f"{_LED}test_bf16"),
        ("`torch.autocast`, `bf16=True`", f"{_OWN}test_autocast.py::test_transformers"),
        ("`torch.autocast`", f"{_COMPILE}test_autocast_around"),
    ),
    "fp16": (
        ('`mixed_precision="fp16"`', "tests/models/test_fp16_gradients.py"),
        ("`fp16=True`, by forward and backward graphs",
         f"{_BESIDE}test_trainer_served.py::test_fp16"),
        ("`torch.autocast`, `GradScaler`",
         f"{_BESIDE}test_grad_scaler.py::test_scaled_gradients_and_skipped_updates"),
        ("`torch.autocast`", f"{_COMPILE}test_autocast_around"),
    ),
    "optimizers": (
        ("most in the graph, others by their own `step()`", "tests/train/test_own_steps.py"),
        ("most in one graph, others by their own `step()`",
         f"{_BESIDE}test_trainer_own_steps.py::test_optimizers_that_no_graph_has"),
        ("any", f"{_OWN}test_gradients.py"), ("any", f"{_COMPILE}test_autocast_within"),
    ),
    "several processes with one batch": (
        ('`mesh={"dp_replicate": 2}`',
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ("by torchrun", _STOCK), ("by DistributedDataParallel", f"{_BESIDE}test_distributed.py"),
        ("not tested", None),
    ),
    "DistributedDataParallel": (
        ("no: use `mesh`", None), ("not needed: one graph exchanges", _STOCK),
        ("yes", f"{_BESIDE}test_distributed.py::test_ddp_over_gloo"), ("not tested", None),
    ),
    "AdaSum": (
        ("`adasum=True`", "tests/train/test_adaptive_ranks.py"),
        ("not tested", None), ("not tested", None), ("not tested", None),
    ),
    "ZeRO-1, ZeRO-2": (
        ("`zero=1`, `zero=2`",
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ("`zero=1`, `zero=2`", _STOCK), ("by DeepSpeed", f"{_BESIDE}test_deepspeed.py::test_zero"),
        ("not tested", None),
    ),
    "ZeRO-3": (
        ("`zero=3`", "tests/train/test_parameter_parts.py::test_weights_in_parts"),
        ("`zero=3`", _OF_PARTS), ("by DeepSpeed", f"{_BESIDE}test_deepspeed.py::test_zero"),
        ("not tested", None),
    ),
    "tensor parallelism": (
        ('`mesh={"tp": 2}`', "tests/train/test_parameter_parts.py::test_weights_in_parts"),
        ('`mesh={"tp": 2}`', _OF_PARTS), (_SHARDS, None), (_SHARDS, None),
    ),
    "sequence parallelism": (
        ("`sequence_parallel=True`",
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ("not tested", None), ("not tested", None), ("not tested", None),
    ),
    "context parallelism": (
        ('`mesh={"cp": 2}`',
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ('`mesh={"cp": 2}`', _OF_PARTS), ("not tested", None), ("not tested", None),
    ),
    "pipeline parallelism": (
        ('`mesh={"pp": 2}`',
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ("no: it weighs micro-batches itself", None), (_SHARDS, None), (_SHARDS, None),
    ),
    "FSDP": (
        ("as `zero=3`",
         "tests/train/test_ranks.py::test_ranks_are_one_process_with_the_whole_batch"),
        ("as `zero=3`", _OF_PARTS),
        ("FSDP2", f"{_BESIDE}test_fsdp.py::test_fully_shard_over_gloo"),
        ("not tested", None),
    ),
    "peft": (
        ("not tested", None), ("not tested", None),
        ("yes", f"{_BESIDE}test_peft.py::test_adapters_come_and_go"), ("not tested", None),
    ),
    "a module around a model with a cache": (
        ("yes", "tests/capture/test_capture_manners.py"), ("not tested", None),
        ("yes; without a cache in training or with labels",
         f"{_OWN}test_caches.py::test_a_graph_or_what_to_set"), ("not tested", None),
    ),
    "generation": (
        ("by the model itself", None), ("eager", f"{_LED}test_seq2seq"),
        ("eager, with a warning", f"{_OWN}test_waiting.py"), ("not tested", None),
    ),
    "CUDA": (
        ("runs, with Triton kernels", None), ("not tested", None),
        ("runs, with Triton kernels", None), ("not tested", None),
    ),
}  # fmt: skip


def page() -> str:
    lines = [
        "# What works where",
        "",
        "Written by `python tests/support/what_works.py`, and held by `tests/test_what_works.py`:",
        "each number stands for the test below, which holds that cell. What has none is a limit,",
        "or is not tested.",
        "",
        f"| | {' | '.join(WAYS)} |",
        "|---|---|---|---|---|",
    ]
    tests: list[str] = []
    for name, cells in ROWS.items():
        shown = []
        for said, test in cells:
            if test is not None and test not in tests:
                tests.append(test)
            shown.append(said if test is None else f"{said} ({tests.index(test) + 1})")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", *(f"{i}. `{test}`" for i, test in enumerate(tests, 1)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
