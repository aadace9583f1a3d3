"""A folder of dumped tensors in the place of an engine: it has computed one prefill, and computes nothing more."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from harness.base.metrics import rounding_unit
from harness.engines.adapter import Capabilities, Workload
from harness.engines.by_content.finder import TapFinder
from harness.engines.by_content.names import TapNames
from harness.engines.by_content.tables import Table, tables_of
from harness.engines.by_content.tap_map import TapEvidence
from harness.engines.tensor_folder.prompt import embedded_tokens
from harness.engines.tensor_folder.ranks import together
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.recording import RecordingWriter
from harness.formats.taps import Graph, Kind
from harness.formats.tensors import NamedTensor, TensorFiles, read_tensors
from harness.oracle.model import HFModel, load_model
from harness.results.check import TapSource

_LEAST_TOKENS = 4
_MOST_SHOWN = 3


class FolderEngine:
    """Records what tensors of a folder hold of one prefill."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, dtype: str, token_ids: Sequence[int]) -> None:
        """Take the folder.

        Raises:
            HarnessError: BAD_OPTION: too few tokens.
        """
        if len(token_ids) < _LEAST_TOKENS:
            what, expected = "so few tokens do not tell tensors apart", f"at least {_LEAST_TOKENS}"
            raise HarnessError(Code.BAD_OPTION, what, where="--tensors", expected=expected, actual=len(token_ids))
        self.name, self._folder, self._checkpoint = "tensors", folder, checkpoint
        self._dtype, self._ids = getattr(torch, dtype), list(token_ids)
        self._finder: TapFinder | None = None
        self._graph: Graph | None = None
        self.capabilities = Capabilities(schedules=("plain",), keeps_cache=False, has_decode=False)

    def match_taps(self, graph: Graph) -> None:
        """Find the taps; see `TapMatcher.match_taps`.

        Raises:
            HarnessError: as `read_tensors`; TENSORS_OF_OTHER_TOKENS: no tensor has a row for each token, or none holds
                a value of theirs, or they are of several prefills; DIFFERENT_DTYPES.
        """
        files = read_tensors(self._folder)
        hf, rounding = load_model(self._checkpoint, dtype=torch.float32, stays=True), rounding_unit(self._dtype)
        finder = self._finder = finder_of(files.tensors, hf, self._ids, rounding)
        if not finder.tables:
            self._refuse_no_rows(files)
        self._refuse_other_dtype([table.rows.dtype for table in finder.tables])
        finder.find()
        self._refuse_other_tokens(hf, files, rounding)
        self._refuse_several_prefills(hf)
        self._graph = graph
        own_rows = tuple(tap for tap, found in finder.found.items() if found.is_last_row and tap not in graph.head)
        lacking = graph.not_shown(finder.found)
        self.capabilities = Capabilities(
            schedules=("plain",),
            keeps_cache=False,
            has_decode=False,
            unsupported_taps=lacking if graph.logits in finder.found else (*lacking, "tokens"),
            sampled_only=own_rows,
            sources={tap: self._source(tap) for tap in finder.found},
            notes=tuple(self._notes(files)),
        )

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Record the prefill; see `Engine.run`."""
        assert self._finder is not None, "match_taps comes first"
        assert self._graph is not None
        (request,) = workload.requests
        found, graph = self._finder.found, self._graph
        last = [len(self._ids) - 1]
        sampled = last if graph.logits in found else []
        of_last = {tap for tap in found if found[tap].is_last_row or tap in graph.head}
        writer.begin_step(
            phase="prefill",
            request=[request.id] * len(self._ids),
            position=range(len(self._ids)),
            sampled_rows=sampled,
            partial_rows=dict.fromkeys(of_last, last),
        )
        for tap in found:
            rows = self._finder.rows(tap).reshape(-1, *graph[tap].shape)
            writer.tap(tap, self._in_dtype(rows[-1:] if tap in of_last else rows))
        choices = self._finder.rows(graph.logits)[-1:].float().argmax(dim=-1).tolist() if sampled else []
        writer.end_step(choices)

    def _in_dtype(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the engine's dtype if a file of another dtype holds them: numpy has no bfloat16."""
        own = rows.to(self._dtype)
        return own if torch.equal(own.to(rows.dtype).nan_to_num(), rows.nan_to_num()) else rows

    def _source(self, tap: str) -> TapSource:
        assert self._finder is not None
        found = self._finder.found[tap]
        tables = self._finder.last_rows if found.is_last_row else self._finder.tables
        is_whole = found.columns.order is None and tables[found.table].rows.shape[1] == found.columns.stop
        columns = "" if is_whole and not found.columns.start else f", {found.columns}"
        return TapSource(tensor=self._finder.name(tap) + columns, evidence=found.evidence.help)

    def _told(self, tap: str) -> str:
        return f"{tap} from {self._source(tap).tensor}"

    def _notes(self, files: TensorFiles) -> Iterator[str]:
        """Yield what a reader of the verdict should know of the tensors."""
        assert self._finder is not None
        assert self._graph is not None
        found, names = self._finder.found, {table.name for table in self._finder.tables}
        yield (
            f"{len(found)} of {sum(bool(op.source) for op in self._graph)} taps were found in {self._folder}: "
            f"{len(files.tensors)} tensors, {len(names)} of them with a row for each token"
        )
        yield "only the prefill of the tokens was judged: neither decode steps nor the KV cache"
        shown = [tap for tap in found if self._graph[tap].layer in (None, self._graph.layers[0])]
        yield "taken: " + "; ".join(self._told(tap) for tap in shown) + "; other layers: --format json"
        guessed = [tap for tap in found if found[tap].evidence is not TapEvidence.CONTENT]
        for tap in guessed[:_MOST_SHOWN]:
            why = found[tap].evidence.help
            yield f"{self._told(tap)}: it holds another value than HF computes, and was taken because {why}"
        finer = [tap for tap in found if self._is_finer(self._finder.rows(tap))]
        if finer:
            name = str(self._dtype).removeprefix("torch.")
            yield f"{len(finer)} of the tensors have more digits than {name}: --dtype float32 judges them as such"
        if files.left_out:
            more = f"; and {len(files.left_out) - _MOST_SHOWN} more" if len(files.left_out) > _MOST_SHOWN else ""
            yield f"left out: {'; '.join(files.left_out[:_MOST_SHOWN])}{more}"

    def _is_finer(self, rows: torch.Tensor) -> bool:
        return self._in_dtype(rows).dtype is not self._dtype and rows.dtype.itemsize > self._dtype.itemsize

    def _refuse_no_rows(self, files: TensorFiles) -> None:
        shapes = Counter(str(list(tensor.tensor.shape)) for tensor in files.tensors)
        raise HarnessError(
            Code.TENSORS_OF_OTHER_TOKENS,
            "no tensor has a token dimension: none has a row for each of the tokens",
            where=self._folder,
            expected=f"a dimension of {len(self._ids)}, or a few more with padding",
            actual=", ".join(shape for shape, _ in shapes.most_common(_MOST_SHOWN)),
            hint="give --token-ids all tokens of the prefill that was dumped, and dump it without other requests",
        )

    def _refuse_other_tokens(self, hf: HFModel, files: TensorFiles, rounding: float) -> None:
        """Refuse tensors whose embedding is that of other tokens, or that hold nothing of these."""
        assert self._finder is not None
        found = self._finder.found
        embedding = next((op.tap for op in hf.graph if op.kind is Kind.EMBEDDING and op.tap in found), None)
        is_empty = all(item.evidence is not TapEvidence.CONTENT or item.is_last_row for item in found.values())
        if not is_empty and (embedding is None or found[embedding].evidence is TapEvidence.CONTENT):
            return
        hint = (
            "give the tokens that the engine computed, one request alone and not in chunks, and the model that it ran"
        )
        told = embedded_tokens(hf, files.tensors, max(1e-5, 4 * rounding))
        if told is not None and told[1][: len(self._ids)] != self._ids:
            name, tokens = told
            expected, actual = _difference(self._ids, tokens)
            raise HarnessError(
                Code.TENSORS_OF_OTHER_TOKENS,
                "the tensors are of other tokens, or of several requests",
                where=f"{self._folder}, {name}",
                expected=expected,
                actual=actual,
                hint=hint,
            )
        if is_empty:
            raise HarnessError(
                Code.TENSORS_OF_OTHER_TOKENS,
                "none of the tensors holds a value that HF computes of these tokens",
                where=self._folder,
                expected=f"tensors of {self._checkpoint.folder}",
                hint=hint,
            )

    def _refuse_several_prefills(self, hf: HFModel) -> None:
        """Refuse a second prefill of the same tokens: the sound tensors of one run would hide another run's bug.

        Its embedding's name is the first one's but for numbers (of processes, steps, calls), and no other tap's is so.
        """
        assert self._finder is not None
        found, name = self._finder.found, self._finder.name
        embedding = next((op.tap for op in hf.graph if op.kind is Kind.EMBEDDING and op.tap in found), None)
        if embedding is None:
            return
        own, alike = name(embedding), _without_numbers(name(embedding))
        if any(_without_numbers(name(tap)) == alike for tap in found if tap != embedding):
            return  # the names are numbers
        rows, tables = self._finder.rows(embedding), self._finder.tables
        named = [table for table in tables if table.name != own and _without_numbers(table.name) == alike]
        others = [item.name for item in named if torch.equal(item.rows, rows)]
        if others:
            raise HarnessError(
                Code.TENSORS_OF_OTHER_TOKENS,
                "the tensors are of several prefills of these tokens",
                where=self._folder,
                expected="one prefill",
                actual=f"{len(others) + 1}: {own}; {'; '.join(others[:_MOST_SHOWN])}",
                hint="leave the files of one process and one step in the folder",
            )

    def _refuse_other_dtype(self, dtypes: Sequence[torch.dtype]) -> None:
        """Refuse tensors that cannot be those of an engine in the check's dtype."""
        if all(dtype is not self._dtype and dtype.itemsize <= 2 for dtype in dtypes):
            name = str(dtypes[0]).removeprefix("torch.")
            raise HarnessError(
                Code.DIFFERENT_DTYPES,
                "the tensors are of another dtype than the check",
                where=self._folder,
                expected=str(self._dtype).removeprefix("torch."),
                actual=name,
                hint=f"--dtype {name}",
            )


