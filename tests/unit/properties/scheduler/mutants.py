"""Small changes to the reference engine's scheduler and admission: bugs that others had."""

from reference_engine.block_manager import BlockManager
from reference_engine.requests.admission import Admission
from reference_engine.scheduler import Scheduler

from ..mutation import mutant

SCHEDULER_MUTANTS = [
    mutant("decode ignores the budget", Scheduler._schedule_running,
           ("if stop - start > budget:", "if stop - start > max(budget, 1):"), ("if budget == 0:\n", "if False:\n"),
           ("budget -= stop - start", "budget = max(0, budget - stop + start)"), killed_by=19),
    mutant("prompt not cut to the budget", Scheduler._admit_waiting,
           ("min(sequence.num_tokens, start + budget)", "sequence.num_tokens"), killed_by=19),
    mutant("max_num_seqs not enforced", Scheduler._admit_waiting, (" and len(self.running) < self._max_num_seqs", ""),
           killed_by=20),
    mutant("a fork runs beyond max_num_seqs", Scheduler.fork,
           ("elif len(self.running) >= self._max_num_seqs:", "elif False:"), killed_by=20),
    mutant("preempted request goes to the back", Scheduler._preempt_youngest, ("appendleft", "append"), killed_by=22),
    mutant("preempted request keeps its block table (vllm#5349)", BlockManager.release,
           ("sequence.reset()", "sequence.num_computed_tokens = 0"), killed_by=(5, 15, 19, 21, 23)),
    mutant("the oldest gives way after it was scheduled", Scheduler._preempt_youngest, ("pop()", "pop(0)"),
           killed_by=(12, 15)),
    mutant("abort forgets the blocks", Scheduler.abort, ("self.finish(sequence)", "self.running.remove(sequence)"),
           killed_by=(1, 2)),
    mutant("failed admission keeps its prefix", Scheduler._admit_waiting, ("self._blocks.release(sequence)", "pass"),
           killed_by=(1, 2)),
    mutant("request larger than the pool accepted", Admission._check_blocks,
           ("num_needed > self.num_usable_blocks", "False"), killed_by=21),
    mutant("request longer than the model accepted", Admission._check_length,
           ("num_prompt_tokens + max_new_tokens > self.max_model_len", "False"), killed_by=21),
    mutant("chunk offset forgotten (mlx-node#33)", Scheduler._schedule_running,
           ("start, stop = sequence.num_computed_tokens,", "start, stop = 0,"), killed_by=(5, 9, 19, 22)),
    mutant(
        "fork written without a copy", Scheduler.fork, ("self._blocks.share(parent, child)",
        "self._blocks.share(parent, child); child.num_writable_tokens = 10**9"), killed_by=(5, 15),
    ),
]  # fmt: skip

SURVIVORS = [
    # No longer a bug where there is a prefix cache: `take_prefix` sets the progress anew at every admission.
    mutant("preempted request keeps its progress", BlockManager.release,
           ("sequence.reset()", "sequence.block_table = sequence.block_table[:0]"), killed_by=()),
    # Slow, and right: all invariants are about what is served, none about how many are served at once.
    mutant("waiting requests starve after running ones", Scheduler.schedule,
           ("if self.waiting and not has_preempted:", "if self.waiting and not self.running and not chunks:"),
           killed_by=()),
]  # fmt: skip
"""Mutants that no invariant kills, and why."""
