"""Somebody's `nn.Module` as an engine: one request at a time, its taps found by the paths of its modules."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harness.engines.adapter import Capabilities, Workload
from harness.engines.module.forward import Forward
from harness.engines.module.names import ModuleNames, operation_of
from harness.engines.module.taps import ModuleTaps, Place, unmatched_hint, unmistakable_length
from harness.engines.module.values import evaluating, showing_values
from harness.engines.module_settings import settings_of_modules
from harness.engines.read_back import write_states
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph
from harness.oracle.caches import held_states
from harness.results.settings import ModelSettings

_PADDED = "if it pads its input, cut the rows out with an adapter: StepRows(kept=...), docs/check-your-torch-engine.md"
_NOT_CALLED = "call the module itself, module(x): hooks see neither module.forward(x) nor a use of its weight"


class TorchEngine:
    """Runs a module whose forward takes token ids and returns logits.

    A module that takes a cache and returns it is fed each token once. One without is fed the whole sequence for every
    new token. Nothing of the module is changed: hooks are removed and its mode is put back.
    """

    def __init__(self, module: nn.Module, *, device: str, names: Mapping[str, str] | None = None) -> None:
        """Look at the module's forward.

        Args:
            module: with its weights, on one device.
            device: where it is.
            names: paths of its modules, and HF's paths of the same; None if they are called as in HF's model. With
                an empty mapping none of them needs to be: its logits alone are compared then.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward cannot be called; BAD_OPTION: the names are none.
        """
        self.name = type(module).__name__
        self._module, self._names = module, ModuleNames(names or {})
        self._wants_logits_alone = names is not None and not names
        self._device = torch.device(device)
        self._forward = Forward(module, self._device)
        self._places: dict[str, list[Place]] = {}
        self._graph, self._heads = Graph(()), frozenset[str]()
        self._logits = ""
        self._has_cache = self._forward.takes_cache
        self.capabilities = self._capabilities(())

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher.match_taps`.

        Raises:
            HarnessError: BAD_OPTION: the names lead nowhere, or no module is called as HF calls it.
        """
        paths = [path for path, _ in self._module.named_modules() if path]
        self._names.check(self.name, ["", *paths], graph)
        places = ModuleTaps(self._names, graph, unmistakable_length(self._module, graph))
        vocabulary = graph[graph.logits].shape[-1]
        ids = torch.randint(0, vocabulary, (places.num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        with evaluating(self._module):
            self._forward.leave_out_what_it_refuses(ids)
            with showing_values(self._module, paths, places.see):
                answer = self._forward(ids, 0)
        self._forward.check_vocabulary(answer, vocabulary)
        if not places.by_tap and not self._wants_logits_alone:
            self._refuse_strangers(paths, graph, places)
        self._places = {}
        for place in places.by_tap.values():
            self._places.setdefault(place.shown, []).append(place)
        self._graph, self._heads, self._logits = graph, graph.head, graph.logits
        self._has_cache = answer.cache is not None
        capabilities = self._capabilities(graph.not_shown({*places.by_tap, graph.logits}))
        self.capabilities = replace(capabilities, keeps_states=bool(held_states(answer.cache)))

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`."""
        return settings_of_modules(dict(self._module.named_modules()))

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Feed the requests one after the other; see `Engine.run`."""
        with evaluating(self._module):
            for request in workload.requests:
                cache = None
                for positions in workload.schedule.pieces(request.prompt_length, len(request.token_ids)):
                    cache = self._step(request, positions, cache, writer)

    def _capabilities(self, unsupported_taps: tuple[str, ...]) -> Capabilities:
        schedules = ("plain", "chunked") if self._has_cache else ("plain",)
        return Capabilities(schedules=schedules, keeps_cache=False, unsupported_taps=unsupported_taps)

    def _step(self, request: RequestInfo, positions: range, cache: Any, writer: RecordingWriter) -> Any:
        """Compute the rows at some positions, record them, and return the cache."""
        last = [len(positions) - 1] if positions.stop >= request.prompt_length else []
        writer.begin_step(
            phase="prefill" if positions.start < request.prompt_length else "decode",
            request=[request.id] * len(positions),
            position=positions,
            sampled_rows=last,
            partial_rows=dict.fromkeys(self._heads, last) if last else None,
        )
        start = positions.start if self._has_cache else 0

        def see(shown: str, tensors: tuple[torch.Tensor, ...]) -> None:
            """Write the new rows; of what has another shape than expected they are missing, and found so."""
            for place in self._places.get(shown, ()):
                rows, tap = place.rows(tensors, positions.stop - start), place.operation.tap
                if rows is not None and (last or tap not in self._heads):
                    writer.tap(tap, rows[-1:] if tap in self._heads else rows[-len(positions) :])

        paths = dict.fromkeys(shown.partition("@")[0].partition(":")[0] for shown in self._places)
        with showing_values(self._module, paths, see):
            answer = self._forward(request.token_ids[start : positions.stop], start, cache)
        if last:
            writer.tap(self._logits, answer.logits[-1:])
        writer.end_step(answer.logits[-1:].argmax(dim=-1).tolist() if last else ())
        write_states(writer, self._graph, held_states(answer.cache), [(0, request.id, positions.stop - 1)])
        return answer.cache if self._has_cache else None

    def _refuse_strangers(self, paths: list[str], graph: Graph, places: ModuleTaps) -> None:
        known = [path for path in paths if operation_of(graph, self._names.translate(path)) is not None]
        if known:
            self._refuse_unseen(known[0], graph, places)
        raise HarnessError(
            Code.BAD_OPTION,
            f"no module of {self.name} is called as HF calls it, so that no operation could be judged",
            where="names=",
            expected=", ".join(operation.source for operation in list(graph)[:4]),
            actual=", ".join(paths[:4]) or "no modules",
            hint=unmatched_hint(paths, graph),
        )

    def _refuse_unseen(self, path: str, graph: Graph, places: ModuleTaps) -> None:
        """Refuse a module that has HF's names and shows no rows of tokens under them."""
        shapes = places.misshapen.get(path)
        operation = operation_of(graph, self._names.translate(path))
        assert operation is not None
        rows = [1, places.num_tokens, *operation.shape]
        raise HarnessError(
            Code.BAD_OPTION,
            f"modules of {self.name} are called as HF calls them, but none of them shows one row for each token",
            where=f"{path}, which is {operation.tap}",
            expected=f"{rows}, or the same without the 1",
            actual="it was not called" if shapes is None else ", ".join(map(str, shapes)) or "no tensor of numbers",
            hint=_NOT_CALLED if shapes is None else _PADDED,
        )