def finder_of(tensors: Sequence[NamedTensor], hf: HFModel, ids: Sequence[int], rounding: float) -> TapFinder:
    """Return what finds the taps of one request's prefill among tensors, in any order.

    Args:
        tensors: of any names.
        hf: the model that the engine should be, in float32.
        ids: the tokens.
        rounding: RMS relative error of one rounding in the engine.
    """
    # where names decide, what ranks hold together comes before the part of one of them
    given = {tensor.name: tensor.tensor for tensor in [*together(tensors), *tensors]}
    one_row = {name: item for name, item in given.items() if item.dim() >= 1 and item.numel() == item.shape[-1]}
    return TapFinder(
        hf,
        torch.tensor([list(ids)]),
        tables_of(given, len(ids)),
        TapNames(hf.graph, given),
        last_rows=[Table(name, item.reshape(1, -1)) for name, item in one_row.items()],
        rounding=rounding,
    )


def _without_numbers(name: str) -> str:
    """Return a name with # for its numbers; those of ranks stay, which may hold the same."""
    return re.sub(r"(?i)((?<![a-z])(?:tp|pp|ep|dp|rank)[_=]?)?\d+", lambda at: at[0] if at[1] else "#", name)


def _difference(expected: Sequence[int], actual: Sequence[int]) -> tuple[str, str]:
    """Return the first tokens that differ, with those around them."""
    pairs = enumerate(zip(expected, actual, strict=False))
    at = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(expected), len(actual)))
    first = max(0, at - 2)

    def shown(ids: Sequence[int]) -> str:
        return f"{', '.join(map(str, ids[first : at + 3])) or 'none'} from position {first} on"

    return shown(expected), shown(actual)
