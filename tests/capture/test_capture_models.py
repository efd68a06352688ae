"""Captured graphs of real models: inputs, types, dropout sites, ties, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import (
    VOCABULARY,
    Mlp,
    batch,
    bert,
    compiled,
    dropout_nodes,
    execute,
    gpt2,
    mlp,
    tokens,
)
from torch import nn

from onward.capture import CapturedModule, CaptureRequest, capture
from onward.errors import CaptureError
from onward.graph.file import save
from onward.graph.graph import Graph, Role, attributes, type_of
from onward.graph.names import parameter_name


def labelled(classes: int, padding: str | None) -> dict[str, torch.Tensor]:
    data = batch(4, 12, padding)
    return {**data, "labels": tokens(4, 1)[:, 0] % classes}


MODELS: dict[str, tuple[Any, Any, int]] = {
    "gpt2": (gpt2, lambda padding: batch(4, 12, padding), 1 + 3 * 2),
    "bert-mlm": (bert, lambda padding: batch(4, 12, padding), 1 + 3 * 2),
    "bert-classify": (
        lambda: bert(classes=3),
        lambda padding: labelled(3, padding),
        1 + 3 * 2 + 1,
    ),
}


def captured(name: str, padding: str | None = None) -> tuple[nn.Module, Any, CapturedModule]:
    make, data_of, _ = MODELS[name]
    model, data = make(), data_of(padding)
    return model, data, capture(CaptureRequest(model, (), data))


def symbols_in(graph: Graph) -> set[str]:
    values = [*graph.inputs, *(v for n in graph for v in n.outputs)]
    sizes = [s for v in values for s in type_of(v).shape if not isinstance(s, int)]
    return {name for size in sizes for name in size.symbols}


@pytest.mark.sample(3)
@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", MODELS)
def test_training_graph_has_shared_symbols_and_every_dropout(name: str, padding: Any) -> None:
    model, _, got = captured(name, padding)
    inputs = {v.name: str(type_of(v)) for v in got.graph.inputs_with(Role.BATCH)}
    ids = "i64[B,T]"
    labels = "i64[B]" if name == "bert-classify" else ids
    expected = {"input_ids": ids, "labels": labels} | ({"attention_mask": ids} if padding else {})
    assert inputs == {f"batch.{n}": type for n, type in expected.items()}
    assert symbols_in(got.graph) == {"B", "T"}
    outputs = {n: str(type_of(v)) for n, v in got.graph.outputs.items()}
    logits = "f32[B,3]" if name == "bert-classify" else f"f32[B,T,{VOCABULARY}]"
    assert outputs == {"loss": "f32[]", "output.logits": logits}

    nodes = dropout_nodes(got.graph)
    sites = [attributes(n)["site"] for n in nodes]
    assert len(sites) == len(set(sites)) == MODELS[name][2]
    attention = [n for n in nodes if n.op_type == "Attention"]
    assert len(attention) == 2
    assert all(attributes(n)["ratio"] == pytest.approx(0.1) for n in nodes)
    # every row of every site has its sample's coordinate, so that micro-batches draw alike
    assert all(attributes(n)["sample_dim"] == 0 for n in nodes)
    # a batch leaf or parameter is an input once, and every trained parameter is there
    names = [v.name for v in got.graph.inputs]
    assert len(names) == len(set(names))
    assert {id(p) for p in got.parameters.values()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_graph_has_no_dropout(name: str) -> None:
    make, data_of, _ = MODELS[name]
    got = capture(CaptureRequest(make().eval(), (), data_of(None)))
    assert dropout_nodes(got.graph) == []
    assert got.graph.inputs_with(Role.RANDOM) == []


def test_dropout_of_zero_is_no_site() -> None:
    assert dropout_nodes(capture(CaptureRequest(gpt2(dropout=0.0), (), batch())).graph) == []


def test_plain_module_with_loss_function() -> None:
    model = mlp(dropout=0.5)
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    got = capture(CaptureRequest(model, (x,), {}, (y,), nn.functional.cross_entropy))
    types = {v.name: str(type_of(v)) for v in got.graph.inputs_with(Role.BATCH)}
    assert types == {"batch.x": "f32[B,8]", "batch.target": "i64[B]"}
    assert str(type_of(got.graph.outputs["loss"])) == "f32[]"
    assert len(dropout_nodes(got.graph)) == 1


def test_model_without_loss_is_told_so() -> None:
    with pytest.raises(CaptureError, match="reduce it to a scalar"):
        capture(CaptureRequest(mlp(), (torch.randn(6, 8),), {}))
    unlabelled = {"input_ids": tokens(4, 12)}
    with pytest.raises(CaptureError, match="no loss; fix: pass labels"):
        capture(CaptureRequest(Two().train(), (torch.randn(6, 8),), {}))
    with pytest.raises(CaptureError, match="fix:"):
        capture(CaptureRequest(gpt2(), (), unlabelled))


class Two(Mlp):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y + 1


def test_tied_weights_are_one_input_and_equal_weights_are_two() -> None:
    model, _, got = captured("gpt2")
    tied = model.get_parameter("transformer.wte.weight")
    assert model.get_parameter("lm_head.weight") is tied
    assert sum(p is tied for p in got.parameters.values()) == 1
    shape = (VOCABULARY, 32)
    assert sum(tuple(type_of(v).shape) == shape for v in got.graph.inputs_with(Role.PARAM)) == 1

    class Twins(Mlp):
        def __init__(self) -> None:
            super().__init__(width=16, classes=16)
            with torch.no_grad():
                self.outer.weight.copy_(self.inner.weight)
                self.outer.bias.copy_(self.inner.bias)

    twins = Twins().train()
    x, y = torch.randn(6, 16), torch.arange(6)
    made = capture(CaptureRequest(twins, (x,), {}, (y,), nn.functional.cross_entropy))
    assert len(made.parameters) == len(made.graph.inputs_with(Role.PARAM)) == 4


class Sum(nn.Module):
    """`mean((a - 2 b) w)`: its two inputs play different parts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((a - 2 * b) * self.w).mean()}


