"""vLLM's KV cache manager, 0.32: pytest --pyargs harness.properties --block-manager blocks:Adapter

`WindowAdapter` has a second group of layers, with a sliding window and block tables of its own.
"""

from pool import Pool
from vllm.v1.core.kv_cache_manager import KVCacheManager


class Adapter(Pool):
    chunks_prompts = False  # blocks are cached as soon as they are allocated: for what the step computes
    windows = (None,)

    def __init__(self, *, num_blocks, block_size):
        self.make_hasher(block_size)
        self.manager = KVCacheManager(
            self.cache_config(num_blocks, block_size, self.windows), max_model_len=1 << 20,
            scheduler_block_size=block_size, hash_block_size=block_size,
        )  # fmt: skip
        self.block_size, self.requests = block_size, {}

    def allocate(self, request_id, token_ids, *, salt=""):
        request = self.request(request_id, token_ids, salt, max_tokens=1 << 20)
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
        if request.num_tokens % self.block_size == 0 and self.num_free() < len(self.windows):
            return False  # the engine would preempt a request
        request.append_output_token_ids(token_id)
        assert self.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        return True

    def free(self, request_id):
        self.manager.free(self.requests.pop(request_id))

    def evict(self, num_blocks):
        for _ in range(min(num_blocks, self.num_free())):
            (block,) = self.manager.block_pool.get_new_blocks(1)
            self.manager.block_pool.free_blocks([block])

    def reset(self):
        self.manager.reset_prefix_cache()


class WindowAdapter(Adapter):
    windows = (None, 3)
