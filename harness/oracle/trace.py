"""The trace of HF's own forward over a few tokens: each value once, and the values it was made from.

A value counts if something was computed since the ones before it; what is shown twice, or moved in between, is one
value with several names.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.oracle.flow import Flow, Origin
from harness.oracle.precision import eager_experts
from harness.oracle.untraced import UntracedModel, all_parts_held
from harness.oracle.watch import CHOICE, Seeing, as_rows, token_dim, watching, window_of

_SAME_ROUNDINGS, _SAME, _LEAST_ROUNDINGS = 256, 1e-3, 4
"""Distance of a row within which rows of two requests are the same: they stand elsewhere in a product, so their last
bits may differ. In roundings, but no more than a share of the row, which is less than one rounding to bfloat16; so no
less than some roundings."""
_RowShape = tuple[torch.Size, int | None]
"""Shape of a row, and of a choice the number of scores."""
_TOKENS = ((11, 13, 17, 19, 23, 29), (37, 41, 43, 47, 53, 59))
"""Lengths of the two runs: far apart, since a width may be rounded up."""
_ACTIVATION_FILES = ("transformers.activations", "torch.nn.modules.activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One value as HF's run shows it."""

    source: str
    origin: Origin
    token_dim: int
    rows: torch.Tensor
    """[rows, ...]."""
    num_chosen: int | None = None
    """Of a choice among the tokens so far: how many are chosen where there are enough."""

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows[0].numel()


@dataclass(slots=True)
class ForwardTrace:
    """The values of one traced forward."""

    num_requests: int
    num_tokens: int
    shown: dict[str, Shown] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Values that are another one, as a whole and only moved."""
    windows: dict[str, int | None] = field(default_factory=dict)
    """Sliding window of each attention module."""
    num_scores: dict[str, int] = field(default_factory=dict)
    """Among how many each choice was made."""

    def note(self, flow: Flow, source: str, value: torch.Tensor) -> None:
        """Take a value in."""
        dim, origin = _token_dim(source, value, self.num_requests, self.num_tokens), flow.of(value)
        if dim is None or (source.endswith(":input") and not origin.sources):  # masks and positions
            return
        rows = as_rows(value, dim, self.num_requests, self.num_tokens)
        same = None if CHOICE in source else self._shown_already(origin, rows[0].numel())
        if same is not None:
            self.aliases[source] = same
            return
        self.shown[source] = Shown(source=source, origin=origin, token_dim=dim, rows=rows)
        flow.mark(value, Origin((source,)))

    def _shown_already(self, origin: Origin, width: int) -> str | None:
        if len(origin.sources) != 1 or origin.operations:
            return None
        same = self.aliases.get(origin.sources[0], origin.sources[0])
        return same if same in self.shown and self.shown[same].width == width else None


@torch.no_grad()
def trace(hf: UntracedModel) -> ForwardTrace:
    """Run the model over a few tokens and return what it computed for each of them."""
    num_requests, (few, more) = unmistakable_sizes(hf)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hf.vocab_size, (num_requests, more), generator=generator)
    ids[1, : few - 1] = ids[0, : few - 1]  # the first two of the first run differ in their last token only
    return _without_other_rows(hf, _with_choices(hf, _watched(hf, ids[:, :few])), _row_shapes(hf, ids))


def _watched(hf: UntracedModel, ids: torch.Tensor) -> ForwardTrace:
    seen = ForwardTrace(*ids.shape)
    with ExitStack() as stack:
        flow = stack.enter_context(Flow())
        stack.enter_context(_activations_noted(hf, flow))
        merged = _merged(hf)

        def note(source: str, value: torch.Tensor) -> None:
            if source == merged:
                flow.mark(value, flow.of(value) | Origin((), ("merge",)))
            seen.note(flow, source, value)

        watcher = _show_run(hf, ids, note)
    seen.windows = {path: window_of(call) for path, call in watcher.calls.items()}
    seen.num_scores = watcher.num_scores
    return seen


def _merged(hf: UntracedModel) -> str | None:
    """Return the source of the rows into which images were put: over text alone they are the embedding's."""
    if not hf.has_images:
        return None
    return next(f"{path}:input" for path in hf.parts if path.startswith(f"{hf.decoder_path}.") and _is_layer(path))


def _is_layer(path: str) -> bool:
    return path.rpartition(".")[2].isdecimal()


def _row_shapes(hf: UntracedModel, ids: torch.Tensor) -> dict[str, _RowShape]:
    """Return the shape of a row of everything that the model shows, by source: its products are not computed."""
    shapes: dict[str, torch.Size] = {}

    def note(source: str, value: torch.Tensor) -> None:
        dim = _token_dim(source, value, *ids.shape)
        if dim is not None:
            shapes[source] = as_rows(value, dim, *ids.shape).shape[1:]

    with _Unmultiplied():
        watcher = _show_run(hf, ids, note)
    return {source: (shape, watcher.num_scores.get(source)) for source, shape in shapes.items()}


