"""Small changes to the reference engine's pool, prefix cache, block manager and scheduler: bugs that others had."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from reference_engine.admission import Admission
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.prefix_cache import Prefix, PrefixCache
from reference_engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    target: Any
    """A method."""
    changes: tuple[tuple[str, str], ...]
    """Pieces of its source and what stands there instead."""
    killed_by: frozenset[int]
    """Invariants that the suite may name: which one it meets first depends on the example."""
    also: tuple[tuple[Any, tuple[tuple[str, str], ...]], ...] = ()
    """Further methods, where one is not enough."""

    @property
    def owner(self) -> type:
        """The class that is changed."""
        return _owner(self.target)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Change the methods, and put them back."""
        with pytest.MonkeyPatch.context() as patch:
            for target, changes in ((self.target, self.changes), *self.also):
                patch.setattr(_owner(target), target.__name__, _mutated(target, changes))
            yield


def _owner(target: Any) -> type:
    return target.__globals__[target.__qualname__.partition(".")[0]]


def _mutated(target: Any, changes: tuple[tuple[str, str], ...]) -> Any:
    source = textwrap.dedent(inspect.getsource(target))
    for old, new in changes:
        assert source.count(old) == 1, f"{target.__qualname__} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, target.__globals__, namespace)
    return namespace[target.__name__]


def mutant(
    name: str, target: Any, *changes: tuple[str, str], killed_by: int | tuple[int, ...], also: Any = ()
) -> Mutant:
    invariants = frozenset((killed_by,) if isinstance(killed_by, int) else killed_by)
    return Mutant(name=name, target=target, changes=changes, killed_by=invariants, also=also)


ONE_MORE = "-(-num_tokens // self.block_size)"

BLOCK_MUTANTS = [
    # Block pool
    mutant(
        "block freed while in use (vllm#45357)", BlockPool.free,
        ("self._num_owners[block] -= 1", "self._num_owners[block] = 0"), killed_by=(4, 12),
    ),
    mutant(
        "double free accepted (sglang#29310)", BlockPool.free,
        ('self._check_owned(blocks, "free")', "pass"), killed_by=16,
    ),
    mutant(
        "block twice in one free accepted", BlockPool._check_owned,
        ("len(set(blocks)) != len(blocks)", "False"), killed_by=16,
    ),
    mutant(
        "owner not counted on a hit", BlockPool.share_prefix, ("self._num_owners[block] += 1", "pass"),
        killed_by=(2, 4, 12),
    ),
    mutant(
        "hit block stays idle", BlockPool.share_prefix, ("del self._idle[block]", "pass"), killed_by=(4, 12),
    ),
    mutant(
        "one block too many promised", BlockPool.can_allocate,
        ("num_blocks <= len", "num_blocks <= 1 + len"), killed_by=12,
    ),
    mutant(
        "last block never given out", BlockPool.can_allocate, ("num_blocks <= len", "num_blocks < len"),
        killed_by=(6, 12),
    ),
    mutant(
        "most recently used evicted first", BlockPool._evict, ("last=False", "last=True"), killed_by=18,
    ),
    mutant(
        "head of a chain evicted first", BlockPool.free, ("in reversed(blocks)", "in blocks"), killed_by=18,
    ),
    mutant(
        "stale hash after reuse (vllm#49125)", BlockPool._evict,
        ("self.prefix_cache.forget(block)", "pass"), killed_by=(8, 9, 12),
    ),
    mutant(
        "idle block also listed as unused", BlockPool.free,
        ("self._idle[block] = None", "self._idle[block] = None; self._unused.append(block)"), killed_by=1,
    ),
    mutant(
        "null block handed out", BlockPool.__init__, ("range(NULL_BLOCK + 1, num_blocks)", "range(num_blocks)"),
        killed_by=1,
    ),
    mutant(
        "fork does not own the last block", BlockPool.share, ("for block in blocks:", "for block in blocks[:-1]:"),
        killed_by=2,
    ),
    mutant(
        "a block more at each boundary", BlockPool.num_needed, (ONE_MORE, "num_tokens // self.block_size + 1"),
        killed_by=(6, 12, 15),
    ),
    # Prefix cache
    mutant(
        "hash without its parent", PrefixCache.extend, ("parent_key + array", "array"), killed_by=(3, 10, 12),
        also=((Prefix.is_same, (("mine, theirs = mine.parent, theirs.parent", "return True"),)),),
    ),
    mutant(
        "hash over a partial block", PrefixCache.extend,
        ("num_tokens // self.block_size", "-(-num_tokens // self.block_size)"), killed_by=(8, 9),
        also=(
            (BlockManager.publish, (("chunk.stop // block_size", "-(-chunk.stop // block_size)"),)),
        ),
    ),
    mutant(
        "collision taken as a hit", PrefixCache.find,
        ("and self.prefixes[block].is_same(prefix)", ""), killed_by=(3, 10, 12),
    ),
    mutant(
        "salt ignored", PrefixCache.extend, ("self._hash(salt.encode())", "self._hash(b'')"), killed_by=10,
        also=((Prefix.is_same, ((" or mine.salt != theirs.salt", ""),)),),
    ),
    mutant(
        "eviction drops a sibling's entry", PrefixCache.publish,
        ("prefix.key not in self._blocks and block not in self.prefixes", "block not in self.prefixes"), killed_by=11,
        also=((PrefixCache.forget, (("del self._blocks[prefix.key]", "self._blocks.pop(prefix.key, None)"),)),),
    ),
    mutant(
        "nothing is ever published", PrefixCache.publish, ("self._blocks[prefix.key] = block", "pass"), killed_by=17,
        also=((PrefixCache.forget, (("del self._blocks[prefix.key]", "pass"),)),),
    ),
    # Block manager
    mutant(
        "hit leaves no token to compute", BlockManager.take_prefix,
        ("sequence.num_tokens - 1", "sequence.num_tokens"), killed_by=(12, 14),
    ),
    mutant(
        "copy-on-write forgotten", BlockManager.grow, ("tail < len(table) and pool", "False and pool"),
        killed_by=(3, 5),
    ),
    mutant(
        "block renamed but not copied", BlockManager.grow, ("self._copy_block(table[tail], target)", "pass"),
        killed_by=7,
    ),
    mutant(
        "copy finds no room", BlockManager.grow, ("num_new + must_copy", "num_new"), killed_by=12,
    ),
    mutant(
        "old block of a copy not given up", BlockManager.grow, ("pool.free([table[tail]])", "pass"), killed_by=(1, 2),
    ),
    mutant(
        "hash published before compute", BlockManager.grow,
        (
            "sequence.num_writable_tokens = len",
            "self.publish([Chunk(sequence, 0, num_tokens)]); sequence.num_writable_tokens = len",
        ), killed_by=(8, 9),
    ),
    mutant(
        "tail block leaked", BlockManager.release, ("sequence.block_table)", "sequence.block_table[:-1])"),
        killed_by=1,
    ),
]  # fmt: skip

