"""Triggers: conditions that a workload must reach, so that a check of it covers them."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.errors import Code
from harness.formats.recording import Recording, Step
from harness.judge.compare.align import Prefixes, is_readback
from harness.oracle.model import HFModel
from harness.results.check import Extent, Finding

_LENGTH = re.compile(r"chunk_size|^block_size|(attention|local)_window|n_floor|floor_scale|index_topk$")
"""Names in config.json of numbers of tokens, up to which a layer does not do all that it can."""
_EXTENDED = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of a decoder that decide whether a workload reaches a condition."""

    num_groups: int
    """Query heads of one KV head."""
    window: int | None
    """Smallest sliding window of any layer; None if every layer sees all tokens."""
    original_positions: int | None
    """Positions that the model was trained on before its rotary embedding was extended; None if it was not extended."""
    num_positions: int | None = None
    """Positions that the model has at all; None where its configuration does not say."""
    vocab_size: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Other numbers of tokens from which on the model computes more or otherwise, by their names in config.json."""

    @classmethod
    def of(cls, hf: HFModel) -> "Traits":
        """Read the traits off HF's configuration."""
        config = hf.config
        num_heads = getattr(config, "num_attention_heads", None) or 1
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        pairs = list(_settings(vars(config)))
        settings, types = dict(pairs), {value for name, value in pairs if name == "rope_type"}
        original = getattr(config, "max_position_embeddings", None) if "dynamic" in types else None
        return cls(
            num_groups=num_heads // num_kv_heads,
            window=min((op.window for op in hf.graph if op.window is not None), default=None),
            original_positions=None if types == {"default"} else settings.get(_EXTENDED) or original,
            num_positions=getattr(config, "max_position_embeddings", None),
            vocab_size=getattr(config, "vocab_size", None),
            lengths={
                name: value
                for name, value in settings.items()
                if _LENGTH.search(name) and isinstance(value, int) and value > 1
            },
        )


