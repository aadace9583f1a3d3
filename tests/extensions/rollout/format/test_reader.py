"""What trainers log is read by its own names; what cannot be used is refused, what is left out is counted."""

import json

import numpy as np
import pytest
import torch

from harness.errors import HarnessError
from harness.extensions.rollout.format import Sampling, read_rollouts

ROW = {"prompt_ids": [1, 5, 6], "response_ids": [7, 8], "engine_logprobs": [-0.5, -1.5]}


@pytest.fixture
def read(tmp_path):
    def read(*records, **options):
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return read_rollouts(path, **options)

    return read


def refused(read, *records, **options):
    with pytest.raises(HarnessError) as caught:
        read(*records, **options)
    return caught.value


def test_a_row_of_prompt_and_response(read):
    (row,) = read({**ROW, "trainer_logprobs": [-0.4, -1.4], "temperature": 0.7, "top_k": -1}).rows
    assert row.tokens == (1, 5, 6, 7, 8)
    assert row.num_prompt == 3
    assert row.engine == (None, None, None, -0.5, -1.5)
    assert row.trainer == (None, None, None, -0.4, -1.4)
    assert row.mask == (False, False, False, True, True)
    assert row.sampling == Sampling(temperature=0.7)


def test_fields_that_are_not_read_are_kept_by_name(read):
    """The second name of a column, too: of two columns of one side only one is compared."""
    rollouts = read({**ROW, "ref_log_prob": [-1, -1], "rollout_log_probs": [-9.0, -9.0], "reward": None, "top_p": 0.9})
    assert rollouts.unread == ("ref_log_prob", "rollout_log_probs")
    assert read(ROW).unread == ()


FRAMEWORKS = {
    "verl": {
        "input_ids": [0, 1, 5, 6, 7, 8, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "prompts": [0, 1, 5, 6],
        "responses": [7, 8, 0],
        "response_mask": [1, 1, 0],
        "rollout_log_probs": [-0.5, -1.5, 0.0],
        "old_log_probs": [-0.4, -1.4, 0.0],
        "meta_info": {"temperature": 0.7},
    },
    "trl": {
        "prompt_ids": [0, 1, 5, 6],
        "prompt_mask": [0, 1, 1, 1],
        "completion_ids": [7, 8],
        "completion_mask": [1, 1],
        "sampling_per_token_logps": [-0.5, -1.5],
        "old_per_token_logps": [-0.4, -1.4],
        "temperature": 0.7,
    },
    "openrlhf": {
        "sequences": [0, 1, 5, 6, 7, 8],
        "attention_mask": [0, 1, 1, 1, 1, 1],
        "action_mask": [0, 0, 0, 1, 1],
        "rollout_log_probs": [0.0, 0.0, 0.0, -0.5, -1.5],
        "action_log_probs": [0.0, 0.0, 0.0, -0.4, -1.4],
        "temperature": 0.7,
    },
    "openrlhf's batch": {  # Experience of 0.11.2: text under `prompts`, lengths without padding
        "sequences": [[1, 5, 6, 7, 8, 2, 2]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0]],
        "action_mask": [[0, 0, 1, 1, 0, 0]],
        "rollout_log_probs": [[0.0, 0.0, -0.5, -1.5, 0.0, 0.0]],
        "action_log_probs": [[0.0, 0.0, -0.4, -1.4, 0.0, 0.0]],
        "prompts": ["what?"],
        "response_length": [2],
        "temperature": 0.7,
    },
    "slime": {
        "tokens": [1, 5, 6, 7, 8],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5, -1.5],
        "log_probs": [-0.4, -1.4],
        "sampling_params": {"temperature": 0.7},
    },
    "slime's batch": {
        "tokens": [[1, 5, 6, 7, 8]],
        "response_lengths": [2],
        "loss_masks": [[1, 1]],
        "rollout_log_probs": [[-0.5, -1.5]],
        "log_probs": [[-0.4, -1.4]],
        "temperature": 0.7,
    },
}


