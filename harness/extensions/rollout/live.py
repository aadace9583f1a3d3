"""Sides that are at hand: a trainer's module and an engine run the rows' tokens, and what they compute is kept."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.base.files import scratch_folder
from harness.engines import engine_errors
from harness.engines.module.forward import evaluating
from harness.errors import Code, HarnessError
from harness.extensions.rollout.forward import Altered, grouped
from harness.extensions.rollout.lanes import Lane, LaneBatch, Places, make_lanes, packs
from harness.extensions.rollout.setting import PutBack, Setting
from harness.formats.recording import Recording, RequestInfo
from harness.formats.schedule import parse_schedules
from harness.judge.jobs.opened import match_taps, open_planned, record_run
from harness.judge.weights.sources import is_sharded, plain_name
from harness.oracle.model import HFModel
from harness.oracle.requests import batch_tokens
from harness.oracle.watch import watching
from harness.plan import Plan

LAYOUTS = ("alone", "right", "left", "packed")
"""How a trainer gets its rows: one by one, padded after or before them, or as one sequence, positions restarting."""


def trainer_values(module: nn.Module, hf: HFModel, places: Places, layout: str, *, is_like: bool) -> PutBack:
    """Run a trainer's module over the rows and return what it computes.

    Args:
        module: a model of HF's with the named model's tensors, of which all operations are seen; any other module gives
            its logits alone.
        hf: the named model, whose operations are looked for.
        places: the tokens.
        layout: one of `LAYOUTS`; a module whose operations are not seen is run `alone`.
        is_like: whether its tensors are the named model's.

    Raises:
        HarnessError: ENGINE_FAILED; BAD_ROLLOUT_LOGPROB: it computes NaN.
    """
    from transformers import PreTrainedModel

    kept: dict[str, torch.Tensor] = {}
    unwrapped: Any = module
    if getattr(unwrapped, "peft_config", None):
        unwrapped = unwrapped.get_base_model()  # which has the adapters in it
    is_whole = hasattr(unwrapped, "reshard") or not is_sharded(unwrapped)  # FSDP puts weights together for the forward
    with evaluating(module), engine_errors(f"trainer {type(module).__name__}"):
        if isinstance(unwrapped, PreTrainedModel) and is_like and is_whole:
            _run_seen(unwrapped, hf, places, layout, kept)
        else:
            _run_any(module, hf, places, kept)
        if hasattr(unwrapped, "reshard"):  # or FSDP goes on with the root's weights of now, after they have changed
            unwrapped.reshard()
    _check_logits(kept[hf.graph[hf.graph.logits].source], places, type(module).__name__)
    return PutBack(kept)


def _run_seen(module: nn.Module, hf: HFModel, places: Places, layout: str, kept: dict[str, torch.Tensor]) -> None:
    seen_model = HFModel(model=module, checkpoint=hf.checkpoint, dtype=hf.dtype, device=hf.device)
    seen_model.graph = hf.graph
    with watching(seen_model) as watch:
        for group, positions in _groups(places, hf, layout):
            batch = LaneBatch.of(group, is_left=layout == "left")
            altered = _Wrapped(seen_model, Setting(), batch, places)
            altered.kept = kept
            inputs = {"input_ids": batch.ids, **_inputs(batch, positions, layout)}
            with watch.showing(altered):
                placed = {name: value.to(hf.device) for name, value in inputs.items()}
                logits = module(**placed, use_cache=False).logits
            with torch._C.DisableTorchFunction():
                altered.see("logits", logits)


class _Wrapped(Altered):
    """Is shown a trainer's forward under names that have what wrappers add, and keeps values under the model's."""

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.see`."""
        return super().see(plain_name(source), value)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.choose`."""
        return super().choose(plain_name(source), scores, chosen)


def _check_logits(logits: torch.Tensor, places: Places, name: str) -> None:
    """Refuse logits that are not finite: what is put back into the truth would leave them out."""
    before = places.compared - 1
    odd = (~logits[before].isfinite().all(dim=-1)).nonzero()
    if len(odd):
        row, position = places.place(int(places.compared[int(odd[0])]))
        raise HarnessError(
            Code.BAD_ROLLOUT_LOGPROB,
            "the trainer computes logits that are not finite",
            where=f"trainer {name}: row {row.row}, token {position}",
            expected="finite logits",
            hint="look for NaN in the trainer's weights, or for an overflow of its dtype",
        )


def _inputs(batch: LaneBatch, positions: torch.Tensor | None, layout: str) -> dict[str, torch.Tensor]:
    if positions is not None:
        return {"position_ids": positions}
    return {} if layout == "alone" else {"attention_mask": batch.is_there.long(), "position_ids": batch.position_ids}


def _groups(places: Places, hf: HFModel, layout: str) -> list[tuple[list[Lane], torch.Tensor | None]]:
    """Return the lanes of each forward, and of packed rows the positions, which restart at each of them."""
    lanes = make_lanes(places, Setting(is_packed=layout == "packed"), hf.max_positions)
    if layout == "alone":
        return [([lane], None) for lane in lanes]
    if layout != "packed":
        return [(group, None) for group in grouped(lanes, batch_tokens(hf))]
    members = packs(places.rows, hf.max_positions)
    restarting = [torch.cat([torch.arange(len(places.rows[at].tokens)) for at in pack])[None] for pack in members]
    return [([lane], positions) for lane, positions in zip(lanes, restarting, strict=True)]


def _run_any(module: nn.Module, hf: HFModel, places: Places, kept: dict[str, torch.Tensor]) -> None:
    source = hf.graph[hf.graph.logits].source
    for lane in make_lanes(places, Setting(), hf.max_positions):
        output = module(torch.tensor([lane.token_ids], device=hf.device))
        logits: torch.Tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        logits = logits[0]
        if logits.shape != (len(lane.token_ids), hf.vocab_size):
            expected = f"[1, {len(lane.token_ids)}, {hf.vocab_size}]"
            raise ValueError(f"its logits have the shape [1, {', '.join(map(str, logits.shape))}], not {expected}")
        places.put(kept, source, torch.tensor(lane.numbers), logits)


def engine_values(plan: Plan, hf: HFModel, places: Places) -> PutBack:
    """Run the plan's engine over the rows, prompts prefilled and responses decoded, and return what it computes.

    Raises:
        HarnessError: as `open_planned` and `record_run`.
    """
    requests = [
        RequestInfo(id=at, token_ids=list(row.tokens[:-1]), prompt_length=min(row.num_prompt, len(row.tokens) - 1))
        for at, row in enumerate(places.rows)
    ]
    (schedule,) = parse_schedules(["plain"])
    with open_planned(plan) as engine, scratch_folder("harness-") as folder:
        match_taps(plan, engine, hf.graph)
        record_run(plan, engine, schedule, requests, folder / "recording")
        return _read(folder / "recording", hf, places)


def _read(folder: Path, hf: HFModel, places: Places) -> PutBack:
    """Return the taps of a recording, [tokens, ...] by source."""
    kept: dict[str, torch.Tensor] = {}
    begins = torch.tensor(places.begins)
    with Recording.open(folder) as recording:
        recording.with_names(hf.graph.aliases)
        for step in recording.steps:
            if step.phase == "readback":
                continue
            numbers = begins[step.request.long()] + step.position.long()
            for name in step.tap_names:
                operation = hf.graph.by_tap.get(name)
                if operation is None or not operation.source:
                    continue
                covered = step.rows_of(name)
                covered_numbers = numbers if covered is None else numbers[covered.long()]
                places.put(kept, operation.source, covered_numbers, step.tap(name))
    return PutBack(kept)
