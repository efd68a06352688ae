"""Masks of the versions of transformers that give mask functions `cache_position`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import masking_utils

from onward.capture.huggingface.cache_position import Counted, broadcast
from onward.capture.huggingface.masks import Masks
from onward.errors import CaptureError

B, Q = 3, 7
PADDING = torch.arange(Q) < torch.tensor([[7], [5], [2]])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7, [0, 1, 2, 3, 4, 5, 6]])


def by_vmap(*, added: bool = False, **given: Any) -> torch.Tensor:
    """What such a version makes of the same."""
    function, zero = given["mask_function"], torch.zeros((), dtype=torch.long)
    keys = torch.arange(given["kv_length"]) + given.get("kv_offset", 0)

    def made(b: Any, q: Any, k: Any) -> torch.Tensor:
        return function(b, zero, q, k)

    with TransformGetItemToIndex():
        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            made = torch.vmap(made, in_dims=dims)
        mask = made(torch.arange(given["batch_size"]), given["cache_position"], keys)[:, None]
    padding = given.get("attention_mask")
    if padding is not None:
        mask = mask & padding.bool()[:, None, None, :]
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min) if added else mask


def given(positions: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        "batch_size": B, "cache_position": positions, "kv_length": Q, "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function, "attention_mask": PADDING,
        "allow_is_causal_skip": True, "dtype": torch.float32, **more,
    }  # fmt: skip


RANGES: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "arange": (lambda: torch.arange(Q), True),
    "from 0": (lambda: torch.arange(0, Q), True),
    "named": (lambda: torch.arange(start=0, end=Q, device="cpu"), True),
    "from 1": (lambda: torch.arange(1, Q + 1), False),
    "from 1, named": (lambda: torch.arange(start=1, end=Q + 1), False),
    "of 2": (lambda: torch.arange(0, 2 * Q, 2), False),
    "of 2, named": (lambda: torch.arange(0, 2 * Q, step=2), False),
    "from a float": (lambda: torch.arange(0.5, Q), False),
    "from a tensor": (lambda: torch.arange(cast("Any", torch.tensor(0)), Q), False),
    "written to": (lambda: torch.arange(Q).add_(1), False),
    "another": (lambda: torch.arange(Q) + 1, False),
}


@pytest.mark.parametrize("name", RANGES)
def test_only_a_range_from_zero_counts(name: str) -> None:
    make, counts = RANGES[name]
    counted = Counted()
    with counted:
        positions = make()
    assert counted.from_zero(positions) == counts
    assert not counted.from_zero(torch.arange(Q))


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 1, 2])),
    "documents": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(DOCUMENTS)
    ),
    "either": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(DOCUMENTS)
    ),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_is_broadcast(name: str, padding: torch.Tensor | None, added: bool) -> None:
    kwargs = given(torch.arange(Q), mask_function=FUNCTIONS[name], attention_mask=padding)

    def never(**_: Any) -> torch.Tensor:
        raise AssertionError

    have, want = broadcast(never, added, kwargs), by_vmap(added=added, **kwargs)
    assert have.shape == want.shape == (B, 1, Q, Q)
    assert have.dtype == want.dtype
    assert torch.equal(have, want)


def test_keys_before_the_first_and_after_the_mask() -> None:
    kwargs = given(torch.arange(2, 5), kv_length=6, kv_offset=2, attention_mask=PADDING[:, :5])
    have = broadcast(by_vmap, False, kwargs)
    want = (torch.arange(2, 8) <= torch.arange(2, 5)[:, None]).expand(B, 1, 3, 6).clone()
    seen = torch.nn.functional.pad(PADDING[:, :5], (0, 3))[:, 2:]
    assert torch.equal(have, want & seen[:, None, None, :])


def test_somebodys_own_function_is_not_broadcast() -> None:
    def own(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & DOCUMENTS[b].sum().gt(0)

    inner = masking_utils.and_masks(masking_utils.causal_mask_function, own)
    for function in (own, inner):
        called = []
        kwargs = given(torch.arange(Q), mask_function=function)
        broadcast(lambda called=called, **k: called.append(k), False, kwargs)
        assert called == [kwargs]


@pytest.mark.parametrize("own", [False, True])
def test_later_versions_are_asked_not_to_map(own: bool) -> None:
    def somebodys(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    function = somebodys if own else FUNCTIONS["either"]
    called: list[Any] = []
    kwargs = {"mask_function": function, "use_vmap": True, "q_length": Q}
    broadcast(lambda **k: called.append(k), False, kwargs)
    assert called == [{**kwargs, "use_vmap": own}]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", ["from 0", "from 1", "another"])
def test_masks_of_positions(name: str, added: bool) -> None:
    make, counts = RANGES[name]
    counted = Counted()
    masks = Masks(counted)
    function = masks.remembering(lambda **k: by_vmap(added=added, **k), added)
    with counted:
        positions = make()
    if not counts and not added:
        with pytest.raises(CaptureError, match="cache_position"):
            function(**given(positions))
        return
    mask = function(**given(positions))
    assert mask is not None
    assert torch.equal(mask, by_vmap(added=added, **given(positions)))
    found = masks.find(mask)
    assert (found is not None) == counts
    if found is not None:
        assert found.causal
        assert found.optional == (not added)
        assert found.padding is not None
        assert torch.equal(found.padding[:, 0, 0], PADDING)


def test_without_padding_torchs_causal_attention_is_taken() -> None:
    function = Masks(Counted()).remembering(by_vmap, False)
    assert function(**given(torch.arange(1, Q + 1), attention_mask=None)) is None
