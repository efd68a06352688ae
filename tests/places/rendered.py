"""Each template of `deploy/` with values, as its user would fill it in."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
IMAGE = {"image": "registry.example/onward:0.1.0-cuda"}
TRAINING = {
    "name": "wiki",
    "text": "/data/text.txt",
    "run": "/data/runs/wiki",
    "options": "--save_steps 200 --learning_rate 5e-5",
}
OF_AZURE = {
    "text": "azureml://datastores/workspaceblobstore/paths/text.txt",
    "run": "azureml://datastores/workspaceblobstore/paths/runs/wiki",
}
GIVEN: dict[str, dict[str, str]] = {
    "azureml/job.yml": {**IMAGE, **TRAINING, **OF_AZURE, "compute": "gpus", "nodes": "2",
                        "processes": "4"},
    "kubernetes/job.yaml": {**IMAGE, **TRAINING, "processes": "2", "gpus": "2"},
    "kubernetes/indexed-job.yaml": {**IMAGE, **TRAINING, "nodes": "3", "processes": "2"},
    "kubernetes/pytorchjob.yaml": {**IMAGE, **TRAINING, "workers": "2", "gpus": "8",
                                   "processes": "8"},
    "skypilot/task.yaml": {**IMAGE, **TRAINING, "nodes": "2", "processes": "8",
                           "accelerators": "H100:8", "bucket": "s3://mine"},
    "slurm/job.sbatch": {**TRAINING, "partition": "gpus", "venv": "/home/me/.venv",
                         "checkout": "/home/me/onward", "nodes": "2", "gpus": "4",
                         "processes": "4"},
}  # fmt: skip


def program(path: Path) -> ModuleType:
    """A Python file of `deploy/` as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


renderer = program(DEPLOY / "render.py")


def installed(tool: str) -> str | None:
    """The path of a program, also of one beside this Python; None where there is none."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which(tool, path=path)


def rendered(template: str) -> str:
    """The text of a template with the values of `GIVEN`."""
    return renderer.render(template, GIVEN[template])
