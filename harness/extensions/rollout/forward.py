"""HF's forwards over the rows under a setting: the truth in high precision, the control in the side's dtype.

A watcher changes a forward as the setting says: routing, cache, head, recorded values put back.

`B` lanes, `T` tokens of a lane, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch.nn import functional

from harness.base.progress import quiet_transformers
from harness.extensions.rollout.lanes import Lane, LaneBatch, Places, make_lanes
from harness.extensions.rollout.setting import Meaning, OtherWeights, Setting, token_logprobs
from harness.formats.taps import Graph
from harness.oracle.model import HFModel
from harness.oracle.precision import truth_dtype, upcast, without_tf32
from harness.oracle.requests import batch_tokens
from harness.oracle.watch import CHOICE, AttentionCall, as_rows, from_rows, run_attention, watching


class Altered:
    """Is shown a forward over some lanes, see `Watcher`."""

    kept: dict[str, torch.Tensor] | None = None
    """Where what is shown is kept, [tokens, ...] by source; None to keep nothing."""

    def __init__(
        self, hf: HFModel, setting: Setting, batch: LaneBatch, places: Places, *, head: torch.dtype | None = None
    ) -> None:
        """Take the setting; `head` is the dtype that the head computes in, None for its own."""
        self._hf, self._setting, self._head = hf, setting, head
        self._numbers, self._decoded, self._shape = batch.numbers, batch.decoded, batch.ids.shape
        self._places = places
        self._head_input: torch.Tensor | None = None
        self._routers = router_choices(hf.graph)
        operation = hf.graph.by_tap[hf.graph.logits]
        head_module = hf.model.get_output_embeddings()
        self._head_source = next((path for path, item in hf.model.named_modules() if item is head_module), "")
        self._logits_source = operation.source

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.see`."""
        return self._with_cut(source, self._in_head(source, value), value)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.choose`."""
        value, experts, k = chosen, self._setting.experts, chosen.shape[-1]
        if experts is not None and source in self._routers and experts.ids.shape[1] == k * len(self._routers):
            begin = k * self._routers.index(source)
            value = self._put_back(source, chosen, experts.ids[:, begin : begin + k])
        return self._with_cut(source, value, chosen)

    def _with_cut(self, source: str, value: torch.Tensor, was: torch.Tensor) -> torch.Tensor | None:
        """Return the value with what was recorded of it in its place; None if it is as it was."""
        cut = self._setting.cut
        if cut is not None and source in cut.values:
            value = self._put_back(source, value, cut.values[source])
        self._keep(source, value)
        return None if value is was else value

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        dtype = self._setting.cache
        if dtype is None:
            return run_attention(call, function)
        key, value = (rounded(x, dtype, truncates=self._setting.truncates) for x in (call.key, call.value))
        context, *rest = run_attention(replace(call, key=key, value=value), function)
        if not self._setting.caches_prompt:
            plain, *_ = run_attention(call, function)
            context = torch.where(self._decoded.to(context.device)[..., None, None], context, plain)
        return (context, *rest)

    def _in_head(self, source: str, value: torch.Tensor) -> torch.Tensor:
        """Return the value, computed in the head's dtype, or rounded to it, if it is the head's."""
        if source == f"{self._head_source}:input":
            self._head_input = value
        if source == self._head_source and self._head is not None and self._head_input is not None:
            module = self._hf.model.get_output_embeddings()
            bias = None if module.bias is None else module.bias.to(self._head)
            with torch.autocast(value.device.type, enabled=False):
                value = functional.linear(self._head_input.to(self._head), module.weight.to(self._head), bias)
        if source == self._logits_source and self._setting.head is not None:
            return value.to(self._setting.head).to(value.dtype)
        return value

    def _put_back(self, source: str, value: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """Return the value with what was recorded in its place, where something was.

        Rows of another width (an engine that chooses fewer experts) cannot be put back: what follows from them can.
        """
        dim = self._token_dim(source)
        rows = as_rows(value, dim, *self._shape)
        if recorded[0].numel() != rows[0].numel():
            return value
        there = self._numbers >= 0
        restored = recorded[self._numbers.clamp(min=0)].reshape(rows.shape)
        known = restored.isfinite() if restored.is_floating_point() else restored >= 0
        known = known.flatten(1).all(dim=1) & there
        mixed = torch.where(known.view(-1, *[1] * (rows.dim() - 1)).to(rows.device), restored.to(rows), rows)
        return from_rows(mixed, value, dim)

    def _keep(self, source: str, value: torch.Tensor) -> None:
        if self.kept is None or (CHOICE not in source and source not in self._hf.graph.by_source):
            return
        rows = as_rows(value, self._token_dim(source), *self._shape)
        there = self._numbers >= 0
        self._places.put(self.kept, source, self._numbers[there], rows[there.to(rows.device)])

    def _token_dim(self, source: str) -> int:
        operation = self._hf.graph.by_source.get(source)
        return operation.token_dim if operation is not None else 0


def router_choices(graph: Graph) -> list[str]:
    """Return the sources of what routers choose, in the order of the run: of each its last choice, after its groups."""
    last: dict[str, str] = {}
    for operation in graph:
        if CHOICE in operation.source:
            last[operation.source.partition(CHOICE)[0]] = operation.source
    return list(last.values())


def rounded(x: torch.Tensor, dtype: torch.dtype, *, truncates: bool = False) -> torch.Tensor:
    """Round to a dtype of the cache, without a scale, to nearest or towards zero; what is too large is saturated."""
    most = min(torch.finfo(item).max for item in (dtype, x.dtype))  # bfloat16 is wider than float16
    clamped = x.clamp(-most, most).to(dtype)
    if truncates:  # sign and magnitude in one byte: one less is the next value towards zero
        is_larger = clamped.to(x.dtype).abs() > x.abs()
        clamped = (clamped.view(torch.uint8) - is_larger.to(torch.uint8)).view(dtype)
    return clamped.to(x.dtype)


_BLOCK_VALUES = 1 << 22
"""Logits that are in memory in float64 at a time."""
_MOST_SCORES = 1 << 28
"""Scores of a row's eager attention: 1 GiB in float32, 2,896 tokens of 32 heads."""
_NUM_LIKELY = 32
"""Tokens at each position whose logits are kept, the likeliest: their errors say how large rounding is there."""


class Arithmetic(StrEnum):
    """What computes."""

    TRUTH = "truth"
    """HF in high precision."""
    CONTROL = "control"
    """HF in the sides' dtype."""
    EAGER = "eager"
    """The same with eager attention: it rounds scores, and is another draw of what attention makes of a rounding."""
    TRAINER = "trainer"
    """The trainer's replica, with the weights and under the autocast that it has."""


Run = tuple[Setting, Arithmetic]
"""How a forward is run, and by what."""


class Forwards:
    """Columns of log probabilities, each run once."""

    def __init__(self, hf: HFModel, places: Places, *, truth: str = "auto", head: torch.dtype | None = None) -> None:
        """Take the model and the tokens.

        Args:
            hf: the model in the sides' dtype, with all of its weights.
            places: the tokens.
            truth: `float64`, `float32` or `auto`.
            head: dtype of the control's head, where that is not the model's.
        """
        self.hf, self.places = hf, places
        self._dtype, self._head = truth_dtype(truth, hf.dtype), head
        self._columns: dict[Run, torch.Tensor] = {}
        self._logits: dict[Run, torch.Tensor] = {}
        """Of each run: [tokens, likely + 1] float64, the token itself last."""
        self._noises: dict[Setting, torch.Tensor] = {}
        self._replica: HFModel | None = None
        self._autocast: torch.dtype | None = None
        self._sound: list[Run] = []
        """Runs besides the control that only round: how far they are from the truth is legitimate for both sides."""
        self._likely = torch.full((places.num_tokens, min(_NUM_LIKELY, hf.vocab_size)), -1)
        self._resolution = torch.zeros(places.num_tokens, dtype=torch.float64)

    def truth(self, setting: Setting) -> torch.Tensor:
        """Return the truth's log probabilities, [compared] float64."""
        return self._column(setting, Arithmetic.TRUTH)

    def control(self, setting: Setting) -> torch.Tensor:
        """Return those of HF in the side's dtype, [compared] float64."""
        return self._column(setting, Arithmetic.CONTROL)

    def add_eager(self, setting: Setting) -> None:
        """Take HF with eager attention as one more sound run, unless its scores would be too large."""
        longest = max(len(row.tokens) for row in self.places.rows)
        if longest**2 * getattr(self.hf.config, "num_attention_heads", 1) <= _MOST_SCORES:
            self._sound.append((setting, Arithmetic.EAGER))

    def add_replica(self, replica: HFModel, setting: Setting, *, autocast: torch.dtype | None) -> None:
        """Take the trainer's replica as one more sound run: an engine, too, may keep its adapters beside the weights.

        Args:
            replica: the trainer, built anew.
            setting: under which the truth has the same weights and experts.
            autocast: dtype of the autocast that the replica is run under; None for none.
        """
        self._replica, self._autocast = replica, autocast
        self._sound.append((setting, Arithmetic.TRAINER))

    def prepare(self, setting: Setting, meanings: Sequence[Meaning]) -> None:
        """Run one forward of the truth, and one of the control, for many meanings that were not read yet."""
        for arithmetic in (Arithmetic.TRUTH, Arithmetic.CONTROL):
            new = [
                meaning for meaning in meanings if (replace(setting, meaning=meaning), arithmetic) not in self._columns
            ]
            if new:
                self._run(setting, new, arithmetic)

    def noise(self, setting: Setting) -> torch.Tensor:
        """Return the deviation that rounding gives each log probability under a setting, [compared] float64.

        It is the control's from the truth, and no less than what float32 resolves.
        """
        if setting not in self._noises:
            noise = self.deviation((setting, Arithmetic.CONTROL), (setting, Arithmetic.TRUTH), setting)
            self._noises[setting] = torch.maximum(noise, self._resolution[self.places.compared])
        return self._noises[setting]

    def sound_noise(self, setting: Setting) -> torch.Tensor:
        """Return the same of the control or another sound run, the largest one of each token, [compared] float64."""
        others = [self.deviation(run, (run[0], Arithmetic.TRUTH), setting) for run in self._sound]
        return torch.stack([self.noise(setting), *others]).amax(dim=0)

    def deviation(self, one: Run, two: Run, setting: Setting) -> torch.Tensor:
        """Return the deviation of log probabilities under a setting, if logits are as far apart as two runs' are.

        One difference is a poor estimate of a token's deviation: it may be 0 by chance. The likeliest tokens of the
        same position give as many more. With independent errors of deviation d in the logits, a token of probability
        p has in its log probability the variance d² ((1 - p)² + the sum of the others' p²).

        Returns:
            [compared] float64.
        """
        temperatures = [
            row.sampling.temperature if setting.meaning.temperature is None else setting.meaning.temperature
            for row in self.places.rows
        ]
        scale = torch.tensor(temperatures, dtype=torch.float64)[self.places.row_of][self.places.compared]
        first, second, logits = (
            self._read_logits(run, setting.shift) for run in (one, two, (setting, Arithmetic.TRUTH))
        )
        chances = ((logits - logits[:, -1:]) / scale[:, None] + self.truth(setting)[:, None]).exp()
        likely, chosen = chances[:, :-1], chances[:, -1]
        apart = (first - second)[:, :-1]
        centred = apart - (likely * apart).sum(dim=1, keepdim=True) / likely.sum(dim=1, keepdim=True)
        others = (likely.square().sum(dim=1) - chosen.square()).clamp(min=0)
        return centred.square().mean(dim=1).sqrt() / scale * ((1 - chosen).square() + others).sqrt()

    def _read_logits(self, run: Run, shift: int) -> torch.Tensor:
        """Return a run's logits of likely tokens, and of the token itself, [compared, likely + 1] float64."""
        self._column(*run)
        return _shifted(self._logits[_run_key(*run)], self.places, shift)[self.places.compared]

    def record(self, setting: Setting, *, is_trainer: bool = False) -> dict[str, torch.Tensor]:
        """Return what the control computes, or the trainer's replica if there is one, [tokens, ...] by source."""
        arithmetic = Arithmetic.TRAINER if is_trainer and self._replica is not None else Arithmetic.CONTROL
        return self._run(setting, (setting.meaning,), arithmetic, keeps=True)

    def _column(self, setting: Setting, arithmetic: Arithmetic) -> torch.Tensor:
        plain = replace(setting, shift=0)
        if (plain, arithmetic) not in self._columns:
            self._run(plain, (plain.meaning,), arithmetic)
        return _shifted(self._columns[plain, arithmetic], self.places, setting.shift)[self.places.compared]

    @torch.no_grad()
    def _run(
        self, setting: Setting, meanings: Sequence[Meaning], arithmetic: Arithmetic, *, keeps: bool = False
    ) -> dict[str, torch.Tensor]:
        is_truth, is_trainer = arithmetic is Arithmetic.TRUTH, arithmetic is Arithmetic.TRAINER
        hf = self._replica if is_trainer and self._replica is not None else self.hf
        columns = {
            meaning: torch.full((self.places.num_tokens,), torch.nan, dtype=torch.float64) for meaning in meanings
        }
        read = torch.full((self.places.num_tokens, self._likely.shape[1] + 1), torch.nan, dtype=torch.float64)
        kept: dict[str, torch.Tensor] = {}
        _ = hf.graph  # traced now: later the model is changed
        with ExitStack() as stack:
            stack.enter_context(without_tf32())
            if is_truth:
                stack.enter_context(upcast(self._dtype, hf.model))
                stack.enter_context(hf.exactly(dtype=self._dtype))
            if arithmetic is Arithmetic.EAGER:
                stack.enter_context(_eager(hf))
            if is_trainer and self._autocast is not None:
                stack.enter_context(torch.autocast(hf.device.type, self._autocast))
            weights = None if is_trainer else setting.weights  # the replica has the trainer's
            stack.enter_context(_replaced(hf, weights, rounds=not is_truth))
            head = None if is_truth else self._head
            is_plain = not keeps and head is None and setting.runs_plainly
            watch = None if is_plain else stack.enter_context(watching(hf))
            for lanes in grouped(make_lanes(self.places, setting, hf.max_positions), batch_tokens(hf)):
                batch = LaneBatch.of(lanes)
                altered = Altered(hf, setting, batch, self.places, head=head)
                altered.kept = kept if keeps else None
                inputs = {"input_ids": batch.ids}
                if batch.given_positions is not None:  # with a mask, HF does not tell rows apart by their positions
                    inputs |= {"position_ids": batch.given_positions, "attention_mask": batch.is_there.long()}
                with nullcontext() if watch is None else watch.showing(altered):
                    inputs = {name: value.to(hf.device) for name, value in inputs.items()}
                    logits = hf.run(**inputs, use_cache=False).logits
                with torch._C.DisableTorchFunction():
                    changed_logits = None if watch is None else altered.see("logits", logits)
                self._read(logits if changed_logits is None else changed_logits, lanes, columns, read)
        self._logits[_run_key(setting, arithmetic)] = read
        for meaning, column in columns.items():
            self._columns[replace(setting, meaning=meaning, shift=0), arithmetic] = column
        return kept

    def _read(
        self, logits: torch.Tensor, lanes: Sequence[Lane], columns: Mapping[Meaning, torch.Tensor], read: torch.Tensor
    ) -> None:
        """Take what belongs to each token of a response, and to the one before it, from the row before.

        That is its log probability, into `columns`, and its logit and those of likely tokens, into `read`.
        """
        wanted = [
            (at, place - 1, number, lane.token_ids[place])
            for at, lane in enumerate(lanes)
            for place, number in enumerate(lane.numbers)
            if place and number >= 0 and self._is_read(number)
        ]
        eps = torch.finfo(torch.float32).eps
        size = max(1, _BLOCK_VALUES // logits.shape[-1])
        for begin in range(0, len(wanted), size):
            block = wanted[begin : begin + size]
            lane, place, number, token = (torch.tensor(item) for item in zip(*block, strict=True))
            rows = logits[lane.to(logits.device), place.to(logits.device)].to(torch.float64)
            self._resolution[number] = eps * rows.abs().amax(dim=-1).cpu()
            known = self._likely[number]  # of the first run that reads a position: the same ids in all runs
            self._likely[number] = torch.where(known < 0, rows.topk(known.shape[1], dim=-1).indices.cpu(), known)
            kept = torch.cat([self._likely[number], token[:, None]], dim=1)
            read[number] = rows.gather(1, kept.to(rows.device)).cpu()
            sampling = [self.places.rows[row].sampling for row in self.places.row_of[number].tolist()]
            for meaning, column in columns.items():
                column[number] = token_logprobs(rows, token.to(rows.device), sampling, meaning).cpu()

    def _is_read(self, number: int) -> bool:
        row, position = self.places.place(number)
        return position >= row.num_prompt - 1


def grouped(lanes: Sequence[Lane], max_tokens: int) -> Iterator[list[Lane]]:
    """Yield lanes of similar lengths, as many at a time as have no more tokens, padding included."""
    group: list[Lane] = []
    for lane in sorted(lanes, key=lambda lane: len(lane.token_ids)):
        if group and len(lane.token_ids) * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(lane)
    yield group


def chosen_experts(kept: Mapping[str, torch.Tensor], hf: HFModel) -> torch.Tensor | None:
    """Return the experts that were chosen, [tokens, layers * k]; None if those of a router were not kept."""
    routers = router_choices(hf.graph)
    chosen = [kept[source].flatten(1) for source in routers if source in kept]
    return torch.cat(chosen, dim=1) if chosen and len(chosen) == len(routers) else None


def _run_key(setting: Setting, arithmetic: Arithmetic) -> Run:
    """Return what a run's logits depend on."""
    return replace(setting, meaning=Meaning(), shift=0), arithmetic


def _shifted(column: torch.Tensor, places: Places, shift: int) -> torch.Tensor:
    """Return the column with each row's values some tokens later; at its ends a token keeps its own."""
    if not shift:
        return column
    number = torch.arange(len(column))
    source = (number - shift).clamp(0, len(column) - 1)
    is_inside = (places.row_of[source] == places.row_of[number]) & column[source].isfinite().reshape(
        len(column), -1
    ).all(1)
    return column[torch.where(is_inside, source, number)]


@contextmanager
def _eager(hf: HFModel) -> Iterator[None]:
    """Let attention be eager for the duration of the block."""
    before = hf.model.config._attn_implementation
    with quiet_transformers():
        hf.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        with quiet_transformers():
            hf.model.set_attn_implementation(before)


@contextmanager
def _replaced(hf: HFModel, weights: OtherWeights | None, *, rounds: bool) -> Iterator[None]:
    """Put other tensors into the model for the duration of the block, rounded to its dtype or no less fine than it."""
    with ExitStack() as stack:
        parameters = dict(hf.model.named_parameters())
        for name, tensor in (weights.tensors if weights is not None else {}).items():
            if name in parameters:
                parameter = parameters[name]
                stack.callback(setattr, parameter, "data", parameter.data)
                dtype = parameter.dtype if rounds else torch.promote_types(parameter.dtype, tensor.dtype)
                parameter.data = tensor.to(parameter.device, dtype)
        yield