SCHEDULER_MUTANTS = [
    mutant(
        "decode ignores the budget", Scheduler._schedule_running,
        ("if stop - start > budget:", "if stop - start > max(budget, 1):"),
        ("if budget == 0:\n", "if False:\n"), ("budget -= stop - start", "budget = max(0, budget - stop + start)"),
        killed_by=19,
    ),
    mutant(
        "prompt not cut to the budget", Scheduler._admit_waiting,
        ("min(sequence.num_tokens, start + budget)", "sequence.num_tokens"), killed_by=19,
    ),
    mutant(
        "max_num_seqs not enforced", Scheduler._admit_waiting,
        (" and len(self.running) < self._max_num_seqs", ""), killed_by=20,
    ),
    mutant(
        "a fork runs beyond max_num_seqs", Scheduler.fork,
        ("elif len(self.running) >= self._max_num_seqs:", "elif False:"), killed_by=20,
    ),
    mutant(
        "preempted request goes to the back", Scheduler._preempt_youngest, ("appendleft", "append"), killed_by=22,
    ),
    mutant(
        "preempted request keeps its block table (vllm#5349)", BlockManager.release,
        ("sequence.reset()", "sequence.num_computed_tokens = 0"), killed_by=(5, 15, 19, 21, 23),
    ),
    mutant(
        "the oldest gives way after it was scheduled", Scheduler._preempt_youngest, ("pop()", "pop(0)"),
        killed_by=(12, 15),
    ),
    mutant(
        "abort forgets the blocks", Scheduler.abort, ("self.finish(sequence)", "self.running.remove(sequence)"),
        killed_by=(1, 2),
    ),
    mutant(
        "failed admission keeps its prefix", Scheduler._admit_waiting, ("self._blocks.release(sequence)", "pass"),
        killed_by=(1, 2),
    ),
    mutant(
        "request larger than the pool accepted", Admission._check_blocks,
        ("num_needed > self.num_usable_blocks", "False"), killed_by=21,
    ),
    mutant(
        "request longer than the model accepted", Admission._check_length,
        ("num_prompt_tokens + max_new_tokens > self.max_model_len", "False"), killed_by=21,
    ),
    mutant(
        "chunk offset forgotten (mlx-node#33)", Scheduler._schedule_running,
        ("start, stop = sequence.num_computed_tokens,", "start, stop = 0,"), killed_by=(5, 9, 19, 22),
    ),
    mutant(
        "fork written without a copy", Scheduler.fork, ("self._blocks.share(parent, child)",
        "self._blocks.share(parent, child); child.num_writable_tokens = 10**9"), killed_by=(5, 15),
    ),
]  # fmt: skip

SURVIVORS = [
    # No longer a bug where there is a prefix cache: `take_prefix` sets the progress anew at every admission.
    mutant(
        "preempted request keeps its progress", BlockManager.release,
        ("sequence.reset()", "sequence.block_table = sequence.block_table[:0]"), killed_by=(),
    ),
    # Slow, and right: all invariants are about what is served, none about how many are served at once.
    mutant(
        "waiting requests starve behind running ones", Scheduler.schedule,
        ("if self.waiting and not has_preempted:", "if self.waiting and not self.running and not chunks:"),
        killed_by=(),
    ),
]  # fmt: skip
"""Mutants that no invariant kills, and why."""
