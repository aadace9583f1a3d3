"""llama-cpp-python's own speculation with a draft model that is often wrong. Without the harness.

    python reports/cpu/llamacpp_speculation.py MODEL.gguf "The cat sat. The cat"     # llama-cpp-python, numpy

Prints whether greedy tokens are those without speculation. Seen: reports/cpu/speculation.md.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel

NUM_DRAFTS, NUM_TOKENS = 4, 60


class Draft(LlamaDraftModel):
    """A second model's greedy tokens, some of them replaced by any."""

    def __init__(self, model: Llama, share_wrong: float) -> None:
        self._model, self._share_wrong, self._random = model, share_wrong, np.random.default_rng(0)

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        """Return drafts of what follows."""
        drafted = list[int]()
        for _step in range(NUM_DRAFTS):
            self._model.reset()
            self._model.eval([*map(int, input_ids), *drafted])
            likeliest = int(np.argmax(self._model._scores[-1]))
            is_wrong = self._random.random() < self._share_wrong
            drafted.append(int(self._random.integers(3, self._model.n_vocab())) if is_wrong else likeliest)
        return np.array(drafted, dtype=np.intc)


def written(model: Llama, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that a model writes."""
    tokens = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
    return [token for token, _ in zip(tokens, range(NUM_TOKENS), strict=False)]


def main() -> None:
    """Compare what is written with and without speculation."""
    file, text = sys.argv[1:]

    def opened(**options: Any) -> Llama:
        return Llama(file, n_ctx=256, logits_all=True, verbose=False, **options)

    plain, drafting = opened(), opened()
    prompt = plain.tokenize(text.encode())
    for share_wrong in (0.0, 0.3, 1.0):
        speculative = opened(draft_model=Draft(drafting, share_wrong))
        pairs = zip(written(speculative, prompt), written(plain, prompt), strict=True)
        print(f"drafts wrong {share_wrong:.0%}: {sum(a == b for a, b in pairs)} of {NUM_TOKENS} tokens equal")


if __name__ == "__main__":
    main()
