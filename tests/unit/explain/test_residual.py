TAP, STREAM, BRANCH = "model.layers.1.attn_residual", "model.layers.0.output", "model.layers.1.self_attn.o_proj"
NORMED = "model.layers.1.input_layernorm"


def test_sides(bench):
    bench = bench()
    stream, branch = bench.tap(STREAM), bench.tap(BRANCH)
    wrong = {
        "the residual is not added": branch,
        "the branch is not added to the residual": stream,
        "the branch is added twice": stream + 2 * branch,
        "the residual is added twice": 2 * stream + branch,
        "the branch is subtracted": stream - branch,
        "the residual is taken after the norm, or the norm overwrites it in place": bench.tap(NORMED) + branch,
        "model.layers.0.attn_residual is added in the place of output": bench.tap("model.layers.0.attn_residual")
        + branch,
        "the branch is in bfloat16": stream + branch.bfloat16().double(),
        "the residual is in float16": stream.half().double() + branch,
        "the addition is of values in bfloat16": stream.bfloat16().double() + branch.bfloat16().double(),
    }
    for cause, tensor in wrong.items():
        found = bench.explain(TAP, tensor)
        assert (found.cause, found.num_explained) == (cause, found.num_rows)


def test_a_norm_in_place_that_stops_before_its_weight(bench):
    bench = bench()
    normed = bench.tap(NORMED) / bench.weight(NORMED)
    assert bench.explain(TAP, normed + bench.tap(BRANCH)).cause.endswith("in place, before its weight")


def test_a_branch_with_a_factor(bench):
    bench = bench()
    stream, branch = bench.tap("model.layers.0.output"), bench.tap("model.layers.1.self_attn.o_proj")
    found = bench.explain("model.layers.1.attn_residual", stream + 0.22 * branch)
    assert (found.cause, found.num_fitted) == ("the branch is added with a factor of 0.22", 1)


def test_a_stream_with_a_factor(bench):
    bench = bench()
    stream, branch = bench.tap(STREAM), bench.tap(BRANCH)
    found = bench.explain(TAP, 0.7 * stream + branch)
    assert (found.cause, found.num_fitted) == ("the residual is added with a factor of 0.7", 1)
    found = bench.explain(TAP, 0.7 * stream + 1.2 * branch)
    assert found.cause == "the residual is added with a factor of 0.7, and the branch with one of 1.2"
    assert bench.explain(TAP, 0.7 * (stream + branch)).cause == "a constant gain of 0.7"


def test_a_sum_that_is_cut_off(bench):
    bench = bench()
    found = bench.explain(TAP, (bench.tap(STREAM) + bench.tap(BRANCH)).clamp(-0.5, 0.75))
    assert (found.cause, found.num_fitted) == ("values outside of -0.5 to 0.75 are cut off", 2)
