"""What both suites see of SGLang's pages; the adapters in this folder import it. No kernel runs, no model is loaded."""

from array import array
from types import SimpleNamespace

import cpu  # noqa: F401  # before SGLang
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

get_context().override_server_args(
    attention_backend="torch_native", device="cpu", pp_max_micro_batch_size=1 << 20
).install()
MODEL = SimpleNamespace(vocab_size=64, is_encoder_decoder=False, self_opened_think_start_ids=None, think_end_ids=None)


class Pool:
    tree_class = RadixCache

    def make_pool(self, num_blocks, block_size, max_num_requests, max_length):
        self.size = block_size
        options = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
        if block_size == 1:
            self.allocator = TokenToKVPoolAllocator(num_blocks, **options)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(num_blocks * block_size, block_size, **options)
        self.rows = ReqToTokenPool(max_num_requests, max_length + block_size, "cpu", False)
        parameters = CacheInitParams(False, self.rows, self.allocator, block_size, tree_components=(ComponentType.FULL,))
        self.tree = self.tree_class(parameters)

    @staticmethod
    def request(request_id, token_ids, salt="", max_new_tokens=1 << 20):
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        params.normalize(None)
        prompt = array("q", token_ids)
        return Req(
            f"{request_id:09}", "", prompt, params, cache_salt=salt or None, vocab_size=64, eos_token_ids={2}
        )  # fmt: skip

    def pages(self, request):
        held = request.kv.kv_allocated_len if request.kv.holds_kv else 0
        return (self.rows.req_to_token[request.kv.req_pool_idx or 0, :held : self.size] // self.size).tolist()

    def num_free(self):
        return (self.allocator.available_size() + self.tree.evictable_size()) // self.size

    def cached_blocks(self):
        prefixes, nodes = {}, [((), self.tree.root_node)]
        while nodes:
            before, node = nodes.pop()
            tokens = (*before, *node.key.token_ids)
            pages = [int(slot) // self.size for slot in node.value[:: self.size]]
            prefixes |= {page: tokens[: len(before) + (at + 1) * self.size] for at, page in enumerate(pages)}
            nodes += [(tokens, child) for child in node.children.values()]
        return prefixes
