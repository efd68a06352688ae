"""What is in the package besides its Python sources."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_a_typed_package_is_marked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks setuptools what it would copy."""
    dist = pytest.importorskip("setuptools.dist")
    monkeypatch.chdir(ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Typing :: Typed" in project["classifiers"]
    distribution = dist.Distribution({"src_root": str(ROOT)})
    distribution.parse_config_files()
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    copied = {package: {Path(name).name for name in names} for package, _, _, names in (
        command.data_files
    )}  # fmt: skip
    assert copied["onward"] == {"py.typed"}
