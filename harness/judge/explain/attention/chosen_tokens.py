"""Ways to get a choice among the tokens so far wrong, as indexers of sparse attention make it.

`R` rows, `C` positions of a row, the best first; -1 where there are too few.
"""

from collections.abc import Iterator

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.experts.choice import choice


def other_tokens(failure: Failure) -> Iterator[Hypothesis]:
    """The positions are too few, or those of a rule that looks at no score."""
    if not failure.operation.among_tokens:
        return
    right, width = failure.expected.long(), failure.expected.shape[1]
    most = int((failure.actual >= 0).sum(dim=1).max())
    if most < width:
        fewer = right.masked_fill(torch.arange(width) >= most, -1)
        yield choice(failure, f"{most} tokens in the place of {width} are chosen", fewer)
    latest = (failure.positions[:, None] - torch.arange(width)).clamp(min=-1)
    yield choice(failure, "the latest tokens are chosen, whatever their scores", latest)


EXPLANATIONS = (other_tokens,)
