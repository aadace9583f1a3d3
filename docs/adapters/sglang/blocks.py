"""SGLang's pages and radix cache, 0.5.23: pytest --pyargs harness.properties --block-manager blocks:Adapter"""

from pool import MODEL, Pool
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


class Adapter(Pool):
    chunks_prompts = False  # pages are allocated for what the same step computes

    def __init__(self, *, num_blocks, block_size):
        self.make_pool(num_blocks, block_size, max_num_requests=64, max_length=256)
        self.requests, self.batches = {}, {}

    def lookup(self, token_ids, *, salt=""):
        request = self.request("lookup", token_ids, salt)
        request.init_next_round_input(self.tree)
        return request.prefix_len

    def allocate(self, request_id, token_ids, *, salt=""):
        request = self.request(request_id, token_ids, salt)
        request.init_next_round_input(self.tree)
        request.extend_end, request.lock = len(token_ids), self.tree.lock(request.last_node)
        if -(-request.extend_len // self.size) > self.num_free():
            return self.tree.unlock(request.lock)  # None: there is no room
        batch = ScheduleBatch.init_new(
            [request], self.rows, self.allocator, self.tree, MODEL, False, SpeculativeAlgorithm.NONE
        )
        batch.prepare_for_extend()
        self.requests[request_id], self.batches[request_id] = request, batch
        return request.prefix_len

    def computed(self, request_id, num_tokens):
        request = self.requests[request_id]
        if not request.output_ids:  # the prompt: SGLang publishes it; what follows only at the end
            checkpoint_kv_cache(request, self.tree)

    def append(self, request_id, token_id):
        batch = self.batches[request_id]
        if not batch.check_decode_mem():
            return False
        self.requests[request_id].output_ids.append(token_id)
        batch.prepare_for_decode()
        return True

    def free(self, request_id):
        self.release(request_id, checkpoint=True)

    def release(self, request_id, *, checkpoint):
        del self.batches[request_id]
        release_kv_cache(self.requests.pop(request_id), self.tree, checkpoint=checkpoint)

    def block_table(self, request_id):
        return self.pages(self.requests[request_id])

    def evict(self, num_blocks):
        self.tree.evict(EvictParams(num_tokens=num_blocks * self.size))


class UnifiedAdapter(Adapter):
    """The tree that SGLang takes unless it is told otherwise, written in Rust; it does not show its nodes."""

    tree_class, cached_blocks = UnifiedRadixCache, None