@pytest.mark.parametrize("record", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_frameworks_say_the_same(read, record):
    rollouts = read(record)
    (row,) = rollouts.rows
    assert (row.tokens, row.num_prompt) == ((1, 5, 6, 7, 8), 3)
    assert row.engine[3:] == (-0.5, -1.5)
    assert row.trainer[3:] == (-0.4, -1.4)
    assert row.mask == (False, False, False, True, True)
    assert row.sampling.temperature == 0.7
    assert rollouts.has_trainer


def test_what_a_tool_wrote_in_a_response_is_masked(read):
    row = {**ROW, "response_ids": [7, 9, 8], "engine_logprobs": [-0.5, 0.0, -1.5]}
    rollouts = read({**row, "completion_mask": [1, 1, 1], "tool_mask": [1, 0, 1]})
    assert rollouts.rows[0].mask == (False, False, False, True, False, True)
    assert rollouts.counts.masked == 1


def test_every_token_is_counted(read):
    rows = [
        {**ROW, "mask": [1, 0]},
        {**ROW, "engine_logprobs": [None, -1.5]},
        {"input_ids": [0, 1, 7, 8], "attention_mask": [0, 1, 1, 1], "response_length": 2, "logprobs": [-1, -2]},
        {**ROW, "prompt_ids": []},
    ]
    counts = read(*rows, num_rows=3).counts
    parts = (counts.prompt, counts.masked, counts.padding, counts.without_value, counts.left_out)
    assert parts == (7, 1, 1, 1, 2)
    assert counts.compared == 4
    assert sum(parts) + counts.compared == counts.tokens == 16


def test_a_token_with_nothing_before_it_has_no_value(read):
    counts = read({**ROW, "prompt_ids": []}).counts
    assert (counts.compared, counts.without_value) == (1, 1)


def test_rows_of_one_version_are_chosen(read):
    rows = [{**ROW, "weight_version": "3"}, {**ROW, "weight_version": "4"}]
    error = refused(read, *rows)
    assert error.code == "H234"
    assert str(error.what) == "the rows come from several versions of the weights"
    assert error.actual == "3, 4"
    assert read(*rows, weight_version="4").counts.left_out == 5
    assert refused(read, *rows, weight_version="5").what == "no row is of this version alone"


def test_a_row_that_both_sides_saw_with_other_weights_is_refused(read):
    error = refused(read, {**ROW, "weight_version": "3", "trainer_weight_version": "4"})
    assert error.code == "H234"
    assert refused(read, {**ROW, "weight_versions": ["3", "4"]}).code == "H234"


def test_routed_experts_belong_to_tokens(read):
    experts = [[[0, 1], [2, 3]]] * 4
    (row,) = read({**ROW, "routed_experts": experts}).rows
    assert row.experts == ((0, 1, 2, 3),) * 4
    error = refused(read, {**ROW, "routed_experts": experts[:2]})
    assert (error.code, error.what) == ("H232", "routed_experts does not fit the tokens")
    ragged = [[[0, 1]], [[0, 1], [2, 3]], [[0, 1]], [[0, 1]]]
    assert "same number of ids" in refused(read, {**ROW, "routed_experts": ragged}).what


@pytest.mark.parametrize(
    ("change", "code", "what"),
    [
        ({"response_ids": []}, "H231", "the row has no tokens of a response"),
        ({"response_ids": None, "prompt_ids": None}, "H231", "the row has no tokens of a response"),
        ({"response_ids": [7, "8"]}, "H231", "a token id is no integer"),
        ({"engine_logprobs": None}, "H231", "the row has no log probabilities of the engine"),
        ({"mask": [1] * 6}, "H232", "mask does not fit the tokens"),
        ({"engine_logprobs": [-1.0]}, "H232", "engine_logprobs does not fit the tokens"),
        ({"mask": [1]}, "H232", "mask does not fit the tokens"),
        ({"mask": ["0", "0"]}, "H232", "mask is no mask"),
        ({"mask": [float("nan"), 1]}, "H232", "mask is no mask"),
        ({"mask": 1}, "H232", "mask is no list"),
        ({"response_ids": 5}, "H232", "response_ids is no list"),
        ({"prompt_ids": 5}, "H232", "prompt_ids is no list"),
        ({"token_ids": 5}, "H232", "token_ids is no list"),
        ({"token_ids": [1, 5, 6, 8, 7]}, "H232", "the tokens do not end with the response"),
        ({"attention_mask": 1}, "H232", "attention_mask is no list"),
        ({"prompt_mask": 1}, "H232", "prompt_mask is no list"),
        ({"sampling_params": [1]}, "H232", "sampling_params is no object"),
        ({"temperature": float("inf")}, "H232", "temperature of the sampling makes no sense"),
        ({"temperature": 1e-300}, "H232", "temperature of the sampling makes no sense"),
        ({"top_k": 2.5}, "H232", "top_k of the sampling makes no sense"),
        ({"engine_logprobs": -1.0}, "H232", "engine_logprobs is no list"),
        ({"prompt_mask": [1]}, "H232", "prompt_mask does not fit the tokens"),
        ({"temperature": 0}, "H232", "temperature of the sampling makes no sense"),
        ({"top_p": 1.5}, "H232", "top_p of the sampling makes no sense"),
        ({"engine_logprobs": [-0.5, float("nan")]}, "H233", "this is no log probability"),
        ({"engine_logprobs": [-0.5, 0.25]}, "H233", "this is no log probability"),
        ({"engine_logprobs": [-0.5, float("-inf")]}, "H233", "this is no log probability"),
        ({"engine_logprobs": [-0.5, -(10**400)]}, "H233", "this is no log probability"),
        ({"engine_logprobs": [-0.5, True]}, "H233", "this is no log probability"),
        ({"trainer_logprobs": [-0.5, "x"]}, "H233", "this is no log probability"),
        ({"top_k": 10**400}, "H232", "top_k of the sampling makes no sense"),
    ],
)
def test_what_cannot_be_used_is_refused(read, change, code, what):
    error = refused(read, {**ROW, **change})
    assert (error.code, error.what) == (code, what)
    assert "line 1" in str(error.where)


@pytest.mark.parametrize("length", ["2", 2.5, [2], True, 6, -1])
def test_a_length_of_the_response_that_does_not_fit_is_refused(read, length):
    error = refused(read, {"tokens": [1, 5, 6, 7, 8], "response_length": length, "logprobs": [-1.0]})
    assert error.code == "H232"


def test_log_probabilities_shorter_than_the_response_are_refused(read):
    error = refused(read, {"tokens": [1, 5, 6, 7, 8], "response_length": 2, "logprobs": [-0.5]})
    assert (error.what, error.expected, error.actual) == ("logprobs does not fit the tokens", "2 or 4 or 5 entries", 1)


def test_padding_may_hold_anything(read):
    assert read({**ROW, "mask": [1, 0], "engine_logprobs": [-0.5, float("nan")]}).counts.compared == 1


def test_a_file_that_ends_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:40])
    with pytest.raises(HarnessError, match="the file ends in the middle of a row") as caught:
        read_rollouts(path)
    assert caught.value.code == "H230"
    assert str(caught.value.where).endswith("line 2")


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("", "H231", "the file has no rows"),
        ("[1, 2]\n", "H230", "a row is no JSON object"),
        ("{no json}\n{}\n", "H230", "this is no JSON: "),
        ("[" * 200_000 + "\n{}\n", "H230", "this is no JSON: "),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, code, what):
    path = tmp_path / "no.jsonl"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        read_rollouts(path)
    assert caught.value.code == code
    assert caught.value.what.startswith(what)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(HarnessError, match="it cannot be read") as caught:
        read_rollouts(tmp_path / "none.jsonl")
    assert caught.value.code == "H230"


