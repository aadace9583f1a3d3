"""vLLM's KV cache manager, 0.32: pytest --pyargs harness.properties --block-manager blocks:Adapter"""

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


class Adapter:
    chunks_prompts = False  # blocks are cached as soon as they are allocated: for what the step computes

    def __init__(self, *, num_blocks, block_size):
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # block 0 is the null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.pool, self.block_size, self.requests = self.manager.block_pool, block_size, {}
        self.hasher = get_request_block_hasher(block_size, sha256)

    def request(self, request_id, token_ids, salt=None):
        params = SamplingParams(max_tokens=1 << 20)
        return Request(
            str(request_id), list(token_ids), params, None, cache_salt=salt or None, block_hasher=self.hasher
        )

    def allocate(self, request_id, token_ids, *, salt=""):
        request = self.request(request_id, token_ids, salt)
        cached, num_cached, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(token_ids) - num_cached, num_cached, cached) is None:
            return None
        request.num_computed_tokens = len(token_ids)
        self.requests[request_id] = request
        return num_cached

    def lookup(self, token_ids, *, salt=""):
        return self.manager.get_computed_blocks(self.request("lookup", token_ids, salt))[1]

    def computed(self, request_id, num_tokens):
        """Nothing to do: vLLM caches blocks as it allocates them."""

    def append(self, request_id, token_id):
        request = self.requests[request_id]
        if request.num_tokens % self.block_size == 0 and not self.num_free():  # the engine would preempt a request
            return False
        request.append_output_token_ids(token_id)
        assert self.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        return True

    def free(self, request_id):
        self.manager.free(self.requests.pop(request_id))

    def block_table(self, request_id):
        return self.manager.get_block_ids(str(request_id))[0]

    def num_free(self):
        return self.pool.get_num_free_blocks()

    def free_list(self):
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def num_owners(self, block):
        return self.pool.blocks[block].ref_cnt

    def reset(self):
        self.manager.reset_prefix_cache()
