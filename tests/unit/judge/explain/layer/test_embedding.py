import torch

TAP = "model.embed_tokens"


def test_tokens(bench):
    bench = bench()
    table, rows = bench.weight(TAP), bench.rows(TAP)
    tokens = [request.token_ids for request in bench.golden.requests]
    own = torch.tensor([tokens[r][p] for r, p in zip(rows.request.tolist(), rows.position.tolist(), strict=True)])
    before = torch.tensor(
        [tokens[r][max(0, p - 1)] for r, p in zip(rows.request.tolist(), rows.position.tolist(), strict=True)]
    )
    found = bench.explain(TAP, table[before])
    assert found.cause == "the embedding is that of the token before it"
    assert bench.explain(TAP, table[(own + 3).clamp(max=255)]).cause == "the embedding is that of token id +3"
    assert bench.explain(TAP, table[(own * 7) % 256]).cause == "the embedding is that of another token"


def test_scale_and_zero(bench):
    bench = bench()
    right = bench.tap(TAP)
    assert bench.explain(TAP, right * right.shape[1] ** 0.5).cause.startswith("the embedding is scaled by the root")
    assert bench.explain(TAP, right * 0).cause.startswith("the output is zero")
