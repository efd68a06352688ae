"""What torch.export refuses is said in one line that can be read: where, what, and a way on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import onward

LONGEST = 300
INNER = (  # words of torch.export's own
    "zuf", "u0", "unhinted", "Size-like", "fake tensor", "file an issue", "tensor subclasses",
    "torch.Size", "lifted_tensor", "def forward",
)  # fmt: skip


class Inner(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(4, 4), does
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, self.layer(x))


class Net(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Inner(does)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean()}


def drawn_number(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(1).item()


def drawn_branch(m: Any, y: torch.Tensor) -> torch.Tensor:
    return 2.0 * y if torch.rand(1).item() < 0.5 else y


def read_number(m: Any, y: torch.Tensor) -> torch.Tensor:
    number: Any = y.mean().tolist()
    return y * number


def read_as_float(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(y.detach().abs().sum())


def read_as_size(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[: int(y.abs().sum()) + 1]


def written_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.kept.data.copy_(y.detach().mean(0))
    return y + m.kept


def written_local(m: Any, y: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(4)
    t.data.copy_(y.detach().mean(0))
    return y + t


def through_numpy(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(y.detach().numpy().mean())


REFUSED: dict[Callable[[Any, torch.Tensor], torch.Tensor], str] = {
    drawn_number: "into Python",
    drawn_branch: "into Python",
    read_number: "into Python",
    read_as_float: "into Python",
    read_as_size: "into Python",
    written_data: r"through \.data",
    written_local: r"through \.data",
    through_numpy: "numpy",
}


def assert_readable(text: str) -> None:
    assert len(text) <= LONGEST, text
    assert "\n" not in text
    assert "fix: " in text, text
    assert not [w for w in INNER if w in text], text


@pytest.mark.parametrize("does", REFUSED, ids=lambda f: f.__name__)
def test_a_refusal_is_a_line(does: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net(does)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onward.Trainer(model, optimizer, options={"strict": True})
    with pytest.raises(onward.CaptureError, match=REFUSED[does]) as refused:
        trainer.train_step(x=torch.ones(3, 4))
    assert_readable(str(refused.value))
    assert capfd.readouterr().err == "", "nothing of torch.export's is printed"


@pytest.mark.parametrize("does", REFUSED, ids=lambda f: f.__name__)
def test_an_accelerated_model_says_it_once_and_goes_on(does: Any) -> None:
    model = onward.accelerate(Net(does))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(3, 4))["loss"].backward()
    lines = [line for w in told for line in str(w.message).splitlines()]
    assert lines
    assert all(len(line) <= LONGEST for line in lines)
    assert not [w for w in INNER for line in lines if w in line], lines


def test_what_nobody_knows_is_said_with_its_place() -> None:
    model = Net(lambda m, y: (_ for _ in ()).throw(RuntimeError("strange " * 100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(onward.CaptureError, match="could not trace inner: strange") as refused:
        onward.Trainer(model, optimizer).train_step(x=torch.ones(3, 4))
    assert len(str(refused.value)) <= LONGEST


SMALL: dict[str, Any] = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip


def bart(**drops: Any) -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL, **drops))


def m2m(**drops: Any) -> Any:
    config = transformers.M2M100Config(**SMALL, **drops)
    return transformers.M2M100ForConditionalGeneration(config)


def opt(**drops: Any) -> Any:
    config = transformers.OPTConfig(
        vocab_size=60, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, **drops,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def of_speech(kind: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        **{"feature_projection_input_dim": 8} if "Bert" in kind else {}, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCTC")(config)


class Dropping(torch.nn.Module):
    """With an option of its own, and no configuration."""

    def __init__(self, layer_drop: float) -> None:
        super().__init__()
        self.first, self.layer_drop = torch.nn.Embedding(60, 8), layer_drop
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.first(input_ids)
        for layer in self.layers:
            if not self.training or torch.rand(()) > self.layer_drop:
                x = layer(x)
        return {"loss": x.square().mean()}


# what makes a model, where it drops layers, the option
DROPS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "BART's encoder": (
        lambda: bart(encoder_layerdrop=0.5), "model.encoder", "config.encoder_layerdrop",
    ),
    "BART's decoder": (
        lambda: bart(decoder_layerdrop=0.5), "model.decoder", "config.decoder_layerdrop",
    ),
    "M2M-100, both": (
        lambda: m2m(encoder_layerdrop=0.5, decoder_layerdrop=0.25), "model.encoder",
        "config.encoder_layerdrop",
    ),
    "OPT": (lambda: opt(layerdrop=0.5), "model.decoder", "config.layerdrop"),
    "wav2vec 2": (
        lambda: of_speech("Wav2Vec2", layerdrop=0.5), "wav2vec2.encoder", "config.layerdrop",
    ),
    "wav2vec 2 BERT, at most": (
        lambda: of_speech("Wav2Vec2Bert", layerdrop=0.5), "wav2vec2_bert.encoder",
        "config.layerdrop",
    ),
    "an option of its own": (lambda: Dropping(0.5), "the model", "layer_drop"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Trainer", "accelerate", "strict"])
@pytest.mark.parametrize("name", DROPS)
def test_layer_drop_is_called_so(name: str, way: str) -> None:
    make, path, option = DROPS[name]
    torch.manual_seed(0)
    model, ids = make().train(), torch.randint(3, 60, (3, 7))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "wav2vec" in name:
        of = "input_features" if "BERT" in name else "input_values"
        batch = {of: torch.randn(2, 40, 8) if "BERT" in name else torch.randn(2, 400),
                 "labels": ids[:2, :3]}  # fmt: skip
    if way == "accelerate":
        onward.accelerate(model)
        with pytest.warns(onward.errors.EagerWarning) as said:
            model(**batch)
        [found] = [str(w.message) for w in said]
        if path != "the model":  # which no region can be
            assert f"  {path}: layer drop skips layers at random; fix: {option} = 0" in found
        assert "layer drop" in found and f"fix: {option} = 0" in found
    else:
        with pytest.raises(onward.CaptureError) as refused:
            if way == "strict":
                onward.accelerate(model, strict=True)(**batch)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                onward.Trainer(model, optimizer).train_step(**batch)
        found = str(refused.value)
        assert re.match(rf"{path} uses layer drop: .*; fix: {option} = 0", found)
    assert len(found) <= LONGEST


def test_another_question_at_such_a_place_is_not_called_layer_drop() -> None:
    class Both(Dropping):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            x = self.first(input_ids)
            if x.sum() > 0.25:
                x = x * 2
            return {"loss": x.square().mean()}

    model, ids = Both(0.5), torch.randint(3, 60, (3, 7))
    with pytest.raises(onward.CaptureError, match="data-dependent control flow at model: "):
        onward.accelerate(model, strict=True)(ids, ids)