def test_parquet_is_read_where_its_package_is_there(tmp_path):
    path = tmp_path / "rollouts.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(HarnessError, match="pyarrow") as caught:
            read_rollouts(path)
        assert caught.value.code == "H103"
        return
    parquet.write_table(pyarrow.Table.from_pylist([ROW, ROW]), path)
    assert read_rollouts(path).counts.compared == 4
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(HarnessError, match="cannot be read as Parquet"):
        read_rollouts(path)


def test_tensors_arrays_and_tuples_are_taken_from_memory():
    row = {"prompt_ids": torch.tensor([1, 5, 6]), "response_ids": (7, 8), "engine_logprobs": np.array([-0.5, -1.5])}
    assert read_rollouts([row]).rows == read_rollouts([ROW]).rows
    batch = {name: [value, value] for name, value in row.items()}
    assert read_rollouts([batch]).counts.compared == 4


def test_a_batch_has_sampling_parameters_for_each_row(read):
    batch = {name: [value, value] for name, value in ROW.items()}
    rows = read({**batch, "sampling_params": [{"top_p": 0.5}, {"top_p": 0.9}], "temperature": [0.5, 0.7]}).rows
    assert [(row.sampling.temperature, row.sampling.top_p) for row in rows] == [(0.5, 0.5), (0.7, 0.9)]


def test_the_attention_mask_of_prompt_and_response_takes_padding_out(read):
    (row,) = read({**ROW, "prompt_ids": [0, 1, 5, 6], "attention_mask": [0, 1, 1, 1, 1, 1]}).rows
    assert (row.tokens, row.num_prompt, row.num_padding) == ((1, 5, 6, 7, 8), 3, 1)


def test_a_row_of_a_batch_is_named(read):
    batch = {"response_ids": [[7, 8], 5], "prompt_ids": [[1], [1]], "engine_logprobs": [[-1, -1], [-1]]}
    error = refused(read, batch)
    assert (error.code, error.what) == ("H232", "response_ids is no list")
    assert str(error.where).endswith("line 1, row 1 of the batch")
