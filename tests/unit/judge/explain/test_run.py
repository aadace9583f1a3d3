"""Several wrong operations in one comparison: each is found, and each has its own explanation."""

import torch

from harness.judge.explain import explain_run


def test_several_independent_mistakes_are_each_explained(bench):
    bench = bench()
    first, second = "model.layers.0.mlp.act", "model.layers.2.self_attn.v_proj"
    gate, up = (bench.tap(f"model.layers.0.mlp.{name}_proj") for name in ("gate", "up"))
    wrong = torch.nn.functional.gelu(gate) * up
    other = bench.tap("model.layers.2.input_layernorm") @ bench.weight("model.layers.1.self_attn.v_proj").T
    recording = bench.planted({first: wrong, second: other})
    explained = explain_run(bench.compare(recording), recording, bench.golden, bench.hf)
    causes = {finding.tap: finding.explanation.cause for finding in explained.findings if finding.explanation}
    assert causes[first] == "the activation is GELU"
    assert causes[second] == "the weights are those of model.layers.1.self_attn.v_proj"
    assert explained.first_divergence.tap == first
    assert explained.first_divergence.explanation.cause == "the activation is GELU"


def test_a_sound_run_is_returned_as_it_is(bench):
    bench = bench()
    recording = bench.planted({})
    found = bench.compare(recording)
    assert found.result.findings == ()
    assert explain_run(found, recording, bench.golden, bench.hf) is found.result


def test_two_causes_in_one_operation_leave_rows_that_the_better_one_does_not_explain(bench):
    bench = bench()
    tap = "model.layers.1.attn_residual"
    stream, branch = bench.tap("model.layers.0.output"), bench.tap("model.layers.1.self_attn.o_proj")
    wrong = branch.clone()  # the residual is not added
    wrong[:15] = (stream + 3.7 * branch)[:15]
    found = bench.explain(tap, wrong)
    assert found.cause == "the residual is not added"
    assert (found.num_rows, found.num_explained) == (len(wrong), len(wrong) - 15)
    assert found.detail == "some rows have another cause"


def test_which_rows_are_wrong(bench):
    bench = bench("llama-tiny", schedule="chunked")
    tap, rows = "model.layers.1.mlp.up_proj", bench.rows()
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    scopes = {
        "every row": rows.position >= 0,
        "request 1": rows.request == 1,
        "decode rows": rows.position >= lengths,
        "prefill rows": rows.position < lengths,
        "prefill rows of request 0": (rows.position < lengths) & (rows.request == 0),
        "the last row of each prompt": rows.position == lengths - 1,
        "rows from position 9 on": rows.position >= 9,
        "rows at position 6": rows.position == 6,
        "rows at every 7th position from 7 on": (rows.position % 7 == 0) & (rows.position > 0),
        "2 of 56 rows": (rows.request == 0) & ((rows.position == 3) | (rows.position == 13)),
    }
    for name, bad in scopes.items():
        wrong = bench.tap(tap)
        wrong[bad] = 0
        scope = bench.explain(tap, wrong).scope
        assert scope == name or (name == "2 of 56 rows" and "10th position" in scope)
