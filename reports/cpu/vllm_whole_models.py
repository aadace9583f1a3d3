"""Where whole models of vLLM 0.32 differ from HF's, each shown by the logits of one prompt. No harness.

python reports/cpu/vllm_whole_models.py NAME     # cohere2, gemma3n, hrm, hrm-causal, lfm2-moe, hunyuan-moe or gemma4

Each model is tiny, with drawn weights. In float32 vLLM's logits of the prompt's last row are held beside HF's, and
beside those of HF's model with the one change that vLLM is said to make. Of the last two a module's rows in 16 bits are
held beside the formula as HF has it, and as vLLM is said to have it.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    HrmTextConfig,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    Lfm2MoeConfig,
)
from transformers.models.gemma3n import modeling_gemma3n as gemma3n
from transformers.models.hrm_text import modeling_hrm_text as hrm
from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2_moe
from vllm import LLM, SamplingParams

SIZES: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
)  # fmt: skip
PROMPT = torch.arange(3, 40)[None]


def cohere2_model() -> Any:
    layers = ["sliding_attention", "sliding_attention"]
    return Cohere2ForCausalLM(
        Cohere2Config(**SIZES, num_hidden_layers=2, intermediate_size=256, layer_types=layers, sliding_window=16)
    )


def with_a_longer_window(model: Any) -> torch.Tensor:
    """HF's model with a window of one token more."""
    model.config.sliding_window += 1
    return model(PROMPT).logits


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
        rows = [x.transpose(1, 2).reshape(1, 1, -1, x.shape[-1]).clone() for x in (q, k)]
        heads = [row[:, :, :tokens] for row in rows]
        for head, turned in zip(heads, right(*(head.clone() for head in heads), cos, sin), strict=True):
            head.copy_(turned)
        return tuple(
            row.reshape(1, tokens, x.shape[1], -1).transpose(1, 2) for row, x in zip(rows, (q, k), strict=True)
        )

    lfm2_moe.apply_rotary_pos_emb = wrong
    try:
        return model(PROMPT).logits
    finally:
        lfm2_moe.apply_rotary_pos_emb = right


MODELS = {
    "cohere2": (cohere2_model, with_a_longer_window, "HF with a window of one token more"),
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


def opened(folder: str, dtype: str) -> LLM:
    return LLM(
        folder, dtype=dtype, enforce_eager="--compiled" not in sys.argv, skip_tokenizer_init=True, max_model_len=128,
        max_num_seqs=1, max_logprobs=-1, enable_prefix_caching=False,
    )  # fmt: skip


def answer(engine: LLM) -> torch.Tensor:
    """Return the log probabilities [vocabulary] that vLLM gives to the token after the prompt."""
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
    row = engine.generate([{"prompt_token_ids": PROMPT[0].tolist()}], asked)[0].outputs[0].logprobs[0]
    return torch.tensor([row[token].logprob for token in range(SIZES["vocab_size"])])


def seen(engine: LLM, *ends: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what modules are given and return while vLLM computes the prompt, [tokens, size] each, by their last names."""
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    modules = dict(worker.model_runner.get_model().named_modules())
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(end: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any, returned: Any) -> None:
            returned = returned[0] if isinstance(returned, tuple) else returned
            tokens = PROMPT.shape[1]
            outputs[end] = inputs[0].reshape(tokens, -1).clone(), returned.reshape(tokens, -1).clone()

        return hook

    for end in ends:
        next(module for path, module in modules.items() if path.endswith(end)).register_forward_hook(keep(end))
    answer(engine)
    return [outputs[end] for end in ends]


def told(name: str, actual: torch.Tensor, **expected: torch.Tensor) -> None:
    """Print how many of vLLM's values are these, and how far the others are."""
    for what, value in expected.items():
        far = float((actual.double() - value.double()).norm() / value.double().norm())
        print(f"{name:12} {what.replace('_', ' ')}: {int((actual == value).sum())} of {value.numel()} equal, {far:.1e} off")


def of_a_router() -> None:
    """HunYuan-MoE's router, which HF keeps in float32: vLLM's weights are rounded to the model's dtype."""
    model = drawn(
        HunYuanMoEV1ForCausalLM(
            HunYuanMoEV1Config(
                **SIZES, head_dim=32, num_hidden_layers=1, intermediate_size=96, num_experts=8, moe_topk=2
            )
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        kept = HunYuanMoEV1ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.layers[0].mlp.gate.wg.weight
        ((x, logits),) = seen(opened(folder, "bfloat16"), "mlp.gate.wg")
    weight = model.model.layers[0].mlp.gate.wg.weight
    print("HF's router of a model that is opened in bfloat16:", kept.dtype)
    told(
        "hunyuan-moe", logits, weights_in_float32=(x.double() @ weight.double().T).bfloat16(),
        weights_in_bfloat16=(x.double() @ weight.bfloat16().double().T).bfloat16(),
    )  # fmt: skip


def of_a_scale() -> None:
    """Gemma 4's scale of the inputs of layers: vLLM's is rounded to float16, by 1.07e-4 of it for 128."""
    layer_types = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(
        **SIZES, head_dim=32, global_head_dim=32, num_hidden_layers=2, layer_types=layer_types, intermediate_size=256,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=256, num_kv_shared_layers=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        drawn(Gemma4ForCausalLM(config)).save_pretrained(folder)
        projection, norm = seen(opened(folder, "float16"), "per_layer_model_projection", "per_layer_projection_norm")
    made, scaled = projection[1], norm[0]
    scale = torch.tensor(SIZES["hidden_size"] ** -0.5, dtype=torch.float16)
    told("gemma4", scaled, scale_as_it_is=made * SIZES["hidden_size"] ** -0.5, scale_in_float16=made * scale)


def of_logits(name: str) -> None:
    make, change, said = MODELS[name]
    model = drawn(make())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        from_vllm = answer(opened(folder, "float32"))
    hf, changed = (logits[0, -1].log_softmax(-1) for logits in (model(PROMPT).logits, change(model)))
    for what, row in (("HF", hf), (said, changed)):
        print(f"{name:12} largest distance of a log probability from {what}: {float((from_vllm - row).abs().max()):.1e}")


if __name__ == "__main__":
    with torch.no_grad():
        match sys.argv[1]:
            case "hunyuan-moe":
                of_a_router()
            case "gemma4":
                of_a_scale()
            case name:
                of_logits(name)
