"""Recurrent layers beside eager PyTorch: every option with every other, one capture for all sizes
of batch and sequence, gradients of inputs, states and weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch
from loops import Pair
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

import onward
from onward.graph.graph import attributes

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "lstm projected": lambda i, h, **o: nn.LSTM(i, h, proj_size=2, **o),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda i, h, **o: nn.RNN(i, h, nonlinearity="relu", **o),
}
STATES = ("no states", "states of the batch", "trained states")
OPTIONS = [
    (kind, *rest)
    for kind, *rest in itertools.product(
        KINDS, (1, 3), (False, True), (False, True), (True, False), STATES
    )
]
SIZES = ((4, 3), (6, 5), (2, 3))


def weighed(made: Any) -> torch.Tensor:
    """The sum of all numbers, each with a different weight."""
    flat = torch.cat([y.reshape(-1) for y in pytree.tree_leaves(made)])
    return (flat * torch.cos(torch.arange(flat.numel()) * 0.7 + 0.3)).sum()


class Net(nn.Module):
    """A recurrent layer in which the input, and initial states where there are any, have
    gradients."""

    def __init__(self, layer: nn.Module, states: str = STATES[0], used: Any = None) -> None:
        super().__init__()
        self.layer, self.states, self.used = layer, states, used
        self.scale = nn.Parameter(torch.randn(5))
        if states == "trained states":
            self.first = nn.ParameterList(
                nn.Parameter(torch.randn(d, 1, n)) for d, n in widths(layer)
            )
        elif states != STATES[0]:
            self.first = nn.ParameterList(nn.Parameter(torch.randn(n)) for _, n in widths(layer))

    def forward(self, x: torch.Tensor, *given: torch.Tensor, **more: Any) -> torch.Tensor:
        given = (*given, *more.values())
        x = x * self.scale
        if self.states == STATES[0]:
            made = self.layer(x)
        else:
            batch = x.shape[0 if self.layer.batch_first else 1]
            if given:
                hx = tuple(g * p for g, p in zip(given, self.first, strict=True))
            else:
                hx = tuple(p.expand(-1, batch, -1).contiguous() for p in self.first)
            made = self.layer(x, hx if isinstance(self.layer, nn.LSTM) else hx[0])
        return weighed(made if self.used is None else self.used(made))


def widths(layer: Any) -> list[tuple[int, int]]:
    """The first dim (layers times directions) and the width of each state of a recurrent layer."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    inner = layer.proj_size or layer.hidden_size
    return [(count, inner), (count, layer.hidden_size)][: 2 if isinstance(layer, nn.LSTM) else 1]


def batch_of(model: Net, steps: int, samples: int) -> dict[str, torch.Tensor]:
    shape = (samples, steps, 5) if model.layer.batch_first else (steps, samples, 5)
    data = {"x": torch.randn(shape)}
    if model.states == STATES[1]:
        for i, (count, width) in enumerate(widths(model.layer)):
            data[f"s{i}"] = torch.randn(count, samples, width)
    return data


