"""mlx-lm 0.32.2 does not go back where a sliding window is full, and says nothing: shown without the harness.

    python reports/cpu/mlx_rewind.py cases/checkpoints/gemma3-tiny

needs mlx-lm. A prompt is computed, then a few other tokens, which are trimmed from the cache again as mlx-lm's own
speculation does it. The next token's probabilities are held against those of a cache that never held the others. Then
mlx-lm's speculative decoding, with a draft model that is often wrong, is held against its plain greedy decoding.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
OTHERS = [40, 41, 42, 43, 44, 45, 46]
NUM_NEW = 40


def probabilities(model, cache, ids):
    """Return the next token's log probabilities after some more tokens."""
    logits = np.array(model(mx.array([ids]), cache=cache).astype(mx.float32))[0, -1].astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def divergence(model, length):
    """Return how many tokens were trimmed, and the Kullback-Leibler divergence in nats after going back."""
    prompt = [3 + at % 100 for at in range(length)]
    fresh, rewound = make_prompt_cache(model), make_prompt_cache(model)
    for cache in (fresh, rewound):
        model(mx.array([prompt]), cache=cache)
    for token in OTHERS:
        model(mx.array([[token]]), cache=rewound)
    trimmed = trim_prompt_cache(rewound, len(OTHERS))
    expected, actual = probabilities(model, fresh, [7]), probabilities(model, rewound, [7])
    return trimmed, float((np.exp(expected) * (expected - actual)).sum())


def main(folder):
    """Print both comparisons for prompts below and beyond the window."""
    model, config = load_model(folder)
    print(f"sliding window: {config['sliding_window']}")
    for length in (16, 24, 26, 36, 60):
        trimmed, nats = divergence(model, length)
        print(f"prompt of {length}: {trimmed} of {len(OTHERS)} tokens trimmed, {nats:.3g} nats off")
    draft, _ = load_model(folder)
    mx.random.seed(0)
    draft.update(tree_map(lambda x: x + mx.std(x) * mx.random.normal(x.shape), draft.parameters()))
    for length in (8, 36):
        prompt = mx.array([3 + at % 100 for at in range(length)])
        plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=NUM_NEW)]
        steps = speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=NUM_NEW)
        tokens = [(int(token), from_draft) for token, _, from_draft in steps]
        same = next((at for at, (token, _) in enumerate(tokens) if token != plain[at]), NUM_NEW)
        accepted = sum(from_draft for _, from_draft in tokens)
        print(
            f"prompt of {length}: speculation equals greedy in the first {same} of {NUM_NEW} tokens (position "
            f"{length + same}), {accepted} from the draft"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
