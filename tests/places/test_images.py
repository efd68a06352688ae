"""The Dockerfiles of `deploy/docker/`, read by a small parser of their own and by hadolint.

None is built here: that needs a container engine and images of others.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from rendered import DEPLOY, ROOT, installed

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, its lines joined."""

    name: str
    words: str


def instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines()]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile, by the rules that ours keep."""
    found = instructions(text)
    told = [f"{x.name} is not used here" for x in found if x.name not in INSTRUCTIONS]
    values = dict(x.words.split("=", 1) for x in found if x.name == "ARG" and "=" in x.words)
    for each in found:
        if each.name == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda m: values.get(m[1], ""), each.words.split()[0])
            tag = image.rpartition("/")[2].partition(":")[2]
            if not re.search(r"\d", tag) or "latest" in tag:
                told.append(f"{image} has no tag of one release")
        if "pip " in each.words and "constraints.txt" not in each.words:
            told.append(f"not pinned: {each.words}")
        if "pip " in each.words and "--no-cache-dir" not in each.words:
            told.append(f"keeps a cache: {each.words}")
        if each.name == "ENTRYPOINT" and not each.words.startswith("["):
            told.append("a shell stands before the process, and takes its signals")
    users = [x.words for x in found if x.name == "USER"]
    if not users or not users[-1].isdecimal() or users[-1] == "0":
        told.append("it runs as root, or as a user whom Kubernetes cannot tell from root")
    names = [x.name for x in found]
    if names[-3:] != ["WORKDIR", "ENTRYPOINT", "CMD"]:
        told.append("it does not end with its folder and its command")
    # the last stage: PyTorch's layer comes before the sources, which change more often
    last = found[max(i for i, x in enumerate(found) if x.name == "FROM") :]
    torch = next((i for i, x in enumerate(last) if "install" in x.words and " torch" in x.words), 0)
    sources = [i for i, x in enumerate(last) if x.name == "COPY" and "constraints" not in x.words]
    if not torch or torch > min(sources, default=0):
        told.append("the sources come before PyTorch's layer")
    return told


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_keep_the_rules(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("FROM python:${PYTHON}-slim-bookworm", "FROM python:latest", "no tag"),
        ("FROM python:${PYTHON}-slim-bookworm", "FROM python", "no tag"),
        ("USER 1000", "", "root"),
        ("USER 1000", "USER 0", "root"),
        ("--constraint constraints.txt --wheel-dir", "--wheel-dir", "not pinned"),
        ("install --no-cache-dir torch", "install torch", "cache"),
        ('ENTRYPOINT ["/opt/onward/launch.sh"]', "ENTRYPOINT /opt/onward/launch.sh", "shell"),
        ('CMD ["doctor"]', "", "end"),
        ("WORKDIR /build", "ADD x /x", "ADD"),
        ("ENV PYTHONUNBUFFERED=1", "COPY src src", "before PyTorch"),
    ],
)
def test_a_planted_fault_is_found(before: str, after: str, fault: str) -> None:
    text = (DEPLOY / "docker" / "cpu.Dockerfile").read_text()
    assert before in text
    assert any(fault in told for told in faults(text.replace(before, after)))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_is_there_and_in_the_context(path: Path) -> None:
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied: set[str] = set()
    for each in instructions(path.read_text()):
        if each.name == "COPY" and "--from" not in each.words:
            copied |= {word for word in each.words.split()[:-1] if not word.startswith("--")}
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert copied <= let_in
    extras = set(re.findall(r"\[([\w,]+)\]", path.read_text()).pop().split(","))
    assert extras <= EXTRAS.keys()


def test_everything_in_the_context_is_copied() -> None:
    text = "".join(path.read_text() for path in DOCKERFILES)
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        assert not line.startswith("!") or line[1:] in text, line


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path, tmp_path: Path) -> None:
    program = installed("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, "--no-color", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    planted = tmp_path / "Dockerfile"
    planted.write_text(path.read_text().replace("USER 1000\n", "USER root\n"))
    done = subprocess.run([program, "--no-color", str(planted)], capture_output=True, text=True)
    assert done.returncode and "DL3002" in done.stdout
