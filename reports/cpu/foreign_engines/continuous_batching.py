"""Continuous batching of transformers: nothing to install. Its scheduler and paged cache run as they are; tokens are forced."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

DTYPES = ("float32", "bfloat16")


class Engine:
    def __init__(self, model):
        config = ContinuousBatchingConfig(num_blocks=64, use_async_batching=False, use_cuda_graph=False)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1000)
        self.manager = model.init_continuous_batching(generation, config)
        self.model, self.processor = model, self.manager._create_batch_processor()
        self.runner = self.processor.model_runner
        self.sample, self.runner._sample = self.runner._sample, self.keep_logits

    def step(self, work):
        scheduler = self.processor.scheduler
        asked = {str(request) for request, _, _ in work}
        others = {name: state for name, state in scheduler.active_requests.items() if name not in asked}
        for request, ids, first in work:
            if first == 0:
                self.manager.add_request(ids, request_id=str(request))
            else:
                state = scheduler.active_requests[str(request)]
                state.tokens_to_process, state.generated_tokens[-1] = ids, ids[0]
        for name in others:
            del scheduler.active_requests[name]
        rows = {}
        while rows.keys() != asked:
            self.processor.prepare_next_batch()
            batch = [item for item in self.processor.inputs_and_outputs.requests_in_batch if item.has_new_token]
            self.processor._generation_step(self.model)
            rows |= {item.state.request_id: row for item, row in zip(batch, self.logits, strict=True)}
            self.processor.update_batch()
        scheduler.active_requests |= others
        return torch.stack([rows[str(request)] for request, _, _ in work])

    def keep_logits(self, scores, output_ids):
        self.logits = scores[0]
        self.sample(scores, output_ids)

    def finish(self, request):
        self.processor.scheduler.finish_request(str(request))


# mistakes
from types import MethodType

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from truth import EPS, SCALE, THETA

UPDATE = PagedAttentionCache.update


def open_engine(folder, dtype, fault):
    PagedAttentionCache.update = update if fault == "cache" else UPDATE
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    plant(model, fault)
    return Engine(model)


def plant(model, fault):
    """Change a model of transformers."""
    if fault == "theta":
        model.config.rope_parameters["rope_theta"] = THETA
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    for module in model.modules():
        if fault == "eps" and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = EPS
        if fault == "scale" and hasattr(module, "scaling"):
            module.scaling *= SCALE
    if fault == "residual":
        model.model.layers[1].forward = MethodType(without_residual, model.model.layers[1])
    if fault == "gate_up":
        mlp = model.model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def without_residual(self, hidden_states, **others):
    h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
    return h + self.mlp(self.post_attention_layernorm(h))


def update(self, keys, values, layer_idx, kwargs):
    if keys.shape[2] == 1:
        kwargs["write_index"] = [index - 1 for index in kwargs["write_index"]]
    return UPDATE(self, keys, values, layer_idx, kwargs)