def _settings(config: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration, those of rotary embeddings by type of layer among them."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value)
        else:
            yield str(name), value


@dataclass(slots=True)
class _Seen:
    """The requests' history so far."""

    prompt_lengths: dict[int, int]
    ends: Mapping[int, int]
    """The last position of each request that any step computes."""
    prefixes: Prefixes
    token_ids: Mapping[int, Sequence[int]]
    computed: dict[int, set[int]] = field(default_factory=dict)
    """Positions computed so far, by request."""
    drafts: dict[int, int] = field(default_factory=dict)
    """By the id of a draft, the id of its request."""
    num_blocks: dict[int, int] = field(default_factory=dict)
    """Blocks of each request in its latest step."""
    hits: set[int] = field(default_factory=set)
    """Prefixes that requests found in the cache."""
    given_up: dict[int, int] = field(default_factory=dict)
    """End of the latest draft of each request."""
    present: list[int] = field(default_factory=list)
    """Requests of the latest step."""
    goes_on: set[int] = field(default_factory=set)
    """Requests that continued from the cache of an earlier step: their engine has a cache."""


def reached_triggers(recording: Recording, traits: Traits | None = None) -> tuple[str, ...]:
    """Return the names of the conditions that the recorded workload reached.

    Args:
        recording: the engine's.
        traits: of the model; without them, what depends on the model counts as not reached.
    """
    requests, ends = recording.manifest.requests, _last_positions(recording)
    seen = _Seen(
        {request.id: request.prompt_length for request in requests},
        ends,
        Prefixes(requests),
        {request.id: request.token_ids for request in requests},
        drafts={request.id: request.draft_of for request in requests if request.draft_of is not None},
    )
    reached = {name for step in recording.steps for name in _of_step(step, seen)}
    reached |= set() if traits is None else _of_model(traits, max(ends.values(), default=-1))
    return tuple(name for name in _MESSAGES if name in reached)


def unreached_triggers(recording: Recording, reached: Collection[str], traits: Traits | None) -> tuple[str, ...]:
    """Return the names of conditions that this model and engine can meet and that the workload did not reach."""
    can_be_met = dict.fromkeys(_OF_ANY_ENGINE, True) | {
        "new_block": any(step.block_tables for step in recording.steps),
        "block_boundary": any(step.block_tables for step in recording.steps),
        "window_exceeded": traits is not None and traits.window is not None,
        "rope_extended": traits is not None and traits.original_positions is not None,
    }
    lengths = {} if traits is None else traits.lengths
    last = max(_last_positions(recording).values(), default=-1)
    return (
        *(name for name in _MESSAGES if can_be_met.get(name) and name not in reached),
        *(f"more than {value:,} positions ({name})" for name, value in lengths.items() if last < value),
    )


def _of_model(traits: Traits, last: int) -> set[str]:
    """Return the conditions on the model that hold where `last` is the last position that is computed."""
    conditions = {
        "gqa": traits.num_groups > 1,
        "window_exceeded": traits.window is not None and last >= traits.window,
        "rope_extended": traits.original_positions is not None and last >= traits.original_positions,
    }
    return {name for name, holds in conditions.items() if holds and last >= 0}


def _last_positions(recording: Recording) -> dict[int, int]:
    """Return the last position of each request that any step computes."""
    last = dict[int, int]()
    for step in recording.steps:
        for request in () if is_readback(step) else step.request.unique().tolist():
            last[request] = max(last.get(request, -1), int(step.position[step.request == request].max()))
    return last


def not_reached(name: str) -> Finding:
    """Return the finding that a required condition was not reached."""
    code = Code.NO_DECODE if name == "decode" else Code.TRIGGER_NOT_REACHED
    return Finding(code=code, message=_MESSAGES.get(name, f"the workload never reached {name!r}"))


def _of_step(step: Step, seen: _Seen) -> Iterator[str]:
    if any(len(blocks) > 1 for blocks in (step.block_tables or {}).values()):
        yield "block_boundary"
    if is_readback(step):
        return
    drafts = [item for item in step.request.unique().tolist() if item in seen.drafts]
    if len({seen.drafts[item] for item in drafts}) > 1:
        yield "drafts_together"
    present = [item for item in step.request.unique().tolist() if item not in seen.drafts]
    if len(present) > 1:
        yield "batch"
        if len({int(step.position[step.request == request].max()) for request in present}) > 1:
            yield "ragged_batch"
        yield from _of_batch(present, step, seen)
    yield from _of_steps(present, seen)
    for request in present:
        positions = step.position[step.request == request]
        there, ids = set(positions.tolist()), seen.token_ids[request]
        if any(at + 1 in there and ids[at] == ids[at + 1] for at in there):
            yield "repeated_token"
        yield from _of_request(request, positions, step, seen)
    for draft in drafts:
        seen.given_up[seen.drafts[draft]] = int(step.position[step.request == draft].max()) + 1


def _of_batch(present: Sequence[int], step: Step, seen: _Seen) -> Iterator[str]:
    """Yield what requests of one step are to each other."""
    positions = {request: step.position[step.request == request] for request in present}
    is_decode = {_is_decode(step, request, positions[request], seen.prompt_lengths[request]) for request in present}
    if len(is_decode) > 1:
        yield "mixed_batch"
    prefixes = {seen.prefixes.at(request, int(positions[request].max())) for request in present}
    if len(prefixes) < len(present):
        yield "equal_requests"
    decoded = [
        seen.token_ids[request][int(of_request.max())]
        for request, of_request in positions.items()
        if _is_decode(step, request, of_request, seen.prompt_lengths[request])
    ]
    if len(set(decoded)) < len(decoded):
        yield "same_token"
    lengths = [len(of_request) for of_request in positions.values() if len(of_request) > 1]
    if len(set(lengths)) < len(lengths):
        yield "equal_lengths"
    if len({seen.prefixes.at(request, min(1, int(positions[request].max()))) for request in present}) < len(prefixes):
        yield "shared_prefix"
    if [request for request in dict.fromkeys(step.request.tolist()) if request in positions] != sorted(positions):
        yield "reordered"


def _of_steps(present: Sequence[int], seen: _Seen) -> Iterator[str]:
    """Yield what became of the requests of earlier steps."""
    is_done = {request: seen.ends[request] in positions for request, positions in seen.computed.items()}
    if present and any(not is_done[request] for request in is_done.keys() - set(present)):
        yield "paused"
    if any(is_done.get(request) for request in set(seen.present) - set(present)) and set(seen.present) & set(present):
        yield "uneven_end"
    seen.present = list(present) or seen.present


def _of_request(request: int, positions: torch.Tensor, step: Step, seen: _Seen) -> Iterator[str]:
    prompt_length, first = seen.prompt_lengths[request], int(positions.min())
    num_blocks = len((step.block_tables or {}).get(request, ()))
    if _is_decode(step, request, positions, prompt_length):
        yield "decode"
        if step.sampled is not None and len(_sampled(step, request)) > 1:
            yield "drafts_accepted"
        if num_blocks > seen.num_blocks.get(request, num_blocks):
            yield "new_block"
    seen.num_blocks[request] = num_blocks
    if request not in seen.computed and first > 0:
        yield "prefix_hit"
        whole = seen.prefixes.at(request, prompt_length - 1)
        if not any(whole in seen.prefixes.up_to(earlier, prompt_length) for earlier in seen.computed):
            yield "partial_hit"
        if any(_has_computed(running, request, first, seen) for running in step.request.unique().tolist()):
            yield "forked"
        seen.hits.add(seen.prefixes.at(request, first - 1))
    elif request not in seen.computed and seen.hits.intersection(seen.prefixes.up_to(request, prompt_length).tolist()):
        yield "evicted"
    computed, new = seen.computed.setdefault(request, set()), set(positions.tolist())
    # An engine without a cache computes every position in every step: it has no cache to lose.
    has_lost = bool(step.block_tables) or (first == 0 and request in seen.goes_on)
    if first < seen.given_up.get(request, 0):
        yield "rewound"
    elif has_lost and not computed.isdisjoint(new):
        yield "preempted"
    if computed and first > max(computed):
        seen.goes_on.add(request)
    if new - computed and max(new) < prompt_length - 1 and (step.sampled is None or not len(_sampled(step, request))):
        yield "chunked_prefill"
    computed |= new


def _sampled(step: Step, request: int) -> torch.Tensor:
    """Positions of a request after which the step chose a token."""
    assert step.sampled is not None
    return step.position[(step.request == request) & (step.sampled >= 0)]


def _has_computed(source: int, request: int, first: int, seen: _Seen) -> bool:
    """Whether another request of the same step had computed all tokens before a request's first row."""
    past = seen.prefixes.up_to(request, first)
    return (
        set(range(first)) <= seen.computed.get(source, set())
        and len(theirs := seen.prefixes.up_to(source, first)) == first
        and bool((theirs == past).all())
    )


def _is_decode(step: Step, request: int, positions: torch.Tensor, prompt_length: int) -> bool:
    """Whether the step chose a token after the prompt, or several, all but the first of them drafted.

    An engine without a cache computes all earlier rows again.
    """
    made = positions if step.sampled is None else _sampled(step, request)
    is_one = len(made) == 1 or (step.sampled is not None and len(made) == len(positions))
    return is_one and int(made.min()) >= prompt_length


def mislabelled_steps(recording: Recording) -> int:
    """Return how many steps are labelled decode and compute several tokens of a prompt."""
    prompt_lengths = {request.id: request.prompt_length for request in recording.manifest.requests}
    num_mislabelled = 0
    for step in (step for step in recording.steps if step.phase == "decode"):
        of_prompts = Counter(
            request
            for request, position in zip(step.request.tolist(), step.position.tolist(), strict=True)
            if position < prompt_lengths[request]
        )
        num_mislabelled += max(of_prompts.values(), default=0) > 1
    return num_mislabelled


def extent(recording: Recording, traits: Traits | None) -> Extent:
    """Return how many requests, positions and token ids the workload had, and how many the model has."""
    steps = [step for step in recording.steps if not is_readback(step) and len(step.position)]
    prompt_lengths = {request.id: request.prompt_length for request in recording.manifest.requests}
    requests = {request.id: request.token_ids for request in recording.manifest.requests}
    last, chunks = _last_positions(recording), set[int]()
    num_chunks, latest, longest_pause = Counter[int](), dict[int, int](), 0
    drafts = [request for request in recording.manifest.requests if request.draft_of is not None]
    request_of = {
        request.id: request.id if request.draft_of is None else request.draft_of
        for request in recording.manifest.requests
    }
    prefixes, hits, hit_sizes = Prefixes(recording.manifest.requests), Counter[int](), set[int]()
    for at, step in enumerate(steps):
        for request in step.request.unique().tolist():
            positions = step.position[step.request == request]
            if request not in latest and int(positions.min()) and request == request_of[request]:
                hits[prefixes.at(request, int(positions.min()) - 1)] += 1
                hit_sizes.add(int(positions.min()))
            num_chunks[request] += int(positions.min()) < prompt_lengths[request]
            longest_pause = max(longest_pause, at - latest.get(request_of[request], at - 1) - 1)
            latest[request_of[request]] = at
            if int(positions.max()) < prompt_lengths[request] - 1:
                chunks.add(len(positions))
    ids = {token for request, position in last.items() for token in requests[request][: position + 1]}
    return Extent(
        steps=len(steps),
        step_sizes=tuple(sorted({len(step.position) for step in steps})),
        requests=len(latest),
        shortest_prompt=min((request.prompt_length for request in recording.manifest.requests), default=0),
        requests_at_once=max((len(step.request.unique()) for step in steps), default=0),
        positions=max(last.values(), default=-1) + 1,
        token_ids=len(ids),
        chunks=tuple(sorted(chunks)),
        most_chunks=max(num_chunks.values(), default=0),
        longest_pause=longest_pause,
        taken_back=max((last.get(draft.id, -1) + 1 - draft.prompt_length for draft in drafts), default=0),
        hit_sizes=tuple(sorted(hit_sizes)),
        most_hits=max(hits.values(), default=0),
        all_positions=None if traits is None else traits.num_positions,
        all_token_ids=None if traits is None else traits.vocab_size,
    )


_OF_ANY_ENGINE = (
    "decode", "chunked_prefill", "batch", "ragged_batch", "mixed_batch", "equal_requests", "equal_lengths",
    "same_token", "shared_prefix", "repeated_token", "reordered", "paused", "uneven_end", "prefix_hit", "partial_hit",
    "evicted", "forked", "preempted", "drafts_together",
)  # fmt: skip
_MESSAGES: Mapping[str, str] = {
    "decode": "no decode step ran: every row was a prompt's (raise --max-new-tokens to at least 2)",
    "chunked_prefill": "no prompt was split into chunks (lower the chunk size or lengthen the prompt)",
    "batch": "no step held rows of more than one request (give a second prompt)",
    "ragged_batch": "no step held requests of different lengths (give prompts of different lengths)",
    "mixed_batch": "no step held a prompt's rows beside a request in decode (use the schedule mixed)",
    "equal_requests": "no step held two requests of the same tokens (give a prompt twice, under the schedule batched)",
    "equal_lengths": "no step computed as many tokens of one prompt as of another (give prompts of equal lengths)",
    "same_token": "no decode step computed the same token for two requests (give a prompt twice)",
    "repeated_token": "no step computed a token that equals the one before it (repeat a token in a prompt)",
    "shared_prefix": "no step held two requests whose first two tokens alone are the same (give such prompts)",
    "reordered": "no step held its requests in another order than that in which they came",
    "paused": "no request sat out a step of others between two of its own (use the schedule preempted)",
    "uneven_end": "no request ended before another one of its step (give requests their own max_new_tokens)",
    "new_block": "no decode step opened a new KV block (raise --max-new-tokens or lower the block size)",
    "block_boundary": "no request filled more than one KV block (lengthen the prompt or lower the block size)",
    "prefix_hit": "no request found its beginning in the cache (lengthen the prompt beyond a block)",
    "partial_hit": "every request that found its beginning in the cache had an earlier one's whole prompt",
    "evicted": "no request computed again what an earlier one had found in the cache: the cache was never full",
    "forked": "no request went on from one that was still running (raise --max-new-tokens to at least 2)",
    "preempted": "no request lost its cache and was computed again (give a second prompt, or fewer blocks)",
    "rewound": "no request went back over tokens that it had given up (raise --max-new-tokens to at least 4)",
    "drafts_accepted": "no step computed an accepted draft (raise --max-new-tokens to at least 4)",
    "drafts_together": "no step verified drafts of two requests",
    "gqa": "the model has as many KV heads as query heads, or no model was given (name one with --model)",
    "window_exceeded": "no request was longer than the model's sliding window (lengthen the prompt)",
    "rope_extended": "no position lay beyond those the model was trained on before its rope scaling",
    "near_tie": "no row's two best logits were nearer than the noise (add requests, or take a coarser dtype)",
}
