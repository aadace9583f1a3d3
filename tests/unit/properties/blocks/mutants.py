"""Small changes to the reference engine's pool, prefix cache and block manager: bugs that others had."""

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.prefix_cache import Prefix, PrefixCache

from ..mutation import mutant

ONE_MORE = "-(-num_tokens // self.block_size)"

BLOCK_MUTANTS = [
    # Block pool
    mutant("block freed while in use (vllm#45357)", BlockPool.free,
           ("self._num_owners[block] -= 1", "self._num_owners[block] = 0"), killed_by=(4, 12)),
    mutant("double free accepted (sglang#29310)", BlockPool.free, ('self._check_owned(blocks, "free")', "pass"),
           killed_by=16),
    mutant("block twice in one free accepted", BlockPool._check_owned, ("len(set(blocks)) != len(blocks)", "False"),
           killed_by=16),
    mutant("owner not counted on a hit", BlockPool.share_prefix, ("self._num_owners[block] += 1", "pass"),
           killed_by=(2, 4, 12)),
    mutant("hit block stays idle", BlockPool.share_prefix, ("del self._idle[block]", "pass"), killed_by=(3, 4, 12)),
    mutant("one block too many promised", BlockPool.can_allocate, ("num_blocks <= len", "num_blocks <= 1 + len"),
           killed_by=12),
    mutant("last block never given out", BlockPool.can_allocate, ("num_blocks <= len", "num_blocks < len"),
           killed_by=(6, 12)),
    mutant("most recently used evicted first", BlockPool._evict, ("last=False", "last=True"), killed_by=18),
    mutant("head of a chain evicted first", BlockPool.free, ("in reversed(blocks)", "in blocks"), killed_by=18),
    mutant("stale hash after reuse (vllm#49125)", BlockPool._evict, ("self.prefix_cache.forget(block)", "pass"),
           killed_by=(8, 9, 12)),
    mutant("idle block also listed as unused", BlockPool.free,
           ("self._idle[block] = None", "self._idle[block] = None; self._unused.append(block)"), killed_by=1),
    mutant("null block handed out", BlockPool.__init__, ("range(NULL_BLOCK + 1, num_blocks)", "range(num_blocks)"),
           killed_by=1),
    mutant("fork does not own the last block", BlockPool.share, ("for block in blocks:", "for block in blocks[:-1]:"),
           killed_by=2),
    mutant("a block more at each boundary", BlockPool.num_needed, (ONE_MORE, "num_tokens // self.block_size + 1"),
           killed_by=(6, 12, 15)),
    # Prefix cache
    mutant("hash without its parent", PrefixCache.extend, ("parent_key + array", "array"), killed_by=(3, 10, 12),
           also=((Prefix.is_same, (("mine, theirs = mine.parent, theirs.parent", "return True"),)),)),
    mutant("hash over a partial block", PrefixCache.extend,
           ("num_tokens // self.block_size", "-(-num_tokens // self.block_size)"), killed_by=(8, 9, 14),
           also=((BlockManager.publish, (("chunk.stop // block_size", "-(-chunk.stop // block_size)"),)),)),
    mutant("collision taken as a hit", PrefixCache.find, ("and self.prefixes[block].is_same(prefix)", ""),
           killed_by=(3, 10, 12)),
    mutant("salt cut off", PrefixCache.extend, ("self._hash(salt.encode())", "self._hash(salt[:6].encode())"),
           killed_by=10, also=((Prefix.is_same, ((" or mine.salt != theirs.salt", ""),)),)),
    mutant("salt ignored", PrefixCache.extend, ("self._hash(salt.encode())", "self._hash(b'')"), killed_by=10,
           also=((Prefix.is_same, ((" or mine.salt != theirs.salt", ""),)),)),
    mutant("eviction drops a sibling's entry", PrefixCache.publish,
           ("prefix.key not in self._blocks and block not in self.prefixes", "block not in self.prefixes"),
           killed_by=11,
           also=((PrefixCache.forget, (("del self._blocks[prefix.key]", "self._blocks.pop(prefix.key, None)"),)),)),
    mutant("nothing is ever published", PrefixCache.publish, ("self._blocks[prefix.key] = block", "pass"), killed_by=17,
           also=((PrefixCache.forget, (("del self._blocks[prefix.key]", "pass"),)),)),
    # Block manager
    mutant("hit leaves no token to compute", BlockManager.take_prefix,
           ("sequence.num_tokens - 1", "sequence.num_tokens"), killed_by=(12, 14)),
    mutant("copy-on-write forgotten", BlockManager.grow, ("tail < len(table) and pool", "False and pool"),
           killed_by=(3, 5)),
    mutant("block renamed but not copied", BlockManager.grow, ("self._copy_block(table[tail], target)", "pass"),
           killed_by=7),
    mutant("copy finds no room", BlockManager.grow, ("num_new + must_copy", "num_new"), killed_by=12),
    mutant("old block of a copy not given up", BlockManager.grow, ("pool.free([table[tail]])", "pass"),
           killed_by=(1, 2)),
    mutant(
        "hash published before compute", BlockManager.grow,
        (
            "sequence.num_writable_tokens = len",
            "self.publish([ScheduledChunk(sequence, 0, num_tokens)]); sequence.num_writable_tokens = len",
        ), killed_by=(8, 9),
    ),
    mutant("tail block leaked", BlockManager.release, ("sequence.block_table)", "sequence.block_table[:-1])"),
           killed_by=1),
]  # fmt: skip
