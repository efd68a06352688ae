"""Dropout in whole models: rates, scaling, the backward's masks, seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import Tensors, batch, bert, compiled, dropout_nodes, execute, gpt2, halves, trained

import onward
from onward.graph.graph import Node, attributes

pytestmark = pytest.mark.usefixtures("captures_kept")

MAKERS = {"gpt2": gpt2, "bert": bert}
SITES = 1 + 3 * 2  # embeddings; attention, its projection and the MLP of two layers


def sites_of(kind: str, data: Tensors, ratio: float, **more: Any) -> dict[int, Tensors]:
    """Per site: x and y of the forward, dy and dx of the backward."""
    # composite ops are expanded, so that their masks can be seen
    apart = ["add_layer_norm", "flash_attention"]
    made = compiled(MAKERS[kind](dropout=ratio), data, disable=apart, **more)
    graph = made.differentiated(trained(made))
    names: dict[int, dict[str, str]] = {}
    nodes: list[tuple[Node, bool]] = [(n, bool(n.meta.get("backward"))) for n in graph]
    for node, backward in nodes:
        if node.op_type != "Dropout":
            continue
        site = attributes(node)["site"]
        for part, value in zip(("x", "y"), (node.inputs[0], node.outputs[0]), strict=True):
            name = f"{site}.{'d' * backward}{part}"
            assert value is not None
            assert name not in graph.outputs, "a site draws once forward and once backward"
            graph.outputs[name] = value
            names.setdefault(site, {})["d" * backward + part] = name
    assert not [n for n in dropout_nodes(graph) if n.op_type == "Attention"]
    wanted = [n for found in names.values() for n in found.values()]
    got = execute(made, graph, data, wanted)
    return {site: {k: got[n] for k, n in found.items()} for site, found in names.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("ratio", [0.1, 0.4])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_site_keeps_scales_and_returns_the_same_mask(kind: str, ratio: float) -> None:
    sites = sites_of(kind, batch(4, 16, "right"), ratio)
    assert len(sites) == SITES
    masks = []
    for site, found in sites.items():
        x, y = found["x"], found["y"]
        alive = x != 0  # a masked probability is 0 whatever is drawn
        kept = y != 0
        assert not (kept & ~alive).any()
        n = int(alive.sum())
        assert n > 1000
        sigma = math.sqrt(ratio * (1 - ratio) / n)
        rate = float((kept & alive).sum()) / n
        assert abs(rate - (1 - ratio)) < 4 * sigma, f"site {site} keeps {rate:.4f}"
        torch.testing.assert_close(y[kept], x[kept] / (1 - ratio), rtol=1e-6, atol=0)

        # Dropout applied to the gradient: what `dy`, `dx` are called here is (dx in, dy out)
        given, returned = found["dx"], found["dy"]
        flows = (given != 0) & alive
        assert int(flows.sum()) > 500
        assert not returned[flows & ~kept].any(), f"site {site}: gradient where forward dropped"
        through = flows & kept
        torch.testing.assert_close(
            returned[through], given[through] / (1 - ratio), rtol=1e-6, atol=0
        )
        masks.append((kept, alive))
    # masks of sites of one shape differ
    for i, (kept, alive) in enumerate(masks):
        for other, also in masks[i + 1 :]:
            if kept.shape == other.shape:
                both = alive & also
                same = float((kept == other)[both].double().mean())
                assert same < 1 - ratio * (1 - ratio), "two sites draw one mask"


def test_rows_and_samples_draw_masks_of_their_own() -> None:
    found = sites_of("gpt2", batch(4, 16), 0.4)[0]
    kept = (found["y"] != 0).reshape(4 * 16, -1)  # [rows, features]
    assert len({tuple(row.tolist()) for row in kept}) == len(kept)
    share = kept.double().mean(0)
    assert float(share.min()) > 0.3 and float(share.max()) < 0.9, "a feature is not dropped by rows"


def steps(kind: str, n: int, seed: int | None, **more: Any) -> tuple[list[float], torch.nn.Module]:
    model = MAKERS[kind](dropout=0.1)
    options = onward.TrainerOptions(seed=seed)
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), **more), options=options)
    return [float(trainer.train_step(batch()).loss) for _ in range(n)], model


@pytest.mark.parametrize("kind", MAKERS)
def test_seed_repeats_bitwise_and_steps_differ(kind: str) -> None:
    torch.manual_seed(1)
    first, model = steps(kind, 3, seed=5)
    torch.manual_seed(2)  # a seed of its own does not look at torch's
    second, again = steps(kind, 3, seed=5)
    assert first == second
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    other, _ = steps(kind, 1, seed=6)
    assert other[0] != first[0]
    still, _ = steps(kind, 3, seed=5, lr=0.0, weight_decay=0.0)  # the weights do not move
    assert len(set(still)) == 3, "each step draws new masks"


def test_manual_seed_makes_a_run_repeatable() -> None:
    """A seed decides the losses of a new Trainer, and a loaded state continues its run; the steps
    draw different masks."""

    def trainer_of() -> onward.Trainer:
        return onward.Trainer(gpt2(dropout=0.1), onward.optim.SGD(lr=0.0))

    runs = []
    for seed in (11, 11, 12):
        trainer = trainer_of()
        torch.manual_seed(seed)
        runs.append([float(trainer.train_step(batch()).loss) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(11)
    trainer = trainer_of()
    torch.manual_seed(11)
    float(trainer.train_step(batch()).loss)
    state, saved = torch.get_rng_state(), trainer.state_dict()
    later = float(trainer.train_step(batch()).loss)
    assert float(trainer.train_step(batch()).loss) != later
    torch.manual_seed(12)
    trainer.load_state_dict(saved)
    torch.set_rng_state(state)
    assert float(trainer.train_step(batch()).loss) == later == runs[0][1]


def test_masks_follow_the_sample_not_its_place_in_the_batch() -> None:
    """A half batch told where it starts has the logits that its rows have in the whole."""
    model, data = gpt2(dropout=0.3), batch(4, 12)
    made = compiled(model, data)
    whole = execute(made, made.forward, data, ["output.logits"])["output.logits"]
    for start, half in zip((0, 2), halves(data), strict=True):
        got = execute(made, made.forward, half, ["output.logits"], sample_offset=start)[
            "output.logits"
        ]
        torch.testing.assert_close(got, whole[start : start + 2], rtol=1e-5, atol=1e-6)
    unmoved = execute(made, made.forward, halves(data)[1], ["output.logits"], sample_offset=0)[
        "output.logits"
    ]
    assert not torch.allclose(unmoved, whole[2:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", MAKERS)
def test_evaluation_has_no_dropout(kind: str) -> None:
    model = MAKERS[kind](dropout=0.5)
    trainer = onward.Trainer(model, onward.optim.AdamW())
    data = batch(4, 12, "right")
    result = trainer.eval_step(data)
    assert model.training, "the mode is put back"
    model.eval()
    torch.testing.assert_close(result.loss, model(**data).loss.detach(), rtol=1e-5, atol=0)
    assert torch.equal(result.loss, trainer.eval_step(data).loss)
