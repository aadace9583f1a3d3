"""The tokens on which types are compared: a text, or what the model itself says."""

from collections.abc import Sequence

import torch

from harness.errors import Code, HarnessError
from harness.oracle.model import HFModel

Sequences = list[list[int]]


def split_text(token_ids: Sequence[int], hf: HFModel, num_tokens: int) -> Sequences:
    """Cut a text's tokens into sequences of at most `num_tokens` and of what the model takes.

    Raises:
        HarnessError: EMPTY_PROMPT: there is nothing to predict.
    """
    size = min(num_tokens, hf.max_positions or num_tokens)
    parts = [list(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    parts = [part for part in parts if len(part) > 1]
    if not parts:
        what, hint = "the text has too few tokens", "give more text, or leave it out"
        raise HarnessError(Code.EMPTY_PROMPT, what, where="quant", actual=len(token_ids), hint=hint)
    return parts


@torch.no_grad()
def sample_text(hf: HFModel, *, num_sequences: int, num_tokens: int, seed: int) -> Sequences:
    """Let the model say something: its own distribution, without cut or temperature.

    The seed is of the choices, and of the first tokens where the model has none of its own.
    """
    num_tokens = min(num_tokens, hf.max_positions or num_tokens)
    generator = torch.Generator().manual_seed(seed)
    begin = getattr(hf.config, "bos_token_id", None)
    first = torch.randint(hf.vocab_size, (num_sequences, 1), generator=generator)
    ids = torch.full_like(first, begin) if isinstance(begin, int) else first
    while ids.shape[1] < num_tokens:
        probabilities = hf.run(input_ids=ids).logits[:, -1].double().softmax(dim=-1)
        chosen = torch.multinomial(probabilities, 1, generator=generator)
        ids = torch.cat((ids, chosen), dim=1)
    rows: Sequences = ids.tolist()
    return rows
