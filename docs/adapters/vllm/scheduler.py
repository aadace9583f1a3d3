"""vLLM's schedulers, 0.32: pytest --pyargs harness.properties --scheduler scheduler:Adapter

`AsyncAdapter` is the one that vLLM takes unless it is told otherwise: it plans a step while another is computed.
`WindowAdapter` has a second group of layers, with a sliding window and block tables of its own.
"""

import copy
from functools import cache
from tempfile import TemporaryDirectory

from pool import Pool
from transformers import LlamaConfig
from vllm import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


@cache
def vllm_config():
    """Return vLLM's configuration for a model that is never loaded."""
    with TemporaryDirectory() as folder:
        LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(folder)
        return EngineArgs(folder, skip_tokenizer_init=True, enable_prefix_caching=True).create_engine_config()


class Adapter(Pool):
    refuses_impossible = False  # vLLM's input processor refuses them before they are queued
    reuses_prefixes = True
    shares_within_step = True  # a block is cached as soon as it is allocated
    scheduler_class = Scheduler
    windows = (None,)

    def __init__(self, *, num_blocks, block_size, max_num_batched_tokens, max_num_seqs, max_model_len):
        config = copy.copy(vllm_config())
        for part in ("scheduler_config", "cache_config", "model_config"):
            setattr(config, part, copy.copy(getattr(config, part)))
        config.scheduler_config.max_num_seqs = max_num_seqs
        config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
        config.cache_config.block_size, config.cache_config.num_gpu_blocks = block_size, num_blocks + 1
        config.model_config.max_model_len = max_model_len
        blocks, grammar = self.cache_config(num_blocks, block_size, self.windows), StructuredOutputManager(config)
        self.scheduler, self.steps = self.scheduler_class(config, blocks, grammar, block_size), []
        self.manager = self.scheduler.kv_cache_manager
        self.make_hasher(block_size)

    def add(self, request_id, token_ids, max_new_tokens, salt=""):
        request = self.request(request_id, token_ids, salt, max_tokens=max_new_tokens, stop_token_ids=[2])
        self.scheduler.add_request(request)

    def schedule(self):
        step = self.scheduler.schedule()
        self.steps.append(step)
        known = step.scheduled_cached_reqs
        starts = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        starts |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
        return [(int(key), starts[key], starts[key] + count) for key, count in step.num_scheduled_tokens.items()]

    def update(self, sampled):
        step = self.steps.pop(0)
        keys = list(step.num_scheduled_tokens)
        tokens = [[sampled[int(key)]] if int(key) in sampled else [] for key in keys]
        places = {key: place for place, key in enumerate(keys)}
        self.scheduler.update_from_output(step, ModelRunnerOutput(keys, places, tokens))

    def abort(self, request_id):
        self.scheduler.finish_requests(str(request_id), RequestStatus.FINISHED_ABORTED)

    def running(self):
        return [int(request.request_id) for request in self.scheduler.running]


class AsyncAdapter(Adapter):
    scheduler_class, max_steps_in_flight = AsyncScheduler, 2


class WindowAdapter(Adapter):
    windows = (None, 3)


class AsyncWindowAdapter(AsyncAdapter):
    windows = (None, 3)
