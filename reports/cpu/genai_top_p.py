"""onnxruntime-genai draws beyond top_p where top_k is 0: shown with its own generator and logits, no harness.

    python -m onnxruntime_genai.models.builder -i FOLDER -o EXPORT -p fp32 -e cpu
    python reports/cpu/genai_top_p.py EXPORT

Of each drawn token: the probability of all likelier ones. A token may be drawn if that is below top_p.
"""

import sys

import numpy as np
import onnxruntime_genai as og

TOP_P, DRAWS = 0.7, 100
model = og.Model(sys.argv[1])


def above(logits, token, temperature):
    """Return the probability of all tokens that are likelier than one."""
    p = np.exp((logits - logits.max()) / temperature)
    return float(p[logits > logits[token]].sum() / p.sum())


for temperature in (1.0, 1.6, 0.6):
    for top_k in (0, 50, 200):
        masses = []
        for seed in range(DRAWS):
            params = og.GeneratorParams(model)
            options = {"temperature": temperature, "top_p": TOP_P, "top_k": top_k, "random_seed": seed}
            params.set_search_options(do_sample=True, max_length=12, **options)
            generator = og.Generator(model, params)
            prompt = np.random.default_rng(seed).integers(0, 256, 11).astype(np.int32)
            generator.append_tokens(prompt[None])
            logits = np.array(generator.get_logits(), dtype=np.float64).reshape(-1)[-264:]
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            masses.append(above(logits, token, temperature))
        print(f"temperature {temperature}, top_p {TOP_P}, top_k {top_k}: {max(masses):.3f} at most, in {DRAWS} draws")