class _Unmultiplied(TorchFunctionMode):
    """Gives elements of the input instead of its product with a weight: other rows stay other rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not nn.functional.linear or len(args) < 2:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        return x[..., torch.arange(len(weight), device=x.device) % x.shape[-1]]


def _token_dim(source: str, value: torch.Tensor, num_requests: int, num_tokens: int) -> int | None:
    """Return what `token_dim` does; of a choice among the tokens so far, which may be all of them, the first one."""
    is_choice = CHOICE in source and value.dim() == 3 and value.shape[:2] == (num_requests, num_tokens)
    return 1 if is_choice else token_dim(value, num_requests, num_tokens)


def _with_choices(hf: UntracedModel, seen: ForwardTrace) -> ForwardTrace:
    """Note how many tokens each choice among those so far takes, by the setting of the module that chooses."""
    choices = {}
    for source, item in seen.shown.items():
        if CHOICE in source and seen.num_scores.get(source) == seen.num_tokens:
            settings = vars(hf.module(source.partition(CHOICE)[0]))
            num = next((n for name, n in settings.items() if name.endswith("topk") and type(n) is int), None)
            if num is not None and item.rows.shape[1:] == (min(num, seen.num_tokens),):
                choices[source] = replace(item, num_chosen=num)
    return replace(seen, shown=seen.shown | choices)


def _show_run(hf: UntracedModel, ids: torch.Tensor, sink: Callable[[str, torch.Tensor], None]) -> Seeing:
    """Run the model over [requests, tokens], show every value to `sink`, and return what was seen besides."""
    watcher = Seeing(sink)
    with ExitStack() as stack:
        stack.enter_context(eager_experts(*hf.configs))
        watch = stack.enter_context(watching(hf))
        stack.enter_context(all_parts_held(hf))
        stack.enter_context(watch.showing(watcher))
        sink("logits", hf.run(input_ids=ids.to(hf.device), use_cache=False).logits)
    return watcher


def unmistakable_sizes(hf: UntracedModel) -> tuple[int, tuple[int, int]]:
    """Return a number of requests, and two of tokens, by which a dimension that counts them is told from every other.

    The tokens are no size of the model's, and the requests divide no number of experts, so that rows in another order
    (experts before tokens) do not look alike in two requests.
    """
    settings = {name: value for name, value in vars(hf.config).items() if type(value) is int}
    sizes = {size for parameter in hf.model.parameters() for size in parameter.shape} | set(settings.values())
    experts = [value for name, value in settings.items() if "expert" in name]
    requests = next(n for n in (3, 5, 7, 11, 13) if all(value % n for value in experts if value))
    few, more = (next(n for n in token if not {n, n * requests} & sizes) for token in _TOKENS)
    return requests, (few, more)


def _without_other_rows(hf: UntracedModel, seen: ForwardTrace, shapes: Mapping[str, _RowShape]) -> ForwardTrace:
    """Leave out values whose rows are not the tokens in their order, and rows as wide as the history is long.

    What a tensor's sizes say may be chance, or rows may be in another order: only the last row may see the last token.
    In a run of another length the rows have the same shape.
    """
    kept = {
        source: item
        for source, item in seen.shown.items()
        if (item.num_chosen or shapes.get(source) == (item.rows.shape[1:], seen.num_scores.get(source)))
        and _is_causal(item.rows, seen.num_tokens, hf.tokens_ahead(source.partition(":")[0]))
        and not _is_mask(item.rows)
    }
    return replace(seen, shown=dict(_bridged(seen.shown, kept)))


def _is_causal(rows: torch.Tensor, num_tokens: int, ahead: int = 0) -> bool:
    """Whether the rows of the first two requests, whose last tokens differ, are the same but for those that see them.

    Args:
        rows: of all requests.
        num_tokens: of each request.
        ahead: tokens after its own that a row sees.
    """
    if not rows.is_floating_point():
        return True  # a choice between near scores may fall either way
    rounding = torch.finfo(rows.dtype).eps
    distance = max(min(_SAME, _SAME_ROUNDINGS * rounding), _LEAST_ROUNDINGS * rounding)
    first, second = (rows[at : at + num_tokens - 1 - ahead].flatten(1).to(torch.float64) for at in (0, num_tokens))
    if not torch.equal(first.isfinite(), second.isfinite()):
        return False
    first, second = (x.where(x.isfinite(), 0) for x in (first, second))
    return bool(((first - second).norm(dim=1) <= distance * second.norm(dim=1)).all())


def _is_mask(rows: torch.Tensor) -> bool:
    """Whether all that is in the rows is zero or as low as the dtype goes."""
    if not rows.is_floating_point():
        return False
    is_low = rows <= torch.finfo(rows.dtype).min / 2
    return bool(is_low.any() and (is_low | (rows == 0)).all())


def _bridged(shown: dict[str, Shown], kept: dict[str, Shown]) -> Iterator[tuple[str, Shown]]:
    """Yield the values that are kept; a value computed from one that is left out comes from that one's sources."""

    def whole(origin: Origin) -> Origin:
        bridged = Origin((), origin.operations)
        for source in reversed(origin.sources):
            behind = Origin((source,)) if source in kept or source not in shown else whole(shown[source].origin)
            bridged = behind | bridged
        return bridged

    for source, item in kept.items():
        yield source, replace(item, origin=whole(item.origin))


@contextmanager
def _activations_noted(hf: UntracedModel, flow: Flow) -> Iterator[None]:
    """Note what an activation module computes as one operation, however it is made."""

    def after(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        before = flow.of(args[0])
        flow.mark(output, before | Origin((), ("activation",)))

    with ExitStack() as stack:
        for module in hf.model.modules():
            if type(module).__module__ in _ACTIVATION_FILES:
                stack.callback(module.register_forward_hook(after).remove)
        yield
