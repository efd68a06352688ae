"""Models of sentence-transformers as encoders of two towers: poolings, layers, the hub's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tower_runs import PAIRS, config, described

from onward.recipes.describe import describe
from onward.recipes.options import InputError
from onward.recipes.start_model import build_model
from onward.recipes.tower_settings import HEAD_FILE, read_settings


def written(tmp_path: Path, **options: Any) -> tuple[Path, Any]:
    """A folder of towers with random weights, and the towers."""
    folder = tmp_path / "encoder"
    job = described(tmp_path, **options).job
    folder.mkdir()
    model: Any = build_model(job.config, job.model_config)
    model.save_pretrained(folder)
    for name in job.task.tokenizer_folders(job.model_config):
        job.processor.save_pretrained(folder / name)
    return folder, model


def encoder_folder(tmp_path: Path, pooling: str = "cls") -> Path:
    """A folder of sentence-transformers with random weights, as that library writes it."""
    folder, _ = written(tmp_path, pooling=pooling)
    (folder / HEAD_FILE).unlink()
    raw = json.loads((folder / "config.json").read_text())
    del raw["two_towers"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def pooling_of(tmp_path: Path, name: str, **options: Any) -> str:
    loaded = {"model_name_or_path": name, "vocab_size": None, "config_overrides": None}
    settings = read_settings(describe(config(tmp_path, **loaded, **options)).job.model_config)
    assert settings is not None
    return settings.pooling


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Puts a folder into the hub's cache, and returns its name there."""

    def put(folder: Path) -> str:
        home = tmp_path / "hub" / "models--someone--encoder"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folder, home / "snapshots" / ("0" * 40))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return "someone/encoder"

    return put


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_a_model_of_the_hub_gives_its_pooling(
    pooling: str, tmp_path: Path, on_the_hub: Callable[[Path], str]
) -> None:
    assert pooling_of(tmp_path, on_the_hub(encoder_folder(tmp_path, pooling))) == pooling


def test_a_model_of_the_hub_that_cannot_be_asked_is_told(
    tmp_path: Path, on_the_hub: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encoder_folder(tmp_path)
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")
    assert pooling_of(tmp_path, str(folder)) == "mean"
    assert "sentence-transformers" not in capsys.readouterr().err
    name = on_the_hub(folder)
    assert pooling_of(tmp_path, name) == "mean"
    assert f"no connection tells whether {name} is a model of sentence" in capsys.readouterr().err
    missing = tmp_path / "hub" / "models--someone--encoder" / ".no_exist" / ("0" * 40)
    missing.mkdir(parents=True)
    (missing / "modules.json").touch()  # as huggingface_hub keeps what is not there
    assert pooling_of(tmp_path, name) == "mean"
    assert "sentence-transformers" not in capsys.readouterr().err


def test_towers_of_the_hub_are_whole(tmp_path: Path, on_the_hub: Callable[[Path], str]) -> None:
    """Two encoders and the weights beside them, by a hub name."""
    folder, towers = written(tmp_path, towers="separate", pooling="weighted")
    with torch.no_grad():
        for value in towers.document.parameters():
            value += 1
    shutil.rmtree(folder / "document")
    towers.save_pretrained(folder)
    options = {"vocab_size": None, "config_overrides": None, "seed": 7}
    name = on_the_hub(folder)
    job = describe(config(tmp_path, model_name_or_path=name, **options)).job
    found, want = build_model(job.config, job.model_config).state_dict(), towers.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)


MODES = {  # settings of a layer, as its library writes them, and the poolings that they say
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode_mean_tokens": True},
    "mean ": {"pooling_mode_cls_token": False},
    "mean  ": {"word_embedding_dimension": 32},
    "mean   ": {"pooling_mode": ["mean"]},
    "lasttoken": {"pooling_mode_lasttoken": True},
    "lasttoken ": {"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True},
    "max": {"pooling_mode_max_tokens": True},
    "weightedmean": {"pooling_mode_weightedmean_tokens": True},
    "mean_sqrt_len_tokens": {"pooling_mode_mean_sqrt_len_tokens": True},
    "cls, mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    "max, lasttoken": {"pooling_mode": ["max", "lasttoken"]},
    "pooling_mode_new": {"pooling_mode_new": True},
}


def test_each_pooling_is_taken_or_refused(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = encoder_folder(tmp_path)
    for said, settings in MODES.items():
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32} | settings)
        )
        if said != "pooling_mode_new":
            theirs: Any = Pooling.load(str(folder), subfolder="1_Pooling").pooling_mode
            assert (theirs if isinstance(theirs, str) else ", ".join(theirs)) == said.strip()
        if said.strip() in ("cls", "mean", "lasttoken"):
            assert pooling_of(tmp_path, str(folder)) == said.strip()
            continue
        with pytest.raises(InputError, match=rf"is none of Onward's \({said}\)"):
            pooling_of(tmp_path, str(folder))
        assert pooling_of(tmp_path, str(folder), pooling="mean") == "mean"


def layers(*kinds: str) -> list[dict[str, str]]:
    package = "sentence_transformers.models"
    return [
        {
            "path": "" if not i else f"{i}_{kind}",
            "type": f"{package}.{kind}" if "." not in kind else kind,
        }
        for i, kind in enumerate(kinds)
    ]


OTHERS: dict[str, tuple[Any, str]] = {
    "Dense": (layers("Transformer", "Pooling", "Dense", "Normalize"), "has a Dense layer"),
    "Dropout": (layers("Transformer", "Pooling", "Dropout"), "has a Dropout layer"),
    "order": (layers("Transformer", "Normalize", "Pooling"), "has a Normalize layer"),
    "words": (layers("WordEmbeddings", "Pooling"), "has a WordEmbeddings layer"),
    "own code": (layers("custom_st.Transformer", "Pooling"), "has a custom_st.Transformer layer"),
    "no settings": ([*layers("Transformer"),
        {"path": "3_Pooling", "type": "sentence_transformers.models.Pooling"}],
        "no 3_Pooling/config.json"),
    "outside": ([{"path": "../x", "type": "sentence_transformers.models.Transformer"}],
                r"'\.\./x' is no folder beside it"),
    "no list": ({}, "no JSON list"),
    "no layers": ([1], "without type or path"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_towers_lack_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules, told = OTHERS[name]
    folder = encoder_folder(tmp_path)
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=told):
        pooling_of(tmp_path, str(folder))
    capsys.readouterr()
    assert pooling_of(tmp_path, str(folder), pooling="mean") == "mean"
    layer = told.removeprefix("has a ")
    assert (f"note: the {layer} of" in capsys.readouterr().err) == told.startswith("has a ")


def test_a_tokenizer_that_pads_on_the_left_gives_the_same_vectors(tmp_path: Path) -> None:
    """The first state of a row, and the last one, are a text's."""
    from sentence_transformers import SentenceTransformer

    for pooling in ("cls", "lasttoken"):
        folder = encoder_folder(tmp_path, pooling)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
        options = {"vocab_size": None, "config_overrides": None}
        job = describe(config(tmp_path, model_name_or_path=str(folder), **options)).job
        batch = job.first_batch(job.train, 6)
        found = build_model(job.config, job.model_config).eval()(**batch)
        one_by_one = SentenceTransformer(str(folder), device="cpu")
        want = np.stack([one_by_one.encode(row["query"]) for row in PAIRS[:6]])
        np.testing.assert_allclose(found.query_embeds.detach().numpy(), want, rtol=1e-3, atol=1e-5)
        shutil.rmtree(folder)
