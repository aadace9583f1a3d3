"""HF itself as an engine under test: prefill and decode through its own KV cache, eager or sdpa.

HF as an engine shows what a sound engine scores, and checks HF's own decode against HF's own forward.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from harness.engines.adapter import Capabilities, Engine, Workload, refuse_unknown_options
from harness.engines.hf_batch import HFBatch
from harness.engines.hf_forward import ShownTap
from harness.engines.hf_session import HFSession
from harness.engines.module_settings import settings_of_modules
from harness.engines.quantised_form import served_model
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.converted import read_quantised_source
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph
from harness.oracle.decode import HFDecoder, Snapshot
from harness.oracle.images import decoder_inputs
from harness.oracle.lora import add_adapter
from harness.oracle.model import HFModel, load_model
from harness.oracle.mtp import add_mtp_layers
from harness.results.settings import ModelSettings

_ATTENTIONS = ("sdpa", "eager")
_WEIGHTS = ("checkpoint", "dequantised")
_SCHEDULES = ("plain", "chunked", "batched", "prefix-hit", "forked", "preempted", "rewound", "speculative")
_WITH_MTP = ("plain", "chunked", "prefix-hit", "forked")
"""With layers that predict further tokens: HF masks no padding there, and a draft would be taken for the next token."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open HF on a checkpoint.

    The option `attention` is `sdpa` or `eager`, by default `sdpa` where a family has it. Of a quantised checkpoint
    `weights` is `checkpoint`, as transformers loads it, or `dequantised`, by the harness's own reader.
    """
    refuse_unknown_options("hf", options, ("attention", "lora", "weights"))
    for name, values in (("attention", _ATTENTIONS), ("weights", _WEIGHTS)):
        if options.get(name) not in (None, *values):
            raise HarnessError(
                Code.BAD_OPTION,
                f"unknown {name} {options[name]!r}",
                where=f"--engine-option {name}",
                expected=" or ".join(values),
                actual=options[name],
            )
    if read_quantised_source(folder) is None or options.get("weights") == "dequantised":
        hf = load_model(folder, dtype=getattr(torch, dtype), device=device, stays=True)
    else:
        hf = served_model(folder, getattr(torch, dtype), device)
    if "lora" in options:
        add_adapter(hf, Path(options["lora"]))
    return HFEngine(hf, options.get("attention"))


class HFEngine:
    """Adapter of a transformers model."""

    name = "hf"

    def __init__(self, hf: HFModel, attention: str | None) -> None:
        self._hf, self._attention = hf, attention
        self.capabilities = Capabilities(schedules=_SCHEDULES, keeps_states=True, takes_images=True)

    @cached_property
    def sources(self) -> Mapping[str, ShownTap]:
        """The taps that the model shows, by HF's name of the value; the logits are what the model returns."""
        graph = self._hf.graph
        return {
            "logits" if op.tap == graph.logits else source: ShownTap(op, op.token_dim)
            for source, op in graph.by_source.items()
        }

    def match_taps(self, graph: Graph) -> None:
        """Take the graph that the oracle traced of the same checkpoint; see `TapMatcher.match_taps`.

        That of an old golden does not say where HF shows its taps: then the engine traces its own.
        """
        if graph.has_mtp and self._hf.mtp is None:
            add_mtp_layers(self._hf)
            self.capabilities = replace(self.capabilities, schedules=_WITH_MTP)
        if graph.by_source:
            self._hf.graph = graph

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: of the modules as they are, some of which may not be HF's."""
        return settings_of_modules(dict(self._hf.model.named_modules()))

    @torch.no_grad()
    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload through HF's own cache; see `Engine.run`."""
        is_padded = len({request.prompt_length for request in workload.requests}) > 1
        together = workload.schedule.is_batched and (not is_padded or self._masks_padding)
        schedule, forks = workload.schedule, dict[int, RequestInfo]()
        alone = workload.requests if schedule.is_batched else [one for (one,) in workload.batches]
        if schedule.trigger == "forked":
            forks = {one.id: copy for one, copy in zip(workload.requests, workload.copies, strict=True)}
        groups = [list(workload.requests)] if together else [[request] for request in alone]
        known: dict[tuple[object, ...], Snapshot] = {}
        images = {item.id: decoder_inputs(self._hf, item) for item in workload.all_requests if item.inputs is not None}
        dtypes: dict[str, torch.dtype] = {}
        for group in groups:
            batch = HFBatch(self._hf, self._attention, self.sources, group, writer, workload.poison, dtypes, images)
            if workload.schedule.has_drafts:
                batch.run_with_drafts(workload)
            elif forks:
                batch.run_with_forks(forks)
            elif schedule.is_repeated:
                batch.run_on_prefix(known)
            elif schedule.trigger == "preempted":
                batch.run_preempted()
            else:
                batch.run(schedule.chunk_size)
            unread = {op.site for op in self._hf.graph if op.is_kept and op.tap not in batch.read_back}
            self.capabilities = replace(
                self.capabilities, unsupported_taps=tuple(sorted({*self.capabilities.unsupported_taps, *unread}))
            )

    @cached_property
    def _masks_padding(self) -> bool:
        """Whether HF leaves padding out: families such as RWKV take a mask and ignore it, and run one by one."""
        if self._hf.mtp is not None:
            return False
        logits = []
        for mask in ([0, 1], [1, 1]):
            with HFDecoder(self._hf) as decoder:
                logits.append(decoder.feed([[1, 2]], attention_mask=torch.tensor([mask], device=self._hf.device)))
        return not torch.equal(*logits)

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> HFSession:
        """See `Steppable.open_session`; HF takes steps of any size."""
        return HFSession(self._hf, self._attention)
