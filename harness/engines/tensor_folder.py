"""A folder of dumped tensors in the place of an engine: it has computed one prefill, and computes nothing more.

The content of a tensor and its name say which tap it is. Parts that the ranks of a tensor-parallel engine hold are put
side by side, or added up. Where the tokens are not those that the user named, the rows of the embedding tell them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import torch

from harness.base.metrics import rounding_unit
from harness.engines.adapter import Capabilities, Workload
from harness.engines.by_content.columns import Table, relative_error, tables_of
from harness.engines.by_content.finder import TapFinder
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.named import named_columns
from harness.engines.by_content.tap_map import TapEvidence
from harness.engines.by_content.tensor_names import TapNames
from harness.errors import Code, HarnessError, some_of
from harness.formats.checkpoint import Checkpoint
from harness.formats.recording import RecordingWriter
from harness.formats.taps import Graph, Kind, Operation
from harness.formats.tensors import NamedTensor, TensorFiles, read_tensors
from harness.oracle.model import HFModel, load_model
from harness.results.check import TapSource

_RANK = re.compile(r"(?i)(?<![a-z])((?:tp|rank)[_=-]?)(\d+)")
_PROCESS = re.compile(r"(?i)(?<![a-z])(pid|proc)[_=-]?\d+")


def together(tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield what the tensors of ranks are together, where names differ in the numbers of ranks and processes alone.

    Columns of a product that is split by its outputs lie side by side, in the order of the ranks; products that are
    split by their inputs are added up, in float32. Tensors that are the same on all ranks are left as they are.
    """
    groups: dict[str, dict[tuple[int, ...], NamedTensor]] = defaultdict(dict)
    for tensor in tensors:
        ranks = tuple(int(number) for _word, number in _RANK.findall(tensor.name))
        if ranks:
            name = _PROCESS.sub(r"\1*", _RANK.sub(r"\1*", tensor.name))
            groups[name].setdefault(ranks, tensor)
    for name, group in groups.items():
        parts = [group[ranks].tensor for ranks in sorted(group)]
        first = parts[0]
        if len(parts) < 2 or not first.dim() or any(part.dtype != first.dtype for part in parts):
            continue
        if all(part.shape[:-1] == first.shape[:-1] for part in parts) and not _are_equal(parts):
            yield NamedTensor(f"{name}, {len(parts)} ranks side by side", torch.cat(parts, dim=-1))
            if all(part.shape == first.shape for part in parts):
                added = sum(part.float() for part in parts)
                assert isinstance(added, torch.Tensor)
                yield NamedTensor(f"{name}, {len(parts)} ranks added up", added.to(first.dtype))


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:])


_CHUNK = 16384
_NUM_PROJECTIONS = 3
_FIRST_ROWS = 4
"""Rows that are looked at first: a tensor with no token among them is no embedding."""
_SHARE = 0.9
"""Rows of a tensor that must be a token's for the tensor to be an embedding."""


