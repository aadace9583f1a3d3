"""The same tokens through two models at once: what a user of a tool that compares models writes around it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.zoo.models import load
from harness.oracle.caches import caches_of


@dataclass(slots=True)
class Fed:
    """One model, its cache and its last logits [B, T, V]; whoever runs it, they follow its outputs."""

    model: Any
    cache: dict[str, Any] = field(default_factory=dict)
    logits: Any = None

    def take(self, output: Any) -> None:
        self.cache, self.logits = caches_of(output), output.logits


@dataclass(frozen=True, slots=True)
class DrivenForward:
    """One forward, which both models must run once."""

    rows: Sequence[tuple[int, int] | None]
    """Of each of the [batch * tokens]: request and position; None for padding."""
    inputs: dict[str, torch.Tensor]
    expected: Fed
    actual: Fed

    def arguments(self, fed: Fed) -> dict[str, Any]:
        """Return the arguments of one of the models."""
        return {**self.inputs, "use_cache": True, **fed.cache}

    @torch.no_grad()
    def run(self, fed: Fed) -> None:
        """Run one of the models."""
        fed.model(**self.arguments(fed))


def sound_model(subject: ToolSubject) -> Any:
    """Return transformers' own model of the checkpoint."""
    return load(subject.checkpoint, dtype=getattr(torch, subject.dtype))


def forwards(subject: ToolSubject, sound: Any) -> Iterator[DrivenForward]:
    """Yield the forwards of the subject's schedule: each prompt whole, in chunks or in one batch, then single tokens.

    Tokens are those that the sound model chooses.
    """
    together = subject.schedule == "batched"
    groups = [list(range(len(subject.prompts)))] if together else [[at] for at in range(len(subject.prompts))]
    for group in groups:
        both = Fed(sound), Fed(subject.engine)
        modules = [fed for fed in both if hasattr(fed.model, "register_forward_hook")]
        handles = [
            fed.model.register_forward_hook(lambda _module, _args, out, fed=fed: fed.take(out)) for fed in modules
        ]
        try:
            yield from _of_group(subject, group, *both)
        finally:
            for handle in handles:
                handle.remove()


def _of_group(subject: ToolSubject, group: Sequence[int], expected: Fed, actual: Fed) -> Iterator[DrivenForward]:
    longest = max(len(subject.prompts[at]) for at in group)
    padding = [longest - len(subject.prompts[at]) for at in group]
    ids = torch.tensor([[0] * pad + list(subject.prompts[at]) for pad, at in zip(padding, group, strict=True)])
    kind, _, size = subject.schedule.partition(":")
    chunk = int(size) if kind == "chunked" else longest
    begins = [*range(0, longest, chunk), *range(longest, longest + subject.max_new_tokens - 1)]
    for begin, end in zip(begins, [*begins[1:], longest + subject.max_new_tokens - 1], strict=True):
        if begin >= longest:
            ids = torch.cat((ids, expected.logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        inputs = {"input_ids": ids[:, begin:end]}
        places = torch.arange(begin, end)[None] - torch.tensor(padding)[:, None]
        if any(padding):
            seen = torch.arange(end)[None] >= torch.tensor(padding)[:, None]
            inputs |= {"attention_mask": seen.long(), "position_ids": places.clamp(min=0)}
        lanes = zip(group, places.tolist(), strict=True)
        rows = [(at, place) if place >= 0 else None for at, lane in lanes for place in lane]
        yield DrivenForward(rows, inputs, expected, actual)


def captured(model: Any, run: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Return what each module returned, by its path, in the order in which they ended."""
    values: dict[str, torch.Tensor] = {}

    def keep(path: str, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        if isinstance(value, torch.Tensor):
            values[path] = value.detach().clone()

    handles = [
        module.register_forward_hook(lambda _module, _args, out, path=path: keep(path, out))
        for path, module in model.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return values


def as_rows(value: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """Return a module's value as [rows, width] in float64; None if it has no row for each token."""
    for dims in (1, 2):
        if value.dim() > dims and value.shape[:dims].numel() == num_rows:
            return value.flatten(0, dims - 1).flatten(1).double()
    return None
