"""`examples/plugin`, installed as a package of its own: found, used, and without a trace else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import onward

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "examples" / "plugin"
PROGRAM = Path(__file__).parent / "support" / "plugin_program.py"


def run(*folders: Path) -> dict[str, Any]:
    """What the program says in a new process that finds packages in these folders too."""
    source = Path(onward.__file__).parents[1]
    path = os.pathsep.join(map(str, (source, *folders)))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the plugin is installed into, from a copy: nothing is built in the tree."""
    # asked elsewhere: looking for pip within a process that has torch is warned of
    asked = [sys.executable, "-c", "import setuptools, pip"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("no pip, or no setuptools")
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "plugin", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
         "--no-cache-dir", "--disable-pip-version-check", "--target", str(folder / "site"),
         str(folder / "plugin")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, Any]:
    if not list(site.rglob("_kernels*.so")):
        pytest.skip("no C++ compiler")
    return run(site)


def test_a_model_trains_with_the_plugins_op_and_optimizer_as_in_pytorch(found: Any) -> None:
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-6)
    assert found["eager"][-1] < found["eager"][0]
    assert found["weights"] < 1e-6 < 1e-2 < found["moved"]
    assert found["torch"] < 1e-6, "the plugin's own class, in eager PyTorch"
    assert found["state"] == ["exp_avg"]


def test_a_step_in_the_place_of_the_plugins_is_refused(found: Any) -> None:
    on_the_instance, on_the_class = found["replaced"]
    for text in (on_the_instance, on_the_class):
        assert "optimizer.step has been replaced by replaced.<locals>.<lambda>" in text


def test_the_plugins_kernels_are_used_and_its_pass_is_listed(found: Any) -> None:
    assert found["kernels"].count("example.squared_relu") == 1
    assert found["kernels"].count("example.squared_relu_grad") == 1
    names = list(found["passes"])
    assert found["passes"]["squared_relu"] == 1
    assert names.index("squared_relu") + 1 == names.index("bias_activation")


def test_row_demand_goes_through_the_plugins_op_by_its_trait(found: Any) -> None:
    assert found["rows"] == 0.25, "of the labels a quarter is read"


def test_the_plugins_pass_is_switched_off_by_name(found: Any) -> None:
    off = found["off"]
    assert "squared_relu" not in off["passes"]
    assert not [name for name in off["kernels"] if name.startswith("example.")]
    assert off["losses"] == pytest.approx(found["eager"], rel=1e-6)


def test_a_plugin_is_loaded_with_the_first_need_and_not_before(found: Any) -> None:
    assert found["early"] == []


def test_the_doctor_lists_the_plugin(found: Any) -> None:
    assert found["listed"] == ["example (onward_example:register, onward-example 0.1.0)"]


def test_a_name_that_the_plugin_has_is_refused_with_both_places(found: Any) -> None:
    for text in ("SquaredRelu", "onward_example.squared_relu._body", "__main__.meets", "fix: "):
        assert text in found["meets"]


def test_without_the_plugin_nothing_of_it_is_there(site: Path) -> None:
    found = run()
    assert not [name for name in found["kernels"] if name.startswith("example.")]
    assert "squared_relu" not in found["passes"] and "bias_activation" in found["passes"]
    assert not {"SquaredRelu", "SquaredReluGrad", "SignumUpdate"} & {*found["ops"]}
    assert "Signum" not in found["optimizers"] and "AdamW" in found["optimizers"]
    assert found["modules"] == []
    assert list(site.iterdir()), "the plugin was there to be found"


def test_the_plugin_needs_one_module_of_onward() -> None:
    """So that what it is written with is public."""
    sources = sorted((PLUGIN / "src").rglob("*.py"))
    lines = [line for path in sources for line in path.read_text().splitlines()]
    imported = {line.split()[1] for line in lines if line.startswith(("from onward", "import onw"))}
    named = {name for name in imported if not name.startswith("onward_example")}
    assert named == {"onward", "onward.extend"}
    assert {line for line in lines if line.startswith("from onward import")} == {
        "from onward import extend"
    }