def embedded_tokens(hf: HFModel, tensors: Sequence[NamedTensor], tolerance: float) -> tuple[str, list[int]] | None:
    """Return the name of a tensor whose rows are embeddings, and their tokens, -1 for a row that is none.

    Args:
        hf: the model.
        tensors: of the dump.
        tolerance: relative error of a row.
    """
    operation = next((op for op in hf.graph if op.kind is Kind.EMBEDDING), None)
    if operation is None:
        return None
    (width,) = operation.shape
    probes = torch.randn(width, _NUM_PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known, norms = _vocabulary(hf, operation, probes)
    for tensor in tensors:
        if tensor.tensor.dim() < 2 or tensor.tensor.shape[-1] != width:
            continue
        rows = tensor.tensor.reshape(-1, width).double() @ probes  # [rows, projections]
        told = [_token(row, known, norms, tolerance) for row in rows[:_FIRST_ROWS]]
        if any(token >= 0 for token in told):
            told += [_token(row, known, norms, tolerance) for row in rows[_FIRST_ROWS:]]
        if sum(token >= 0 for token in told) >= _SHARE * len(told):
            return tensor.name, told
    return None


def _token(row: torch.Tensor, known: torch.Tensor, norms: torch.Tensor, tolerance: float) -> int:
    gap, token = ((row - known).abs().amax(dim=1) / norms).min(dim=0)
    return int(token) if float(gap) <= 4 * tolerance else -1


def _vocabulary(hf: HFModel, operation: Operation, probes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return projections [tokens, projections] and norms [tokens] of the embedding of each token."""
    values: list[torch.Tensor] = []

    def look(op: Operation, value: torch.Tensor) -> None:
        if op.tap == operation.tap:
            values.append(torch.cat([value.double() @ probes, value.double().norm(dim=1, keepdim=True)], dim=1))
            raise EndOfRun

    for first in range(0, hf.vocab_size, _CHUNK):
        run_hf(hf, torch.arange(first, min(first + _CHUNK, hf.vocab_size))[None], look)
    whole = torch.cat(values)
    return whole[:, :-1], whole[:, -1].clamp_min(1e-30)


_LEAST_TOKENS = 4
_MOST_SHOWN = 3
_LEAST_TWINS, _RUNS_ALIKE = 4, 0.1
"""Tensors that are there under two names, and how near the first two are to one another, for them to be of two runs."""


class FolderEngine:
    """Records what tensors of a folder hold of one prefill."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        token_ids: Sequence[int],
        tap_names: Mapping[str, str] | None = None,
    ) -> None:
        """Take the folder, and names of tensors with the taps that they are for certain.

        Raises:
            HarnessError: BAD_OPTION: too few tokens.
        """
        if len(token_ids) < _LEAST_TOKENS:
            what, expected = "so few tokens do not tell tensors apart", f"at least {_LEAST_TOKENS}"
            raise HarnessError(Code.BAD_OPTION, what, where="--tensors", expected=expected, actual=len(token_ids))
        self.name, self._folder, self._checkpoint = "tensors", folder, checkpoint
        self._dtype, self._ids, self._tap_names = getattr(torch, dtype), list(token_ids), tap_names or {}
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
        labels = [table.name for table in finder.tables]
        finder.named = named_columns(self._tap_names, graph, finder.tables, labels)
        finder.find()
        self._refuse_other_tokens(hf, files, rounding)
        self._refuse_several_prefills(hf)
        self._refuse_two_runs(graph)
        finder.look_up_embedding(self._dtype)
        self._graph = graph
        own_rows = tuple(tap for tap, tensor in finder.chosen.items() if tensor.is_last_row and tap not in graph.head)
        lacking = graph.not_shown(finder.chosen)
        self.capabilities = Capabilities(
            schedules=("plain",),
            not_served="the tensors were dumped: no engine runs",
            keeps_cache=False,
            has_decode=False,
            unsupported_taps=lacking if graph.logits in finder.chosen else (*lacking, "tokens"),
            sampled_only=own_rows,
            sources={tap: self._source(tap) for tap in finder.chosen},
            notes=tuple(self._notes(files)),
        )

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Record the prefill; see `Engine.run`."""
        assert self._finder is not None, "match_taps comes first"
        assert self._graph is not None
        (request,) = workload.requests
        tensors, graph = self._finder.chosen, self._graph
        last = [len(self._ids) - 1]
        sampled = last if graph.logits in tensors else []
        of_last = {tap for tap in tensors if tensors[tap].is_last_row or tap in graph.head}
        writer.begin_step(
            phase="prefill",
            request=[request.id] * len(self._ids),
            position=range(len(self._ids)),
            sampled_rows=sampled,
            partial_rows=dict.fromkeys(of_last, last),
        )
        for tap in tensors:
            rows = self._finder.rows(tap).reshape(-1, *graph[tap].shape)
            writer.tap(tap, self._in_dtype(rows[-1:] if tap in of_last else rows))
        choices = self._finder.rows(graph.logits)[-1:].float().argmax(dim=-1).tolist() if sampled else []
        writer.end_step(choices)

    def _in_dtype(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the engine's dtype if a file of another dtype holds them: numpy has no bfloat16."""
        rounded = rows.to(self._dtype)
        return rounded if torch.equal(rounded.to(rows.dtype).nan_to_num(), rows.nan_to_num()) else rows

    def _source(self, tap: str) -> TapSource:
        assert self._finder is not None
        chosen = self._finder.chosen[tap]
        tables = self._finder.last_rows if chosen.is_last_row else self._finder.tables
        is_whole = chosen.columns.order is None and tables[chosen.table].rows.shape[1] == chosen.columns.stop
        columns = "" if is_whole and not chosen.columns.start else f", {chosen.columns}"
        return TapSource(tensor=self._finder.name(tap) + columns, evidence=chosen.evidence.help)

    def _told(self, tap: str) -> str:
        return f"{tap} from {self._source(tap).tensor}"

    def _notes(self, files: TensorFiles) -> Iterator[str]:
        """Yield what a reader of the verdict should know of the tensors."""
        assert self._finder is not None
        assert self._graph is not None
        chosen, names = self._finder.chosen, {table.name for table in self._finder.tables}
        num_found = sum(tensor.evidence is not TapEvidence.LOOKED_UP for tensor in chosen.values())
        yield (
            f"{num_found} of {sum(bool(op.source) for op in self._graph)} taps were found in {self._folder}: "
            f"{len(files.tensors)} tensors, {len(names)} of them with a row for each token"
        )
        yield "only the prefill of the tokens was judged: neither decode steps nor the KV cache nor rows of padding"
        yield from self._not_taken([tensor.name for tensor in files.tensors if tensor.name not in names])
        shown = [tap for tap in chosen if self._graph[tap].layer in (None, self._graph.layers[0])]
        yield "taken: " + "; ".join(self._told(tap) for tap in shown) + "; other layers: --format json"
        for tap in (tap for tap in chosen if chosen[tap].evidence is TapEvidence.LOOKED_UP):
            yield f"{tap} is not in the folder: what reads it was judged on HF's embedding of the tokens"
        layers = {self._graph[tap].layer for tap in chosen}
        empty = [str(layer) for layer in self._graph.layers if layer not in layers]
        left = self._finder.left() if empty else []
        if left:
            yield (
                f"not judged: {', '.join(left[:_MOST_SHOWN])}{' and more' if left[_MOST_SHOWN:] else ''}, as wide as "
                f"taps of layers {', '.join(empty)}, of which no tensor is taken: they hold other values, and nothing "
                "tells which taps they are; --names FILE does"
            )
        certain = (TapEvidence.CONTENT, TapEvidence.LOOKED_UP, TapEvidence.NAMED)
        guessed = [tap for tap in chosen if chosen[tap].evidence not in certain]
        for tap in guessed[:_MOST_SHOWN]:
            why = chosen[tap].evidence.help
            yield f"{self._told(tap)}: it holds another value than HF computes, and was taken because {why}"
        finer = [tap for tap in chosen if self._is_finer(self._finder.rows(tap))]
        if finer:
            name = str(self._dtype).removeprefix("torch.")
            is_coarser = self._dtype is not torch.float32
            advice = "--dtype float32 judges them as such" if is_coarser else "they are held to the bounds of float32"
            yield f"{len(finer)} of the tensors have more digits than {name}: {advice}"
        others = [*self._other_logits(), *self._others_of_the_name()]
        for told in others[:_MOST_SHOWN]:
            yield f"not judged: {told}, and holds other values"
        if others[_MOST_SHOWN:]:
            yield f"not judged: {len(others) - _MOST_SHOWN} more such tensors, which hold other values"
        if files.left_out:
            more = f"; and {len(files.left_out) - _MOST_SHOWN} more" if len(files.left_out) > _MOST_SHOWN else ""
            yield f"left out: {'; '.join(files.left_out[:_MOST_SHOWN])}{more}"

    def _other_logits(self) -> Iterator[str]:
        """Yield tensors that may be what is served, where the logits that were taken are others."""
        assert self._finder is not None
        assert self._graph is not None
        if self._graph.logits in self._finder.chosen:
            taken, name = self._finder.rows(self._graph.logits)[-1], self._finder.name(self._graph.logits)
            for table in (*self._finder.tables, *self._finder.last_rows):
                is_as_wide = table.name != name and table.rows.shape[1] == len(taken)
                if is_as_wide and not torch.equal(table.rows[-1].to(taken.dtype), taken):
                    yield f"{table.name} is as wide as the vocabulary, as the judged logits are"

    def _not_taken(self, without_rows: Sequence[str]) -> Iterator[str]:
        """Yield what no tap holds: tensors of other tokens, and further columns, as of a second sequence."""
        assert self._finder is not None
        taken = dict[str, set[int]]()
        for tap, chosen in self._finder.chosen.items():
            if chosen.evidence is not TapEvidence.LOOKED_UP:
                taken.setdefault(self._finder.name(tap), set()).update(chosen.columns.places)
        widths = {table.name: table.rows.shape[1] for table in self._finder.tables}
        further = [name for name, columns in taken.items() if len(columns) < widths.get(name, 0)]
        for names, what in (
            (without_rows, "tensors without a row for each token"),
            (further, "columns that no tap is taken from"),
        ):
            if names:
                yield f"not judged: {what}: {some_of(names, _MOST_SHOWN)}"

    def _others_of_the_name(self) -> Iterator[str]:
        """Yield, as text, tensors with the name of a tap that was taken from another tensor, which is not equal."""
        assert self._finder is not None
        taps = self._finder.chosen
        for table in self._finder.tables:
            tap = table.name.rpartition(": ")[2]
            if tap in taps and table.name != self._finder.name(tap):
                taken = self._finder.rows(tap)
                if table.rows.shape == taken.shape and not torch.equal(table.rows.to(taken.dtype), taken):
                    yield f"{table.name} has the name of a tap that was taken from {self._source(tap).tensor}"

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
        chosen = self._finder.chosen
        embedding = next((op.tap for op in hf.graph if op.kind is Kind.EMBEDDING and op.tap in chosen), None)
        is_empty = all(item.evidence is not TapEvidence.CONTENT or item.is_last_row for item in chosen.values())
        if not is_empty and (embedding is None or chosen[embedding].evidence is TapEvidence.CONTENT):
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
        chosen, name = self._finder.chosen, self._finder.name
        embedding = next((op.tap for op in hf.graph if op.kind is Kind.EMBEDDING and op.tap in chosen), None)
        if embedding is None:
            return
        embedding_name, alike = name(embedding), _without_numbers(name(embedding))
        if any(_without_numbers(name(tap)) == alike for tap in chosen if tap != embedding):
            return  # the names are numbers
        rows, tables = self._finder.rows(embedding), self._finder.tables
        named = [table for table in tables if table.name != embedding_name and _without_numbers(table.name) == alike]
        others = [item.name for item in named if torch.equal(item.rows, rows)]
        if others:
            raise HarnessError(
                Code.TENSORS_OF_OTHER_TOKENS,
                "the tensors are of several prefills of these tokens",
                where=self._folder,
                expected="one prefill",
                actual=f"{len(others) + 1}: {embedding_name}; {'; '.join(others[:_MOST_SHOWN])}",
                hint="leave the files of one process and one step in the folder",
            )

    def _refuse_two_runs(self, graph: Graph) -> None:
        """Refuse HF's tensors beside the engine's, or those of two engines: the sound ones would hide a bug.

        The copy of one tap's tensor has a name that differs in some words. If most taps have tensors of two names that
        differ in the same words, those of the first tap hold the same to rounding, and others do not, they are of two
        runs.
        """
        assert self._finder is not None
        finder = self._finder
        taps = [op.tap for op in graph if op.tap in finder.chosen and not finder.chosen[op.tap].is_last_row]
        tensors = {table.name: table.rows for table in finder.tables}
        copies = ((finder.name(tap), finder.tables[fit.index].name) for tap in taps for fit in finder.holding(tap))
        for words, other_words in dict.fromkeys(_difference_of_names(*pair) for pair in copies):
            twins = {name: words.sub(other_words, name, count=1) for name in map(finder.name, taps)}
            twins = {name: twin for name, twin in twins.items() if twin != name and twin in tensors}
            pairs = [(tensors[name], tensors[twin]) for name, twin in twins.items()]
            differing = [
                twin for (one, two), twin in zip(pairs, twins.values(), strict=True) if not torch.equal(one, two)
            ]
            if len(twins) < max(_LEAST_TWINS, len(taps) / 2) or pairs[0][0].shape != pairs[0][1].shape:
                continue
            if differing and relative_error(*pairs[0]) <= _RUNS_ALIKE:
                raise HarnessError(
                    Code.TENSORS_OF_OTHER_TOKENS,
                    "the tensors are of two runs of these tokens",
                    where=self._folder,
                    expected="one run",
                    actual=f"{len(twins)} tensors have two names, and {len(differing)} of them two values: "
                    + "; ".join(
                        f"{name} and {twin}" for name, twin in twins.items() if twin in differing[:_MOST_SHOWN]
                    ),
                    hint="leave those of the engine alone in the folder: the sound ones would hide its errors",
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
    by_name = {tensor.name: tensor.tensor for tensor in [*together(tensors), *tensors]}
    one_row = {name: item for name, item in by_name.items() if item.dim() >= 1 and item.numel() == item.shape[-1]}
    return TapFinder(
        hf,
        torch.tensor([list(ids)]),
        tables_of(by_name, len(ids)),
        TapNames(hf.graph, by_name),
        last_rows=[Table(name, item.reshape(1, -1)) for name, item in one_row.items()],
        rounding=rounding,
    )


def _without_numbers(name: str) -> str:
    """Return a name with # for its numbers; those of ranks stay, which may hold the same."""
    return re.sub(r"(?i)((?<![a-z])(?:tp|pp|ep|dp|rank)[_=]?)?\d+", lambda at: at[0] if at[1] else "#", name)


def _difference_of_names(name: str, other_name: str) -> tuple[re.Pattern[str], str]:
    """Return a pattern of the words in which a name differs from another one, and the template that replaces them."""
    words, other_words = (re.findall(r"[a-z]+|\d+|.", text, re.IGNORECASE) for text in (name, other_name))
    first = _num_alike(words, other_words)
    last = _num_alike(words[first:][::-1], other_words[first:][::-1])
    part, other_part = ("".join(item[first : len(item) - last]) for item in (words, other_words))
    other_part = other_part.replace("\\", r"\\")  # a template
    if not part:  # something is added: before all names, or after what differs from name to name
        end = "".join(words[len(words) - last :])
        return re.compile("^" if not first else re.escape(end) + "$"), other_part + ("" if not first else end)
    return re.compile(re.escape(part)), other_part


def _num_alike(words: Sequence[str], other_words: Sequence[str]) -> int:
    pairs = zip(words, other_words, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _difference(expected: Sequence[int], actual: Sequence[int]) -> tuple[str, str]:
    """Return the first tokens that differ, with those around them."""
    pairs = enumerate(zip(expected, actual, strict=False))
    at = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(expected), len(actual)))
    first = max(0, at - 2)

    def shown(ids: Sequence[int]) -> str:
        return f"{', '.join(map(str, ids[first : at + 3])) or 'none'} from position {first} on"

    return shown(expected), shown(actual)
