"""Fills in a template of this folder, and prints it.

    python deploy/render.py                                       lists templates and values
    python deploy/render.py kubernetes/job.yaml image=registry.example/onward:0.1.0-cpu > job.yaml

A template is a file that its own tool reads, in which `${name}` in small letters stands for a
value. What else has a dollar is the tool's: `$HOME`, `${SLURM_JOB_ID}`, `${{inputs.text}}`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

FOLDER = Path(__file__).resolve().parent
TEMPLATES = (
    "azureml/job.yml",
    "kubernetes/job.yaml",
    "kubernetes/indexed-job.yaml",
    "kubernetes/pytorchjob.yaml",
    "skypilot/task.yaml",
    "slurm/job.sbatch",
)
# Values stand within double quotes, or in a shell's words: nothing that ends either is taken.
TEXT = re.compile(r"[A-Za-z0-9 _./:@=,+%~-]*")
WORD = re.compile(r"[A-Za-z0-9_./:@=,+%~-]+")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class Value:
    """What a template may ask for. default: None where it has to be given."""

    meaning: str
    form: re.Pattern[str]
    default: str | None


VALUES = {
    "name": Value("of the job: small letters, digits and -", NAME, "onward"),
    "image": Value("container image, by tag or digest", WORD, None),
    "options": Value("of onward finetune, after those of the template", TEXT, ""),
    "model": Value("--model_name_or_path", WORD, "gpt2-small"),
    "text": Value("train text, by the name that the job has for it", WORD, None),
    "run": Value("output folder, by the job's name for it; it outlives the job", WORD, None),
    "nodes": Value("machines", NUMBER, "1"),
    "workers": Value("machines beside the first", NUMBER, "1"),
    "processes": Value("on each machine: GPUs, or parts of a CPU", NUMBER, "1"),
    "gpus": Value("of each machine", NUMBER, "0"),
    "accelerators": Value("of each machine, such as H100:8", WORD, None),
    "cpus": Value("of each machine", NUMBER, "8"),
    "memory": Value("of each machine, GiB", NUMBER, "32"),
    "hours": Value("after which the job ends", NUMBER, "24"),
    "seconds": Value("after which the job ends", NUMBER, "86400"),
    "claim": Value("persistent volume claim, mounted at /data", NAME, "onward-data"),
    "compute": Value("cluster of the Azure ML workspace", NAME, None),
    "partition": Value("of Slurm", WORD, None),
    "venv": Value("virtual environment in which Onward is installed", WORD, None),
    "checkout": Value("folder of Onward's sources, as the machines see it", WORD, None),
    "bucket": Value("to mount at /data, such as s3://mine", WORD, None),
}


class BracedTemplate(Template):
    """A string.Template that takes `${name}` in small letters alone."""

    flags = 0  # pyright: ignore[reportAssignmentType]
    pattern = r"\$\{(?P<braced>[a-z_]+)\}|(?P<escaped>(?!))|(?P<named>(?!))|(?P<invalid>(?!))"  # pyright: ignore[reportAssignmentType]


class RenderError(ValueError):
    """A template or a value that does not do, in one line."""


def names(template: str) -> list[str]:
    """The values that a template asks for, in the order of `VALUES`."""
    asked = set(BracedTemplate(_read(template)).get_identifiers())
    return [name for name in VALUES if name in asked]


def render(template: str, given: Mapping[str, str]) -> str:
    """The text of a template with its values. Raises RenderError."""
    asked = names(template)
    for name in given:
        if name not in asked:
            raise RenderError(f"{template} has no {name!r}; fix: one of {', '.join(asked)}")
    values: dict[str, str] = {}
    for name in asked:
        value = given.get(name, VALUES[name].default)
        if value is None:
            raise RenderError(
                f"{template} needs {name!r} ({VALUES[name].meaning}); fix: {name}=..."
            )
        if not VALUES[name].form.fullmatch(value):
            raise RenderError(
                f"{name}={value!r} does not fit {VALUES[name].form.pattern}; fix: another {name}"
            )
        values[name] = value
    return BracedTemplate(_read(template)).substitute(values)


def _read(template: str) -> str:
    if template not in TEMPLATES:
        raise RenderError(f"no template {template!r}; fix: one of {', '.join(TEMPLATES)}")
    return (FOLDER / template).read_text(encoding="utf-8")


def overview() -> str:
    """The templates with their values, and what each value means."""
    lines = ["templates, with their values:"]
    lines += [f"  {template:<28} {' '.join(names(template))}" for template in TEMPLATES]
    lines += ["", "values:"]
    for name, value in VALUES.items():
        default = "needed" if value.default is None else f"default {value.default!r}"
        lines.append(f"  {name:<12} {value.meaning}; {default}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Runs one command line; returns its exit status."""
    if not arguments:
        print(overview())
        return 0
    template, *words = arguments
    try:
        pairs = [word.partition("=") for word in words]
        for name, equals, _ in pairs:
            if not equals:
                raise RenderError(f"{name!r} is no value; fix: name=value")
        print(render(template, {name: value for name, _, value in pairs}), end="")
    except RenderError as error:
        print(f"render.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
