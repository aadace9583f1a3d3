"""What a step of a live engine computes."""

import torch

from harness.engines.torch_modules import ForwardBatch

BATCH = {
    "requests": [7, 8], "starts": [0, 3, 4], "positions": [2, 3, 4, 0], "num_padded_rows": 4,
    "slot_mapping": torch.arange(4), "block_tables": {"0": {7: [5, 6, 0, 0], 8: [9, 0, 0, 0]}},
}  # fmt: skip


def test_padded_rows_of_block_tables_are_cut_behind_the_last_row():
    assert ForwardBatch(**BATCH, block_size=4).tables_in_use == {"0": {7: [5, 6], 8: [9]}}
    assert ForwardBatch(**BATCH, block_size=2).tables_in_use == {"0": {7: [5, 6, 0], 8: [9]}}


def test_rows_are_left_alone_where_no_block_size_is_given():
    assert ForwardBatch(**BATCH).tables_in_use == BATCH["block_tables"]
