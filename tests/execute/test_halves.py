"""A forward now and its backward later: gradients for any cotangents, and the blocks in between.

The oracle is torch's autograd over the same outputs, in double precision for the law of same
numbers. Where a batch runs twice, or beside others, its gradients have the same bits.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import row_programs
import tiny
import torch
from tiny import FEEDS, Compiled, Tensors, batch, compiled, execute_packed, plain, trained
from tiny_families import CASES, allowed

from onward.errors import OnwardError
from onward.execute import ExecutableHalves, Memory, Residuals
from onward.graph.graph import Graph, type_of
from onward.graph.names import OUTPUT, user_name
from onward.plan import MemoryRegion, Plan
from onward.rewrite import split_counting

pytestmark = pytest.mark.usefixtures("captures_kept")


@dataclass
class Halves:
    """A model's two halves in memory, and what a test asks of them."""

    made: Compiled
    ends: list[str]
    plan: Plan
    memory: Memory
    executable: ExecutableHalves

    def forward(self, data: Mapping[str, torch.Tensor], **feeds: Any) -> Residuals:
        tensors = list(data.values())
        leaves = {self.made.captured.leaves[i]: t for i, t in enumerate(tensors)}
        dims = self.made.captured.dims(tensors)
        return self.executable.forward({**FEEDS, **leaves, **feeds}, dims)

    def outputs(self) -> Tensors:
        return {user_name(n): self.executable.output(n) for n in self.ends}

    def backward(self, left: Residuals, given: Tensors, keep: bool = False) -> Tensors:
        """Gradients by parameter, as `grad.w`."""
        vectors = {n: given[user_name(n)] for n in self.ends}
        found = self.executable.backward(left, vectors, keep)
        return {f"grad.{user_name(n)}": x for n, x in found.items()}


def halves(
    model: torch.nn.Module, data: Mapping[str, torch.Tensor], ends: list[str] | None = None,
    room: int = 0,
) -> Halves:  # fmt: skip
    """The two halves of a model's step. ends: the outputs that have cotangents, by default the loss
    and all floating outputs of the model; without "loss" in it, these are all outputs. room: how
    much larger than the batch's the plan's open sizes are."""
    made = compiled(model, data, want_loss=ends is None or "loss" in ends)
    wrt = [n for n in trained(made) if ends or n in made.captured.reached]
    results = made.forward.signature.results.values()
    floating = [n for n in results if type_of(made.forward.outputs[n]).is_floating]
    if ends is None:
        ends = list(dict.fromkeys([*made.forward.signature.differentiated_outputs, *floating]))
    graph = made.compiler.halves(made.forward, tuple(ends), tuple(wrt))
    dims = made.captured.dims(list(data.values()))
    assert dims is not None
    most = {n: size + room for n, size in dims.items()}
    return in_memory(made, graph, ends, most, list(most) if room else [])


def in_memory(
    made: Compiled, graph: Graph, ends: list[str], dims: dict[str, int], sizes: Collection[str] = ()
) -> Halves:
    """The halves planned for these dims, of which `sizes` stay open."""
    plan = made.plan(graph, graph.outputs, dims, open=sizes)
    memory, owned = Memory(torch.device("cpu")), made.captured.owned
    return Halves(made, ends, plan, memory, made.compiler.bind_halves(plan, memory, owned))


def cotangents(outputs: Mapping[str, torch.Tensor], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        for n, x in outputs.items()
    }


def autograd(
    model: torch.nn.Module, data: Mapping[str, torch.Tensor], given: Tensors, dtype: torch.dtype
) -> Tensors:
    """Outputs and gradients of eager in this precision."""
    twin = tiny.copy.deepcopy(model).to(dtype)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
    results: Any = twin(**cast)
    results = {"loss": results} if isinstance(results, torch.Tensor) else results
    ends = {n: results[n] for n in given}
    named = [(n, p) for n, p in twin.named_parameters() if p.requires_grad]
    vectors = [given[n].to(dtype) for n in ends]
    found = torch.autograd.grad(
        list(ends.values()), [p for _, p in named], vectors, allow_unused=True
    )
    gradients = {f"grad.{n}": g for (n, _), g in zip(named, found, strict=True) if g is not None}
    return {**{n: x.detach() for n, x in ends.items()}, **gradients}