def assert_eagers(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tiny.Compiled:
    """Assert that one capture serves all batches and gives eager's numbers."""
    made = tiny.compiled(model, batches[0])
    graph = made.differentiated(tiny.trained(made))
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    for data in batches:
        have, want = tiny.plain(tiny.execute(made, graph, data, names)), eager(model, data)
        assert set(have) == set(want)
        for key, y in want.items():
            torch.testing.assert_close(have[key], y, rtol=2e-5, atol=2e-5, msg=key)
    return made


def eager(model: nn.Module, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tiny.eager(model, data, torch.float32)


@pytest.mark.sample(8)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_option_is_eagers_at_all_sizes(options: tuple[Any, ...]) -> None:
    kind, layers, bidirectional, batch_first, bias, states = options
    torch.manual_seed(0)
    layer = KINDS[kind](
        5, 4, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias
    )
    model = Net(layer, states)
    made = assert_eagers(model, [batch_of(model, *sizes) for sizes in SIZES])
    steps = [node for node in made.forward if node.op_type == "Recurrence"]
    assert len(steps) == layers * (2 if bidirectional else 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("used", ["all", "the last step", "h", "c", "one state of a layer"])
def test_results_that_nobody_reads(used: str, training: bool) -> None:
    takes = {
        "all": lambda made: made,
        "the last step": lambda made: made[0][-1],
        "h": lambda made: made[1][0],
        "c": lambda made: made[1][1],
        "one state of a layer": lambda made: made[1][1][1],
    }
    torch.manual_seed(0)
    model = Net(nn.LSTM(5, 4, 2, bidirectional=True), used=takes[used]).train(training)
    made = assert_eagers(model, [batch_of(model, 4, 3), batch_of(model, 5, 2)])
    assert made.captured


@pytest.mark.parametrize("sizes", [(1, 3), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_and_one_sample(kind: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind](5, 3, bidirectional=True, num_layers=2))
    assert_eagers(model, [batch_of(model, *sizes)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind](5, 3))
    assert_eagers(model, [{"x": torch.randn(n, 5)} for n in (4, 7)])


def test_hidden_units_of_one() -> None:
    for layer in (nn.LSTM(5, 1), nn.GRU(5, 1), nn.RNN(5, 1)):
        model = Net(layer)
        assert_eagers(model, [batch_of(model, *sizes) for sizes in SIZES])


class Twice(nn.Module):
    """One layer applied to both halves of a sequence, the first one's final state given to the
    second."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, state = self.layer(x * self.scale)
        second, _ = self.layer(first.flip(0)[:, :, :5], state)
        return weighed((first, second))


@pytest.mark.parametrize("layer", [nn.LSTM(5, 5, 2), nn.GRU(5, 6)], ids=["lstm", "gru"])
def test_a_layer_used_twice(layer: nn.Module) -> None:
    assert_eagers(Twice(layer), [{"x": torch.randn(n, 3, 5)} for n in (4, 6)])


CELLS: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda i, h, **o: nn.RNNCell(i, h, nonlinearity="relu", **o),
}


class Loop(nn.Module):
    """A loop over a cell, with an initial state given or not."""

    def __init__(self, cell: nn.Module, given: bool) -> None:
        super().__init__()
        self.cell, self.scale = cell, nn.Parameter(torch.randn(5))
        self.first = nn.Parameter(torch.randn(4)) if given else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        if self.first is not None:
            state = self.first.expand(x.shape[0], -1)
            state = (state, state * 0.5) if isinstance(self.cell, nn.LSTMCell) else state
        states = []
        for step in range(3):
            state = self.cell(x[:, step] * self.scale, state)
            states.append(state)
        return weighed(states)


@pytest.mark.sample(1)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_eagers(kind: str, bias: bool, given: bool) -> None:
    torch.manual_seed(0)
    model = Loop(CELLS[kind](5, 4, bias=bias), given)
    assert_eagers(model, [{"x": torch.randn(n, 3, 5)} for n in (4, 2)])


@pytest.mark.parametrize("kind", ["lstm", "gru", "relu"])
def test_dropout_between_layers_is_one_mask_that_backward_draws_again(kind: str) -> None:
    """Eager PyTorch runs the two layers one by one, with the mask that Onward drew between them."""
    torch.manual_seed(0)
    layer = KINDS[kind](5, 40, num_layers=2, dropout=0.4)
    model = Net(layer, used=lambda made: made[0])
    data = batch_of(model, 6, 5)
    made = tiny.compiled(model, data)
    graph = made.differentiated(tiny.trained(made))
    (drop,) = [n for n in tiny.dropout_nodes(graph) if not n.meta.get("backward")]
    assert attributes(drop)["ratio"] == pytest.approx(0.4)
    assert drop.inputs[0] is not None
    graph.outputs |= {"before": drop.inputs[0], "after": drop.outputs[0]}
    names = [n for n in graph.outputs if not n.startswith("output")]
    have = tiny.plain(tiny.execute(made, graph, data, names))
    mask = have.pop("after") / have.pop("before")
    drawn = mask[mask.isfinite()]  # of what was no 0 before
    kept, mask = (drawn != 0).float().mean(), mask.nan_to_num(0.0)
    assert abs(float(kept) - 0.6) < 0.06
    torch.testing.assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 1 / 0.6))
    apart = [KINDS[kind](5 if i == 0 else 40, 40) for i in range(2)]
    for i, one in enumerate(apart):
        own = {n: p for n, p in layer.named_parameters() if n.endswith(f"l{i}")}
        for name, p in own.items():
            getattr(one, name.replace(f"l{i}", "l0")).data.copy_(p.data)
    scale = model.scale.detach().clone().requires_grad_()
    first = apart[0](data["x"] * scale)[0]
    loss = weighed(apart[1](torch.where(mask != 0, first * mask, 0.0))[0])
    loss.backward()
    torch.testing.assert_close(have["loss"], loss.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(have["grad.scale"], scale.grad, rtol=2e-4, atol=2e-5)
    for i, one in enumerate(apart):
        for name, p in one.named_parameters():
            found = have[f"grad.layer.{name.replace('l0', f'l{i}')}"]
            torch.testing.assert_close(found, p.grad, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("layers", "training", "sites"), [(3, True, 2), (3, False, 0), (1, True, 0)]
)
def test_each_layer_but_the_last_is_a_site_of_dropout(
    layers: int, training: bool, sites: int
) -> None:
    with pytest.warns(UserWarning) if layers == 1 else torch.enable_grad():
        layer = nn.GRU(5, 4, num_layers=layers, dropout=0.3, bidirectional=True)
    made = tiny.compiled(Net(layer).train(training), {"x": torch.randn(4, 3, 5)})
    drops = tiny.dropout_nodes(made.forward)
    assert len(drops) == sites
    assert len({attributes(n)["site"] for n in drops}) == sites


class Tagger(nn.Module):
    """A tagger of sequences of any length, its padding left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.layer = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.head(self.layer(self.embed(ids))[0])
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_training_on_sequences_of_other_lengths_is_plain_pytorchs() -> None:
    torch.manual_seed(0)
    pair = Pair(Tagger())
    for samples, steps in ((3, 4), (2, 9), (5, 4), (4, 6)):
        ids, labels = torch.randint(0, 11, (samples, steps)), torch.randint(0, 4, (samples, steps))
        labels[ids == 0] = -100
        pair.step(ids, labels)


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_runs_the_step_at_any_length(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind](5, 4, num_layers=2, bidirectional=True), STATES[2])
    made = tiny.compiled(model, batch_of(model, 4, 3))
    graph = made.differentiated(tiny.trained(made))
    for sizes in SIZES:
        data = batch_of(model, *sizes)
        have, want = tiny.plain(tiny.onnxruntime(made, graph, data)), eager(model, data)
        for key, y in want.items():
            torch.testing.assert_close(have[key], y, rtol=2e-5, atol=2e-5, msg=key)


class Called(nn.Module):
    """A model that calls torch.gru with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = nn.GRU(5, 4), nn.Parameter(torch.randn(1, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: list[torch.Tensor] = list(self.layer.parameters())
        made = torch.gru(
            x, self.first, weights, has_biases=True, num_layers=1, dropout=0.0,
            train=self.training, bidirectional=False, batch_first=False,
        )  # fmt: skip
        return weighed(made)


def test_the_function_by_keywords() -> None:
    assert_eagers(Called(), [{"x": torch.randn(n, 3, 5)} for n in (4, 6)])


class Packing(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.layer(packed)[0])[0].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_refused(kind: str) -> None:
    data = {"x": torch.randn(4, 3, 5), "lengths": torch.tensor([2, 4, 1])}
    with pytest.raises(
        onward.CaptureError, match=r"packed sequence .*; fix: give the layer the padd"
    ):
        tiny.compiled(Packing(KINDS[kind](5, 4)), data)


def test_torch_is_as_it_was_after_a_capture() -> None:
    before = {n: getattr(torch._VF, n) for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    tiny.compiled(Net(nn.LSTM(5, 4)), {"x": torch.randn(4, 3, 5)})
    assert {n: getattr(torch._VF, n) for n in before} == before