def test_one_tensor_given_twice_stays_two_inputs() -> None:
    x = torch.randn(4, 3)
    made = compiled(Sum(), {"a": x, "b": x})
    assert [v.name for v in made.captured.graph.inputs_with(Role.BATCH)] == ["batch.a", "batch.b"]
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    got = execute(made, made.forward, {"a": a, "b": b}, ["loss"])["loss"]
    torch.testing.assert_close(got, (a - 2 * b).mean())


def test_weights_are_the_users_own() -> None:
    model, _, got = captured("bert-mlm")
    named = {parameter_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    for name, tensor in got.parameters.items():
        assert tensor is named[name]
        assert tensor.data_ptr() == named[name].data_ptr()


def test_saved_graph_names_modules_but_no_source_file(tmp_path: Any) -> None:
    for name in MODELS:
        _, _, got = captured(name)
        path = tmp_path / f"{name}.onnx"
        save(got.graph, path)
        written = path.read_bytes()
        assert b"attention" in written or b"attn" in written
        for part in (b"site-packages", b".py", b"/home", b"torch/", b"/usr", b"transformers/"):
            assert part not in written, part


# ---- sizes


def shapes(got: CapturedModule, size: int, length: int) -> dict[str, int] | None:
    return got.dims(list(batch(size, length, "right").values()))


def test_new_sizes_fit_and_others_are_refused() -> None:
    _, _, got = captured("gpt2", "right")
    assert shapes(got, 4, 12) == {"B": 4, "T": 12}
    assert shapes(got, 7, 31) == {"B": 7, "T": 31}
    assert shapes(got, 2, 2) == {"B": 2, "T": 2}
    assert shapes(got, 1, 12) is None  # broadcasting is another program
    assert shapes(got, 4, 1) is None
    tensors = list(batch(4, 12, "right").values())
    for position in range(len(tensors)):
        for cut in (slice(0, 3), (slice(None), slice(0, 9))):
            odd = [t[cut] if i == position else t for i, t in enumerate(tensors)]
            assert got.dims(odd) is None, f"leaf {position} of another size"


@pytest.mark.parametrize(("size", "length"), [(1, 12), (4, 1), (1, 1)])
def test_size_one_is_captured_for_itself(size: int, length: int) -> None:
    got = capture(CaptureRequest(gpt2(), (), batch(size, length)))
    assert shapes_without_mask(got, size, length) is not None
    assert shapes_without_mask(got, size + 2, length) is None or size > 1
    assert shapes_without_mask(got, size, length + 2) is None or length > 1
    fixed = {"B"} if size > 1 else set()
    assert symbols_in(got.graph) == fixed | ({"T"} if length > 1 else set())


def shapes_without_mask(got: CapturedModule, size: int, length: int) -> dict[str, int] | None:
    return got.dims(list(batch(size, length).values()))


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_batch_as_large_as_long_does_not_tie_the_two(make: Any) -> None:
    """A first batch with B == T says nothing about the next."""
    model = make(dropout=0.0)
    made = compiled(model, batch(6, 6, "right"))
    assert symbols_in(made.captured.graph) == {"B", "T"}
    other = batch(3, 11, "right", seed=5)
    got = execute(made, made.forward, other, ["loss"])["loss"]
    torch.testing.assert_close(got, model(**other).loss.detach(), rtol=1e-5, atol=0)
