"""The templates of `deploy/`: filled in, read by their own tools, and told what they may hold."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered import DEPLOY, GIVEN, ROOT, installed, rendered, renderer

from onward.recipes.options import FinetuneConfig

KUBERNETES = [name for name in GIVEN if name.startswith("kubernetes/")]
# Releases of Kubernetes whose schemas the manifests are held against.
RELEASES = ("1.28", "1.34")


def documents(template: str) -> list[dict[str, Any]]:
    return [x for x in yaml.safe_load_all(rendered(template)) if x is not None]


def pods(template: str) -> Iterator[dict[str, Any]]:
    """The template of each pod of a manifest."""
    for document in documents(template):
        if document["kind"] == "Job":
            yield document["spec"]["template"]
        for replicas in document["spec"].get("pytorchReplicaSpecs", {}).values():
            yield replicas["template"]


# ---- the renderer


def test_every_template_is_rendered_here() -> None:
    assert sorted(GIVEN) == sorted(renderer.TEMPLATES)
    found = {
        path.relative_to(DEPLOY).as_posix()
        for path in DEPLOY.rglob("*.*")
        if path.suffix in {".yml", ".yaml", ".sbatch"}
    }
    assert found == set(renderer.TEMPLATES)


def test_every_value_is_asked_for() -> None:
    asked = {name for template in renderer.TEMPLATES for name in renderer.names(template)}
    assert asked == set(renderer.VALUES)


@pytest.mark.parametrize("template", GIVEN)
def test_values_stand_where_they_were_asked_for(template: str) -> None:
    text = rendered(template)
    for name, value in GIVEN[template].items():
        assert value in text, name
    left = renderer.BracedTemplate(text).get_identifiers()
    assert left == []
    source = (DEPLOY / template).read_text(encoding="utf-8")
    for kept in ("${{inputs.text}}", "${SKYPILOT_NODE_IPS}", "$SLURM_JOB_NODELIST"):
        assert (kept in text) == (kept in source), "another tool's variable"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs 'image' (container image, by tag or digest); fix: image=..."),
        ({"image": "a", "txt": "b"}, "has no 'txt'; fix: one of name, image"),
        ({"image": 'a"\n  x: 1'}, "does not fit"),
        ({"options": "$(rm -r /)"}, "does not fit"),
        ({"options": "a; b"}, "does not fit"),
        ({"processes": "two"}, "does not fit"),
        ({"name": "Wiki"}, "does not fit"),
    ],
)
def test_a_value_that_does_not_do_is_named(values: dict[str, str], message: str) -> None:
    given = values if values in ({},) else {**GIVEN["kubernetes/job.yaml"], **values}
    with pytest.raises(renderer.RenderError) as told:
        renderer.render("kubernetes/job.yaml", given)
    assert message in str(told.value) and "\n" not in str(told.value)


def test_the_renderer_as_a_program(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(DEPLOY / "render.py"), *words],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip

    words = [f"{name}={value}" for name, value in GIVEN["slurm/job.sbatch"].items()]
    assert run("slurm/job.sbatch", *words).stdout == rendered("slurm/job.sbatch")
    listed = run()
    assert listed.returncode == 0 and all(name in listed.stdout for name in renderer.VALUES)
    wrong = run("slurm/job.sbatch", "nodes")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "render.py: error: 'nodes' is no value; fix: name=value\n"
    assert "no template 'x'" in run("x").stderr


def test_commands_of_the_page_are_taken() -> None:
    page = (ROOT / "docs" / "places.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^python deploy/render.py (.+?) > \S+$", page, re.MULTILINE)
    shown = [shlex.split(line.replace("$HOME", "/home/me")) for line in lines]
    for template, *words in shown:
        values = dict(word.split("=", 1) for word in words)
        assert renderer.BracedTemplate(renderer.render(template, values)).get_identifiers() == []
    assert len(shown) >= 5
    assert [name for name in renderer.TEMPLATES if name.split("/")[1] not in page] == []


# ---- what they hold


@pytest.mark.parametrize("template", GIVEN)
def test_switches_are_those_of_finetune(template: str) -> None:
    words = rendered(template).split("launch.sh")[-1].split()
    used = {word[2:] for word in words if word.startswith("--") and word[2:].isidentifier()}
    assert {"model_name_or_path", "train_file", "output_dir", "save_steps"} <= used
    assert used <= set(FinetuneConfig.__dataclass_fields__)


@pytest.mark.parametrize("template", KUBERNETES)
def test_pods_run_as_a_user_and_end_with_a_checkpoint(template: str) -> None:
    found = list(pods(template))
    assert len(found) == (2 if "pytorchjob" in template else 1)
    for pod in found:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["terminationGracePeriodSeconds"] >= 60
        (container,) = spec["containers"]
        assert container["command"] == ["/bin/bash", "-c"]
        (line,) = container["args"]
        assert line.startswith("exec /opt/onward/launch.sh finetune "), "signals reach it"
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_pods_of_an_indexed_job_find_the_first_one() -> None:
    service, job = documents("kubernetes/indexed-job.yaml")
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 3
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    given = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert given["MASTER_ADDR"] == "wiki-0.wiki" and given["NNODES"] == "3"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_roles_of_a_pytorchjob() -> None:
    """The schema of a PyTorchJob comes with its operator alone; its pods have that of pods."""
    (job,) = documents("kubernetes/pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {name: role["replicas"] for name, role in roles.items()} == {"Master": 1, "Worker": 2}
    assert roles["Master"]["template"] == roles["Worker"]["template"]
    for pod in pods("kubernetes/pytorchjob.yaml"):
        assert pod["spec"]["containers"][0]["name"] == "pytorch", "the name that the operator wants"


def test_skypilot_s_task() -> None:
    (task,) = documents("skypilot/task.yaml")
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "image_id": "docker:registry.example/onward:0.1.0-cuda",
        "cpus": "8+", "memory": "32+", "accelerators": "H100:8",
    }  # fmt: skip


# ---- by the tools that read them


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("template", KUBERNETES)
def test_kubernetes_schemas_accept_the_manifests(template: str, release: str) -> None:
    checker = pytest.importorskip("kubernetes_validate")

    def check(document: dict[str, Any]) -> None:
        checker.validate(document, release, strict=True)

    manifests = [x for x in documents(template) if x["kind"] != "PyTorchJob"]
    manifests += [
        {"apiVersion": "v1", "kind": "PodTemplate", "template": x} for x in pods(template)
    ]
    for manifest in manifests:
        check(manifest)
    broken = documents("kubernetes/job.yaml")[0]
    broken["spec"]["template"]["spec"]["containers"][0]["images"] = "x"
    with pytest.raises(checker.ValidationError):
        check(broken)


# azure-ai-ml's own use of marshmallow, and its notes about classes of tomorrow
@pytest.mark.filterwarnings("ignore")
def test_azure_reads_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: without a workspace, credentials or a connection."""
    path = tmp_path / "job.yml"
    path.write_text(rendered("azureml/job.yml"))
    text = yaml.safe_load(path.read_text())
    assert text["type"] == "command" and "${{inputs.text}}" in text["command"]
    ml = pytest.importorskip("azure.ai.ml")
    job = ml.load_job(str(path))
    assert type(job).__name__ == "Command"
    assert (job.resources.instance_count, job.distribution.process_count_per_instance) == (2, 4)
    assert job._validate().passed
    text["distribution"]["process_count_per_instance"] = "many"
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(Exception, match="process_count_per_instance"):
        ml.load_job(str(path))


# ---- shells

SCRIPTS = ("launch.sh", "slurm/job.sbatch")


def script(name: str, folder: Path) -> Path:
    if name in renderer.TEMPLATES:
        path = folder / "script.sh"
        path.write_text(rendered(name))
        return path
    return DEPLOY / name


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts_parse(name: str, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(script(name, tmp_path))], check=True)
    if name == "launch.sh":
        assert os.access(DEPLOY / name, os.X_OK)
    checker = installed("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed; bash itself has read the script")
    subprocess.run([checker, str(script(name, tmp_path))], check=True)


def test_slurm_runs_one_task_on_each_machine() -> None:
    options = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in rendered("slurm/job.sbatch").splitlines()
        if line.startswith("#SBATCH --") and "=" in line
    )
    assert options["ntasks-per-node"] == "1" and options["nodes"] == "2"
    assert options["signal"] == "TERM@120", "a checkpoint is written before the time is over"
    assert options["time"] == "24:00:00"
