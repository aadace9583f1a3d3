import torch

from harness.errors import Code

LENGTHS = (37, 11)


def explained(bench, choose):
    """The explanation where each step's choices are those of `choose`, from its logits [rows, V]."""
    parts = {}
    for step in bench.steps("lm_head"):
        sampled = step.sampled.clone()
        at = (sampled >= 0).nonzero()[:, 0]
        sampled[at] = choose(step.tap("lm_head"))
        parts[step.index] = {"sampled": sampled}
    recording = bench.replaced(parts)
    return bench.explained(recording, "lm_head", Code.TOKENS_DIFFER, request=1, position=12)


def test_choices(bench):
    bench = bench()
    found = explained(bench, lambda logits: logits.topk(2).indices[:, 1])
    assert found.cause == "the second largest logit is chosen"
    assert "has rank 2" in found.detail
    assert found.scope == "10 choices: request 0 position 36, request 1 position 10, request 0 position 37"
    assert explained(bench, lambda logits: logits.argmin(1)).cause == "the smallest logit is chosen"
    assert explained(bench, lambda logits: logits.topk(9).indices[:, 7]).cause.endswith("not greedy")


def test_rows(bench):
    bench = bench()
    causes = {explained(bench, lambda logits: logits[0].argmax().expand(len(logits))).cause}
    causes.add(explained(bench, lambda logits: logits.roll(1, dims=0).argmax(1)).cause)
    assert causes <= {
        "the token is chosen from the first row's logits",
        "the token is chosen from the last row's logits",
        "the token is chosen from another row's logits",
    }


def test_rounded_logits(bench):
    bench = bench()

    def last_of_the_ties(logits):
        low = logits.bfloat16()
        return len(low[0]) - 1 - (low == low.amax(1, keepdim=True)).flip(1).int().argmax(1)

    tied = {}
    for step in bench.steps("lm_head"):
        logits = step.tap("lm_head").clone()
        best = logits.argmax(1)
        logits[torch.arange(len(logits)), (best + 1) % logits.shape[1]] = logits.amax(1) * (1 - 1e-4)
        tied[step.index] = {"lm_head": logits}
    for step in bench.steps("lm_head"):
        sampled = step.sampled.clone()
        sampled[sampled >= 0] = last_of_the_ties(tied[step.index]["lm_head"])
        tied[step.index]["sampled"] = sampled
    found = bench.explained(bench.replaced(tied), "lm_head", Code.TOKENS_DIFFER, request=1, position=12)
    assert found is None or found.cause == "the logits are rounded to bfloat16 before the argmax"


def test_one_wrong_choice_is_named_by_its_place(bench):
    bench = bench()
    here = lambda step: (step.request == 1) & (step.position == 12)  # noqa: E731
    step = next(each for each in bench.steps("lm_head") if bool(here(each).any()))
    row, covered = int(here(step).nonzero()[0, 0]), step.rows_of("lm_head")
    at = row if covered is None else covered.tolist().index(row)
    sampled = step.sampled.clone()
    sampled[row] = step.tap("lm_head")[at].argmin()
    found = bench.explained(
        bench.replaced({step.index: {"sampled": sampled}}), "lm_head", Code.TOKENS_DIFFER, request=1, position=12
    )
    assert (found.scope, found.num_rows) == ("request 1 position 12", 1)


def test_a_choice_that_follows_from_the_logits_is_no_mistake_of_choosing(bench):
    bench = bench()
    assert explained(bench, lambda logits: logits.argmax(1)) is None
