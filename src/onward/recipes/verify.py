"""`onward verify`: a run's first step against eager PyTorch and stock onnxruntime."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from onward.recipes.describe import describe
from onward.recipes.finetune import tell_page, versions
from onward.recipes.options import FinetuneConfig, InputError, is_run
from onward.recipes.report.written_files import VERIFIED
from onward.recipes.run_folder import options_of, publish_json, read_record
from onward.recipes.start_model import build_model
from onward.train.verify.report import Verification


def verify(config: FinetuneConfig, bisect: bool) -> int:
    """Compares Onward's first step of the described run with its references; returns 1 if they
    differ."""
    report = verification(config, bisect)
    print(report)
    return 0 if report.ok else 1


def verify_run(folder: Path, bisect: bool) -> int:
    """Compares the first step of a run that was made before, writes the numbers into its folder as
    `verify.json`, and makes its page again. Returns 1 if they differ. Raises InputError for a
    folder of no run."""
    if not is_run(folder):
        raise InputError(
            f"{str(folder)!r} is no run of onward finetune",
            "as the first word after verify",
            "name a run's folder, or give the options of one",
        )
    options = options_of(read_record(folder))
    # in fp32, also where no GPU is
    report = verification(dataclasses.replace(options, tf32=False), bisect)
    print(report)
    publish_json(folder, VERIFIED, certificate(report))
    tell_page(folder)
    return 0 if report.ok else 1


def verification(config: FinetuneConfig, bisect: bool) -> Verification:
    """Compares the first step of a run with these options."""
    if config.mesh is not None or config.zero:
        raise InputError(
            "verify compares a step of one process", "in --mesh or --zero", "leave them out"
        )
    run = describe(dataclasses.replace(config, output_dir=None))
    from onward.recipes.job_start import at_its_start
    from onward.recipes.stages import StageLine

    job = run.job
    trainer, batch = at_its_start(job, build_model(job.config, job.model_config))
    with StageLine("verify"):
        return trainer.verify(batch, bisect=bisect)


def certificate(report: Verification) -> dict[str, Any]:
    """The content of verify.json: every compared tensor. A number that is not finite is text, as
    JSON has none."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{n: plain(v) for n, v in dataclasses.asdict(row).items()} for row in report.rows]
    return {
        "ok": report.ok,
        "rows": rows,
        "mismatches": report.mismatches,
        "notes": report.notes,
        "versions": versions(),
    }


__all__ = ["certificate", "verification", "verify", "verify_run"]