def assert_law(
    ours: Tensors, model: torch.nn.Module, data: Mapping[str, torch.Tensor], given: Tensors
) -> None:
    exact, plain = (autograd(model, data, given, t) for t in (torch.float64, torch.float32))
    assert set(ours) == set(exact)
    for name, truth in exact.items():
        distance = float((ours[name].double() - truth).norm())
        assert distance <= allowed(plain[name], truth, exact), name


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_cotangents_of_the_loss_and_of_all_outputs(name: str) -> None:
    model, data = CASES[name][0](), CASES[name][1]()
    both = halves(model, data)
    left = both.forward(data)
    outputs = both.outputs()
    given = cotangents(outputs)
    found = both.backward(left, given)
    assert_law({**outputs, **found}, model, data, given)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Masks, attention of all kinds and pooled losses, drawn at random; another forward between."""
    model, data = row_programs.Model(row_programs.program(seed)), row_programs.batch(seed)
    both = halves(model, data)
    left, loss = both.forward(data), both.outputs()["loss"]
    both.forward(row_programs.batch(seed + 1))
    given = {"loss": torch.tensor(-1.5)}
    found = {"loss": loss, **both.backward(left, given)}
    exact, plain = (autograd(model, data, given, t) for t in (torch.float64, torch.float32))
    for name in {*exact} - {*found}:
        assert not exact[name].any(), f"{name} has no gradient here"
        del exact[name]
    for name in {*found} - {*exact}:
        assert not found[name].any(), f"{name} has none in eager"
        del found[name]
    assert not row_programs.differences(found, exact, plain)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_loss_of_the_users_own(kind: str) -> None:
    """torch computes a loss of the logits, and its gradient goes back into the backward half."""
    model, data = getattr(tiny, kind)(0.0), batch(3, 10, "right")
    labels = data.pop("labels")
    logits = f"{OUTPUT}logits"
    both = halves(model, data, [logits])
    left = both.forward(data)
    outputs = {n: x.requires_grad_() for n, x in both.outputs().items()}
    loss = torch.nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels.flatten(), label_smoothing=0.1
    )
    (given,) = torch.autograd.grad(loss, outputs["logits"])
    assert_law(
        {"logits": outputs["logits"].detach(), **both.backward(left, {"logits": given})},
        model, data, {"logits": given},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_dropout_draws_forward_s_masks_again(kind: str) -> None:
    """The seed of the whole step gives the same gradients in halves; another seed in between
    belongs to another forward, and the tensor that held a seed may change after its forward."""
    model, data = getattr(tiny, kind)(0.3), batch(3, 10, "right")
    both = halves(model, data, ["loss"])
    seed = FEEDS["seed"].clone()
    left = both.forward(data, seed=seed)
    seed.zero_()
    loss = both.outputs()["loss"]
    other = both.forward(data, seed=torch.tensor([5, 6]))
    assert float(both.outputs()["loss"]) != float(loss)
    one = {"loss": torch.ones(())}
    moved = both.backward(other, one)
    found = {"loss": loss, **both.backward(left, one)}
    whole = tiny.gradients(model, data)
    assert set(found) == set(whole)
    for name, want in whole.items():
        torch.testing.assert_close(found[name], want, rtol=2e-6, atol=2e-7, msg=name)
    assert any(not torch.allclose(moved[n], found[n], rtol=0.1) for n in moved)


ORDERS = [[0, 1, 2], [2, 1, 0], [1, 2, 0]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("room", [0, 5], ids=["fixed sizes", "open sizes"])
def test_outstanding_forwards(order: list[int], room: int) -> None:
    """Three forwards of other batches, their backwards in any order, each with the bits that it has
    alone; with open sizes of other sizes too."""
    model = tiny.bert(0.2)
    sizes = [(4, 12), (3, 9), (2, 11)] if room else [(4, 12)] * 3
    data = [batch(*size, "right", seed=i) for i, size in enumerate(sizes)]
    seeds = [torch.tensor([i, 7]) for i in range(3)]
    both = halves(model, data[0], room=room)
    alone: list[Tensors] = []
    given: list[Tensors] = []
    for d, seed in zip(data, seeds, strict=True):
        left = both.forward(d, seed=seed)
        outputs = both.outputs()
        given.append(cotangents(outputs))
        alone.append({**outputs, **both.backward(left, given[-1])})
    pending: list[Residuals] = []
    outputs_of: list[Tensors] = []
    for d, seed in zip(data, seeds, strict=True):
        pending.append(both.forward(d, seed=seed))
        outputs_of.append(both.outputs())
    assert len({left.content.data_ptr() for left in pending}) == 3
    for i in order:
        found = {**outputs_of[i], **both.backward(pending[i], given[i])}
        for name, want in alone[i].items():
            assert torch.equal(found[name], want), name


def test_kept_residuals_serve_again() -> None:
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    left = both.forward(data)
    given = cotangents(both.outputs())
    first = both.backward(left, given, keep=True)
    doubled = both.backward(left, {n: 2 * x for n, x in given.items()})
    for name, want in first.items():
        torch.testing.assert_close(doubled[name], 2 * want, rtol=1e-5, atol=1e-7)


def test_a_block_is_lent_again() -> None:
    """A block is lent again once its gradients are gone, once what a forward left is dropped, and
    after a forward that fails."""
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    left = both.forward(data)
    block = left.content.data_ptr()
    found = both.backward(left, cotangents(both.outputs()))
    del left
    assert both.forward(data).content.data_ptr() != block, "its gradients are held"
    one = found.popitem()[1][:1]
    del found
    assert both.forward(data).content.data_ptr() != block, "a window of one is held"
    held = one.clone()
    del one
    left = both.forward(data)
    assert held.isfinite().all()
    block = left.content.data_ptr()
    del left
    with pytest.raises(IndexError):
        both.forward({**data, "input_ids": data["input_ids"] + tiny.VOCABULARY})
    assert both.forward(data).content.data_ptr() == block


def test_gradients_outlive_whoever_lent_their_block() -> None:
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    found = both.backward(both.forward(data), cotangents(both.outputs()))
    before = {name: x.clone() for name, x in found.items()}
    content = weakref.ref(both.memory.blocks._lent[0].base)
    del both
    gc.collect()
    junk = [torch.full_like(x, 7.0) for x in before.values()]
    assert all(torch.equal(x, before[name]) for name, x in found.items())
    assert content() is not None
    found.clear()
    assert content() is None, f"{len(junk)} tensors"


def test_memory_is_as_planned() -> None:
    """One block for both halves, and no arena beside it."""
    model, data = tiny.bert(), batch(4, 12, "right")
    both = halves(model, data)
    left = both.forward(data)
    assert left.content.numel() == both.plan.arena_bytes == both.memory.blocks.nbytes
    found = both.backward(left, cotangents(both.outputs()))
    assert both.memory.blocks.nbytes == both.plan.arena_bytes
    assert (
        both.memory.arena_bytes(MemoryRegion.SCRATCH)
        == both.memory.arena_bytes(MemoryRegion.RESIDUAL)
        == 0
    )
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in found.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    start = left.content.data_ptr()
    assert spans[0][0] >= start
    assert spans[-1][1] <= start + left.content.numel()


def test_many_forwards_without_a_backward() -> None:
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    for _ in range(20):
        both.forward(data)
    assert both.memory.blocks.nbytes == both.plan.arena_bytes


def test_a_copy_of_the_residuals_serves() -> None:
    """Residuals may be read from a copy: saved-tensor hooks of autograd may have moved the
    bytes."""
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    left = both.forward(data)
    given = cotangents(both.outputs())
    copy = dataclasses.replace(left, content=left.content.clone())
    want = both.backward(left, given)
    del left
    found = both.backward(copy, given)
    assert all(torch.equal(found[name], x) for name, x in want.items())


CHANGES = {
    "in place": lambda p: p.mul_(2),
    "another storage": lambda p: p.set_(p.clone()),
    "by its data": lambda p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_parameter_that_has_changed_is_refused(kind: str) -> None:
    """A product's gradient by its input reads the weight: with another weight it would be wrong."""
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    left = both.forward(data)
    given = cotangents(both.outputs())
    with torch.no_grad():
        CHANGES[kind](model.get_parameter("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(OnwardError, match=r"c_fc\.weight' was modified in place between"):
        both.backward(left, given)
    left = both.forward(data)
    assert_law(
        {**(outputs := both.outputs()), **both.backward(left, cotangents(outputs))},
        model, data, cotangents(outputs),
    )  # fmt: skip


def test_a_missing_cotangent_is_named() -> None:
    model, data = tiny.gpt2(), batch()
    both = halves(model, data)
    left = both.forward(data)
    with pytest.raises(OnwardError, match="lacks the gradient of logits"):
        both.executable.backward(left, {"loss": torch.ones(())})
    both.backward(left, cotangents(both.outputs()))


@pytest.mark.parametrize("shape", [(), (1,), (31,), (1, 12, 31), (4, 1, 31), (4, 12), (4, 12, 32)])
def test_a_cotangent_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Most of these would broadcast to the logits, f32[4,12,31]."""
    model, data = tiny.gpt2(), batch(4, 12)
    both = halves(model, data)
    left = both.forward(data)
    given = {"loss": torch.ones(()), "logits": torch.ones(shape)}
    with pytest.raises(OnwardError, match="gradient of the output 'logits' has shape"):
        both.backward(left, given)
    both.backward(left, cotangents(both.outputs()))


def test_rows_that_nobody_reads_are_in_neither_half() -> None:
    """Halves of the packed form: same loss and gradients as its whole step."""
    model, data = tiny.bert(0.0), batch(4, 12, "right", ignored=True)
    made = compiled(model, data)
    packed = made.packed(["loss"])
    assert packed is not None
    wrt = trained(made)
    whole = made.differentiated(wrt, packed)
    names = ["loss", *whole.signature.gradients.values()]
    wanted, counts = execute_packed(made, whole, data, names)
    conditions, step = split_counting(packed)
    both = made.compiler.halves(step, ("loss",), tuple(wrt))
    dims = made.captured.dims(list(data.values()))
    assert dims is not None
    dims |= counts
    masks = tiny.execute(made, conditions, data)
    rows = {step.signature.rows[size]: x.nonzero().view(-1) for size, x in masks.items()}
    bound = in_memory(made, both, ["loss"], dims).executable
    leaves = {made.captured.leaves[i]: t for i, t in enumerate(data.values())}
    left = bound.forward({**FEEDS, **leaves, **rows}, dims)
    loss = bound.output("loss")
    found = bound.backward(left, {"loss": torch.ones(())})
    torch.testing.assert_close(loss, wanted["loss"])
    for name, want in plain({n: wanted[g] for n, g in whole.signature.gradients.items()}).items():
        torch.testing.assert_close(
            plain(found)[name], want, rtol=1e-5, atol=1e-7, msg=f"{name}: {counts}"
        )
