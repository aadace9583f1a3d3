"""mini-sglang's pages and radix cache: pytest --pyargs harness.properties --block-manager blocks:Adapter"""

import torch
from minisgl import core
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.utils import PendingReq


class Adapter:
    chunks_prompts = False  # pages are allocated for what the same step computes

    def __init__(self, *, num_blocks, block_size):
        core._GLOBAL_CTX = core.Context(page_size=block_size)
        self.size, self.params = block_size, core.SamplingParams()
        self.page_table = torch.zeros((64, (num_blocks + 1) * block_size), dtype=torch.int32)
        self.cache = CacheManager(num_blocks, block_size, self.page_table, "radix")
        self.requests, self.free_rows = {}, list(range(64))

    def lookup(self, token_ids):
        return self.cache.match_req(PendingReq(0, torch.tensor(token_ids).int(), self.params)).cuda_handle.cached_len

    def allocate(self, request_id, token_ids):
        tokens = torch.tensor(token_ids).int()
        handle = self.cache.match_req(PendingReq(request_id, tokens, self.params)).cuda_handle
        self.cache.lock(handle)
        request = core.Req(tokens, self.free_rows[-1], handle.cached_len, 10**6, request_id, self.params, handle)
        if not self.grow(request):
            return self.cache.unlock(handle)  # None: there is no room
        if handle.cached_len:
            self.page_table[request.table_idx, : handle.cached_len] = handle.get_matched_indices()
        self.requests[request_id] = request
        self.free_rows.pop()
        return handle.cached_len

    def append(self, request_id, token_id):
        request = self.requests[request_id]
        if has_room := self.grow(request):
            request.append_host(torch.tensor([token_id]).int())
        return has_room

    def grow(self, request):
        has_room = request.extend_len - -request.cached_len % self.size <= self.cache.available_size
        if has_room:
            self.cache.allocate_paged([request])
        return has_room

    def computed(self, request_id, num_tokens):
        request = self.requests[request_id]
        is_prompt = request.cached_len == request.cache_handle.cached_len
        request.complete_one()
        if is_prompt:
            self.cache.cache_req(request, finished=False)

    def free(self, request_id):
        self.free_rows.append(self.requests[request_id].table_idx)
        self.cache.cache_req(self.requests.pop(request_id), finished=True)

    def block_table(self, request_id):
        request = self.requests[request_id]
        return (self.page_table[request.table_idx, : len(request.input_ids) : self.size] // self.size).tolist()
