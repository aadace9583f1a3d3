"""An attention function under test, with what it declares about itself."""

from collections.abc import Sequence
from typing import Any

import torch

from harness.errors import Code, HarnessError
from harness.properties.attention.adapter import KEYWORDS, OPTIONAL
from harness.properties.attention.batches import FOCUSES, MOST_ROUNDED_SCORE, Served
from harness.properties.attention.case import AttentionCase, Tensors
from harness.properties.attention.program import call_lines, program
from harness.properties.core.falsify import Target, calling
from harness.properties.core.findings import Counterexample


class AttentionUnderTest(Target):
    """The object that `--attention` names: a function, or a class or object with a method `attend`.

    Raises:
        HarnessError: BAD_ADAPTER: it is neither.
    """

    def __init__(self, named: Any) -> None:
        super().__init__(named, "attention")
        self.method = "attend" if self.offers("attend") else "__call__"
        if not self.offers(self.method):
            raise HarnessError(
                Code.BAD_ADAPTER, "the adapter lacks attend", where="--attention", expected="a function, or a class "
                "with a method attend", actual=type(self.adapter).__name__, hint="docs/test-your-attention.md has one",
            )  # fmt: skip
        self.rounds_scores = bool(self.declares("rounds_scores", False))
        defaults = Served()
        self.served = Served(
            dtypes=tuple(self.declares("dtypes", defaults.dtypes)),
            head_dims=tuple(self.declares("head_dims", defaults.head_dims)),
            block_sizes=tuple(self.declares("block_sizes", defaults.block_sizes)),
            group_sizes=tuple(self.declares("group_sizes", defaults.group_sizes)),
            device=str(self.declares("device", defaults.device)),
            keywords=frozenset(name for name in KEYWORDS if self.takes(self.method, name)),
            rounds_scores=self.rounds_scores,
            has_masked_rows=bool(self.declares("serves_masked_rows", False)),
            hides_keywords=self.hides_parameters(self.method),
        )

    def attend(self, case: AttentionCase, tensors: Tensors) -> torch.Tensor:
        """Return [T, N, H] on the CPU.

        Raises:
            Counterexample: it raises, writes to its inputs, or gives another shape or dtype.
        """
        return self.attend_requests(case, tensors, range(len(case.query_lens)))

    def attend_requests(self, case: AttentionCase, tensors: Tensors, requests: Sequence[int]) -> torch.Tensor:
        """Return the rows of only some requests of a case, `q_TNH` holding theirs alone; raises as `attend`."""
        tables, query_lens, context_lens = (
            [values[request] for request in requests]
            for values in (case.block_tables, case.query_lens, case.context_lens)
        )
        given = {"q": tensors.q_TNH, "k_cache": tensors.k_cache_BSKH, "v_cache": tensors.v_cache_BSKH}
        before = {name: tensor.clone() for name, tensor in given.items()}
        with calling("attend", lambda: program(self, case, call_lines(self, case))):
            out = self._function(self.method)(
                tensors.q_TNH,
                tensors.k_cache_BSKH,
                tensors.v_cache_BSKH,
                block_tables=tables,
                query_lens=query_lens,
                context_lens=context_lens,
                **case.options,
            )
        for name in (name for name, tensor in given.items() if not _is_same(tensor, before[name])):
            copying = ["", f"before = {name}.clone()"]
            ending = ["", f"assert torch.equal({name}.view(torch.uint8), before.view(torch.uint8))  # NaN among it"]
            what = f"it writes to {name}, which is not its own"
            raise Counterexample(what, program(self, case, copying, call_lines(self, case), ending))
        expected, actual = (tuple(tensors.q_TNH.shape), case.torch_dtype), (tuple(out.shape), out.dtype)
        if actual != expected:
            ending = ["", f"assert (tuple(out.shape), out.dtype) == {expected}"]
            what = f"expected {expected[1]} {list(expected[0])}, actual {actual[1]} {list(actual[0])}"
            raise Counterexample(what, program(self, case, call_lines(self, case), ending))
        return torch.as_tensor(out).detach().cpu()


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether all bits are as they were; slots that nobody wrote hold NaN."""
    return torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def not_checked(named: Any) -> list[str]:
    """Name what is not checked of an attention function, and why."""
    target = AttentionUnderTest(named)
    refused = {focus: target.served.refusal(focus) for focus in FOCUSES}
    lines = [f"{FOCUSES[focus]}: {refusal}" for focus, refusal in refused.items() if refusal]
    lines += [f"no {signature}" for method, signature in OPTIONAL.items() if not target.offers(method)]
    if not target.declares("is_batch_invariant", False):
        lines.append("that a request has the same bits alone and in a batch: it does not declare is_batch_invariant")
    if target.rounds_scores:
        lines.append(f"scores beyond {MOST_ROUNDED_SCORE:g}: it declares rounds_scores")
    return [f"attention: {line}" for line in lines]
