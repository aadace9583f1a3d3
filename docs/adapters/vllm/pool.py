"""What both suites see of vLLM's blocks; the adapters in this folder import it."""

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request


class Pool:
    null_block = 0

    def make_hasher(self, block_size):
        init_none_hash(sha256)
        self.hashed = {}  # by hash, what was hashed: the parent's hash, the block's tokens, keys

        def remember(content):
            digest = sha256(content)
            self.hashed[digest] = content
            return digest

        self.hasher = get_request_block_hasher(block_size, remember)

    def request(self, request_id, token_ids, salt, **params):
        params = SamplingParams(**params)
        return Request(
            str(request_id), list(token_ids), params, None, cache_salt=salt or None, block_hasher=self.hasher
        )

    def block_table(self, request_id, group=0):
        return self.manager.get_block_ids(str(request_id))[group]

    def num_free(self):
        return self.manager.block_pool.get_num_free_blocks()

    def free_list(self):
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]

    def num_owners(self, block):
        return self.manager.block_pool.blocks[block].ref_cnt

    def cached_blocks(self):
        blocks = [block for block in self.manager.block_pool.blocks if block.block_hash is not None]
        return {block.block_id: self.all_tokens(get_block_hash(block.block_hash)) for block in blocks}

    def all_tokens(self, digest):
        tokens = ()
        while digest in self.hashed:
            digest, block_tokens, _keys = self.hashed[digest]
            tokens = (*block_tokens, *tokens)
        return tokens

    @staticmethod
    def cache_config(num_blocks, block_size, windows):
        size = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = [
            SlidingWindowSpec(**size, sliding_window=window) if window else FullAttentionSpec(**size)
            for window in windows
        ]
        groups = [KVCacheGroupSpec([f"layer {place}"], spec) for place, spec in enumerate(specs)]
        return KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
        )  # and the null block
