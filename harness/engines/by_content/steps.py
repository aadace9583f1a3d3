"""Steps of an engine with all that it computes, and the tensors that may be a tap."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from harness.engines.by_content.sites import See, Site, SiteWatcher
from harness.errors import Code, HarnessError

_DEPTH = 3
"""Attributes of attributes of attributes, in which the engine's modules are looked for."""

Work = Sequence[tuple[int, list[int], int]]
"""What a step computes: of each request its number, token ids, and the position of the first of them."""


class Stepper(Protocol):
    """A live engine: any object that computes steps."""

    # An object whose steps compute all earlier tokens of a request again has an attribute `recomputes`, which is true.
    # One that forgets what it holds from a request's first position on, where that is not the next one, has an
    # attribute `rewinds`, which is true. If it returns the logits of all tokens besides, it can verify drafts.
    # One that has a cache of prefixes has a method `begin(request, token_ids)`: see `StepEngine`.
    # One that runs layers that predict further tokens has an attribute `tokens_ahead`, the number of these layers.

    def step(self, work: Work) -> torch.Tensor:
        """Compute the tokens, and return the logits of each request's last one, [requests, vocabulary].

        Or those of all tokens, [tokens, vocabulary].
        """


def module_paths(stepper: object) -> dict[nn.Module, str]:
    """Return the modules of an engine, found in its attributes, with their paths."""
    found: dict[nn.Module, str] = {}
    level: list[tuple[str, Any]] = [("", stepper)]
    for _ in range(_DEPTH + 1):
        following: list[tuple[str, Any]] = []
        for prefix, value in level:
            if isinstance(value, nn.Module):
                for path, module in value.named_modules():
                    found.setdefault(module, path)
            elif hasattr(value, "__dict__"):
                following += [(f"{prefix}{name}.", var) for name, var in vars(value).items()]
        level = following
    return found


class Watching(Protocol):
    """Shows the tensors of the steps that run in the block."""

    def __enter__(self) -> "Watching":
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End."""

    def returned(self, value: torch.Tensor) -> None:
        """Show what the step returns."""


def watching(stepper: Stepper, see: See, *, only: Collection[Site] | None = None) -> Watching:
    """Watch an engine: by its own method `watching(see, only)`, where its tensors are not torch's."""
    own: Callable[..., Watching] | None = getattr(stepper, "watching", None)
    return SiteWatcher(module_paths(stepper), see, only=only) if own is None else own(see, only)


def with_following(stepper: Stepper, work: Work, following: Sequence[Sequence[int]] = ()) -> Any:
    """Return work as an engine takes it: one with layers that predict further tokens is told the tokens that follow."""
    ahead = tokens_ahead(stepper)
    if not ahead:
        return work
    known = [list(tokens[:ahead]) for tokens in following] or [[] for _ in work]
    return [(*item, tokens) for item, tokens in zip(work, known, strict=True)]


def tokens_ahead(stepper: Stepper) -> int:
    """Return how many tokens an engine predicts beside the next one."""
    return int(getattr(stepper, "tokens_ahead", 0))


def watched_step(stepper: Stepper, work: Work, following: Sequence[Sequence[int]] = ()) -> dict[Site, torch.Tensor]:
    """Run a step and return copies of all tensors that it computes, in the order of the run."""
    seen: dict[Site, torch.Tensor] = {}

    def see(site: Site, tensor: torch.Tensor) -> None:
        seen[site] = tensor.to("cpu", copy=True)

    watched_run(stepper, work, see, following=following)
    return seen


def watched_run(
    stepper: Stepper,
    work: Work,
    see: See,
    *,
    only: Collection[Site] | None = None,
    rows: Sequence[int] | None = None,
    following: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, int]:
    """Run a step while its tensors are shown; return its logits, [requests, vocabulary], and the rows that it made.

    Args:
        stepper: the engine.
        work: of the step.
        see: shown the tensors.
        only: the sites to show; None for all.
        rows: tokens of the step whose logits are returned, [rows, vocabulary]; None: the last one of each request.
        following: of each request the tokens that come next.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it returned no logits, or not one row for each request; or not one for each
            token where `rows` are asked for.
    """
    ends = [*accumulate(len(tokens) for _, tokens, _ in work)]
    with torch.no_grad(), watching(stepper, see, only=only) as watch:
        logits = stepper.step(with_following(stepper, work, following))
        is_tensor = isinstance(logits, torch.Tensor) and logits.is_floating_point() and logits.dim() > 0
        num_rows = logits.numel() // max(1, logits.shape[-1]) if is_tensor else 0
        if not is_tensor or num_rows not in ((ends[-1],) if rows is not None else (len(work), ends[-1])):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"the engine's step returns no row of logits for each {'request' if rows is None else 'token'}",
                where=f"{type(stepper).__name__}.step",
                expected=f"a tensor [{len(work) if rows is None else ends[-1]}, vocabulary]",
                actual=list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__,
                hint="return the logits of the last token of each request, in the order of the work; drafts are "
                "verified by those of all tokens",
            )
        returned = logits.detach().reshape(num_rows, -1)
        if num_rows == ends[-1]:
            returned = returned[[end - 1 for end in ends] if rows is None else list(rows)]
        watch.returned(returned)
    return returned, num_rows


def rewinds(stepper: Stepper) -> bool:
    """Whether an engine goes back where a request's first position is one that it has computed."""
    return bool(getattr(stepper, "rewinds", False))


def recomputes(stepper: Stepper) -> bool:
    """Whether each step of an engine computes all earlier tokens of its request again."""
    return bool(getattr(stepper, "recomputes", False))


def one_token_steps(
    stepper: Stepper, ids: Sequence[int], numbers: Iterator[int], following: Sequence[Sequence[int]] = ()
) -> dict[Site, torch.Tensor]:
    """Return the tensors of many requests of one token: of one step, or side by side of a step for each."""
    works: list[tuple[int, list[int], int]] = [(next(numbers), [token], 0) for token in ids]
    try:
        return watched_step(stepper, works, following)
    except ValueError:  # an engine of one request a step
        single = [watched_step(stepper, [work], following[at : at + 1]) for at, work in enumerate(works)]
    common = [site for site in single[0] if all(site in step for step in single)]
    same = [site for site in common if len({step[site].shape for step in single}) == 1]
    return {site: torch.stack([step[site] for step in single]) for site in same}
