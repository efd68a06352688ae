"""Ops that mix rows along the token axis: in every layout, the numbers are eager's."""

from __future__ import annotations

import pytest
from row_mixers import LAYOUTS, MIXERS, batch, mixing
from row_programs import wrong_numbers

from onward import OnwardError


@pytest.mark.sample(64)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_what_mixes_rows_reads_them(mixer: str, layout: str) -> None:
    try:
        wrong = wrong_numbers(mixing(mixer, layout), [batch(0), batch(1, "holes")])
    except OnwardError as error:
        if "no translation" not in str(error):
            raise
        pytest.skip(str(error))
    assert not wrong, "\n".join(wrong)
