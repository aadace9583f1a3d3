"""nano-vllm's block manager, of April 2026: pytest --pyargs harness.properties --block-manager blocks:Adapter"""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


class Adapter:
    block_sizes = (2, 4, 256)  # 1 is not served: no block is ever appended
    may_lose_duplicates = True  # of two equal blocks, the cache keeps the later one

    def __init__(self, *, num_blocks, block_size):
        Sequence.block_size = block_size  # an attribute of the class
        self.manager, self.sequences = BlockManager(num_blocks, block_size), {}

    def can_allocate(self, token_ids):
        return self.manager.can_allocate(Sequence(list(token_ids))) != -1

    def allocate(self, request_id, token_ids):
        sequence = Sequence(list(token_ids))
        num_cached_blocks = self.manager.can_allocate(sequence)
        if num_cached_blocks == -1:  # no room; where nothing is cached it is 0
            return None
        self.manager.allocate(sequence, num_cached_blocks)
        self.sequences[request_id] = sequence
        return sequence.num_cached_tokens

    def append(self, request_id, token_id):
        sequence = self.sequences[request_id]
        sequence.append_token(token_id)
        if not self.manager.can_append(sequence):  # the engine would preempt a request
            sequence.token_ids.pop()
            sequence.num_tokens -= 1
            return False
        self.manager.may_append(sequence)
        return True

    def computed(self, request_id, num_tokens):
        sequence = self.sequences[request_id]
        sequence.num_scheduled_tokens = num_tokens - sequence.num_cached_tokens
        self.manager.hash_blocks(sequence)
        sequence.num_cached_tokens = num_tokens

    def free(self, request_id):
        self.manager.deallocate(self.sequences.pop(request_id))

    def block_table(self, request_id):
        return list(self.sequences[request_id].block_table)

    def free_list(self):
        return list(self.manager.free_block_ids)

    def num_owners(self, block):
        return self.manager.blocks[block].ref_count
