"""The whole reference engine under the engine suite, on the embedded checkpoints."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from harness.formats.checkpoint import embedded_cases
from harness.properties.engine.adapter import Taps
from reference_engine import EngineConfig, LLMEngine, SamplingParams, StepInfo


class EngineSubject:
    """The reference engine with qwen3-tiny in float32."""

    model = "qwen3-tiny"
    dtype = "float32"
    backend = "paged"
    max_model_len = 48

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        prefix_caching: bool = False,
        block_order: int = 0,
        poison: bool = False,
        num_drafts: int = 0,
    ) -> None:
        folder = embedded_cases() / "checkpoints" / self.model
        config = EngineConfig(
            dtype=self.dtype,
            attention_backend=self.backend,
            block_size=block_size,
            num_blocks=256 if num_blocks is None else num_blocks + 1,  # the null block is one more
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            enable_prefix_caching=prefix_caching,
            debug_checks=poison,
            num_speculative_tokens=num_drafts,
        )
        self._engine = LLMEngine(folder, config)
        self.vocab_size = self._engine.model_config.vocab_size
        self._counted = {"preemptions": 0, "cached": 0}
        self._count()
        if block_order:
            unused = list(self._engine.pool._unused)
            random.Random(block_order).shuffle(unused)
            self._engine.pool._unused = deque(unused)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Continue all prompts, watched."""
        self._engine.observer = recorder = _Recorder()
        params = [SamplingParams(max_new_tokens=number, ignore_eos=True) for number in max_new_tokens]
        outputs = self._engine.generate(prompts, params)
        places = {output.request_id: place for place, output in enumerate(outputs)}
        self._taps = {
            name: {(places[request_id], position): row for (request_id, position), row in rows.items()}
            for name, rows in recorder.rows.items()
        }
        return [list(output.token_ids) for output in outputs]

    def taps(self) -> Taps:
        """Return the intermediates of the last call, of rows computed twice the later ones."""
        return self._taps

    def num_preemptions(self) -> int:
        """Count the preemptions."""
        return self._counted["preemptions"]

    def num_verified_drafts(self) -> int:
        """Count the guesses that were verified."""
        return self._engine.speculation.num_drafted

    def num_cached_tokens(self) -> int:
        """Count the tokens of all prefix hits."""
        return self._counted["cached"]

    def _count(self) -> None:
        scheduler: Any = self._engine.scheduler
        preempt, take = scheduler._preempt_youngest, scheduler._blocks.take_prefix

        def counted_preempt() -> Any:
            self._counted["preemptions"] += 1
            return preempt()

        def counted_take(sequence: Any) -> int:
            num_tokens: int = take(sequence)
            self._counted["cached"] += num_tokens
            return num_tokens

        scheduler._preempt_youngest, scheduler._blocks.take_prefix = counted_preempt, counted_take


class _Recorder:
    """Keeps every row of every tap."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple[int, int], torch.Tensor]] = {}

    def begin_step(self, step: StepInfo) -> None:
        """See `Observer.begin_step`."""
        self._all = list(zip(step.request_ids, step.positions, strict=True))
        self._sampled = [self._all[row] for row in step.sampled_rows]

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        """See `Observer.tap`."""
        keys = self._all if len(tensor) == len(self._all) else self._sampled
        self.rows.setdefault(name, {}).update(zip(keys, tensor.clone(), strict=True))

    def end_step(self, sampled: Sequence[int]) -> None:
        """See `Observer.end_step`."""
