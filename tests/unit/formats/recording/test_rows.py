"""Columns of rows checked at once, against a loop over them."""

import random

import numpy as np
import pytest
import torch

from harness.formats.recording import RequestInfo
from harness.formats.recording.arguments import RequestLengths, first_invalid_index

LENGTHS = {9: 3, 2: 1, 40: 5}
COUNTS = RequestLengths(RequestInfo(id=id_, token_ids=[1] * num, prompt_length=1) for id_, num in LENGTHS.items())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("as_column", [np.array, torch.tensor])
def test_the_first_row_that_is_wrong(seed, as_column):
    generator = random.Random(seed)
    requests = [generator.choice([*LENGTHS, *LENGTHS, 0, 3, 41]) for _ in range(6)]
    unknown = next((at for at, request in enumerate(requests) if request not in LENGTHS), None)
    assert COUNTS.first_unknown(as_column(requests)) == unknown
    known = [generator.choice([*LENGTHS]) for _ in range(6)]
    positions = [generator.choice([-1, *range(LENGTHS[request]), *range(LENGTHS[request] + 1)]) for request in known]
    pairs = enumerate(zip(known, positions, strict=True))
    outside = next((at for at, (request, place) in pairs if not 0 <= place < LENGTHS[request]), None)
    assert COUNTS.first_outside(as_column(known), as_column(positions)) == outside
    assert COUNTS.of(as_column(known)).tolist() == [LENGTHS[request] for request in known]


@pytest.mark.parametrize("seed", range(30))
def test_the_first_index_that_is_wrong(seed):
    """What names no row comes before what names one twice."""
    generator = random.Random(seed)
    num_rows = generator.randint(1, 8)
    values = generator.choices(
        range(-1 if seed % 3 == 0 else 0, num_rows + 3 * (seed % 4 == 0)), k=generator.randint(0, 5)
    )
    outside = [at for at, value in enumerate(values) if not 0 <= value < num_rows]
    repeated = [at for at, value in enumerate(values) if value in values[:at]]
    expected = (outside or repeated or [None])[0]
    assert first_invalid_index(np.array(values, dtype=np.int64), num_rows) == expected


def test_one_row_is_known_by_itself():
    assert int(COUNTS.of(40)) == 5
