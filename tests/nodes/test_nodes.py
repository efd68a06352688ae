"""The committed table of onnx's node tests against what becomes of them, a sample here and all by
`make node-tests`; the page of operators against the tables that it is made of."""

from __future__ import annotations

import hashlib

import onnx
import pytest
from nodes.cases import cases
from nodes.outcome import EQUAL, FOLDED, judged
from nodes.page import PAGE, gradient, has_function, names, page, runs_by
from nodes.reasons import OF_GRADIENTS, OF_RESULTS, OF_TORCH
from nodes.table import table

from onward.graph.importer import BEYOND, CONSTANT, DECOMPOSITIONS, REFUSED

SHARE = 24  # one in so many is tried, and these
ALWAYS = (
    "test_attention_3d_gqa_softcap", "test_einsum_batch_matmul", "test_gru_bidirectional",
    "test_gridsample_bilinear", "test_loop11", "test_lstm_with_peepholes",
    "test_reduce_log_sum_exp_empty_set",
    "test_range_float_type_positive_delta_expanded", "test_resize_downsample_scales_cubic",
    "test_rnn_seq_length", "test_rotary_embedding", "test_scatternd_max",
)  # fmt: skip


def sample() -> list[str]:
    """A sample of the cases, always the same: chosen by a hash of their names."""
    found = sorted(table(), key=lambda name: hashlib.sha256(name.encode()).digest())
    return sorted({*found[::SHARE], *ALWAYS})


@pytest.mark.slow
def test_the_table_says_what_becomes_of_each_case() -> None:
    """One test makes the cases once, which takes seconds."""
    held, found = table(), cases()
    assert set(held) == set(found)
    assert {name: held[name][1:] for name in sample()} == {
        name: judged(found[name]) for name in sample()
    }


def test_no_case_differs() -> None:
    """A result that is not equal is refused, or has its reason in `reasons.py`."""
    for name, (_, *found) in table().items():
        assert "differs" not in "".join(found) and "no row of" not in found[-1], name
    given = {why for _, *row in table().values() for why in row}
    assert {*OF_RESULTS.values(), *OF_GRADIENTS.values(), *OF_TORCH.values()} <= given


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "fix: make node-tests"


@pytest.mark.parametrize("name", names())
def test_each_op_is_in_one_of_the_tables(name: str) -> None:
    """Each op runs in a known way and is differentiated, or the table says why not; or it is
    refused."""
    assert runs_by(name), "fix: a decomposition, a record with a kernel, or a reason in REFUSED"
    assert gradient(name), "fix: a gradient rule, or a reason why none flows"
    taken = name in DECOMPOSITIONS or name in CONSTANT
    assert not (name in REFUSED and taken)


def test_the_tables_name_ops_of_onnx() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    assert ({*DECOMPOSITIONS} - BEYOND) | {*REFUSED} | {*CONSTANT} <= known
    assert not BEYOND & known


@pytest.mark.parametrize("name", [name for name in names() if name not in REFUSED])
def test_an_op_that_runs_has_a_test_that_it_passes(name: str) -> None:
    """Each op has a passing node test, unless it is computed while a model is read or onnx has none
    for it."""
    rows = [row for row in table().values() if row[0] == name]
    if rows and name not in CONSTANT and not has_function(name):
        assert any(row[1] in (EQUAL, FOLDED) for row in rows)
