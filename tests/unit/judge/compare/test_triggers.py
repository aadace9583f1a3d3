"""Conditions of the model and of the workload that a case can require."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code
from harness.formats.recording.manifest import RequestInfo
from harness.judge.compare.triggers import Traits, extent, mislabelled_steps, reached_triggers, unreached_triggers
from harness.oracle.model import load_model

from ...tiny_models import WINDOW
from . import in_memory

PLAIN = Traits(num_groups=1, window=None, original_positions=None)


def step(index, request, position, *, sampled=None, tables=None, phase="mixed"):
    return SimpleNamespace(
        index=index,
        phase=phase,
        request=torch.tensor(request),
        position=torch.tensor(position),
        sampled=None if sampled is None else torch.tensor(sampled),
        block_tables=tables,
    )


def recording(*steps, prompt_lengths=(4, 4)):
    requests = [
        RequestInfo(id=index, prompt_length=length, token_ids=list(range(length + 8)))
        for index, length in enumerate(prompt_lengths)
    ]
    return SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests))


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (Traits(num_groups=2, window=None, original_positions=None), "gqa"),
        (Traits(num_groups=1, window=4, original_positions=None), "window_exceeded"),
        (Traits(num_groups=1, window=None, original_positions=4), "rope_extended"),
    ],
)
def test_what_the_model_decides(traits, name):
    long = recording(step(0, [0] * 5, range(5)))
    assert name in reached_triggers(long, traits)
    assert name not in reached_triggers(long, PLAIN)
    assert name not in reached_triggers(long)
    if name != "gqa":
        assert name not in reached_triggers(recording(step(0, [0] * 4, range(4))), traits)


def test_what_was_not_reached_is_what_this_model_and_engine_can_meet():
    short = recording(step(0, [0] * 4, range(4)))
    of_any_engine = {"decode", "chunked_prefill", "batch", "ragged_batch", "prefix_hit", "preempted"}
    of_any_engine |= {
        "mixed_batch",
        "equal_requests",
        "equal_lengths",
        "same_token",
        "shared_prefix",
        "repeated_token",
        "reordered",
        "paused",
        "uneven_end",
        "partial_hit",
        "evicted",
        "forked",
        "drafts_together",
    }
    assert set(unreached_triggers(short, (), PLAIN)) == of_any_engine
    assert set(unreached_triggers(short, ("decode", "batch"), None)) == of_any_engine - {"decode", "batch"}
    limited = Traits(num_groups=2, window=4, original_positions=8)
    assert set(unreached_triggers(short, (), limited)) == of_any_engine | {"window_exceeded", "rope_extended"}
    with_blocks = recording(step(0, [0] * 4, range(4), tables={0: [1]}))
    assert set(unreached_triggers(with_blocks, (), PLAIN)) == of_any_engine | {"new_block", "block_boundary"}


def test_lengths_of_the_configuration_that_no_request_exceeds():
    traits = replace(PLAIN, lengths={"chunk_size": 4, "index_topk": 2048})
    first, second = "more than 4 positions (chunk_size)", "more than 2,048 positions (index_topk)"
    assert {first, second} <= set(unreached_triggers(recording(step(0, [0] * 4, range(4))), (), traits))
    longer = set(unreached_triggers(recording(step(0, [0] * 5, range(5))), (), traits))
    assert second in longer
    assert first not in longer


@pytest.mark.parametrize(
    ("settings", "lengths", "original"),
    [
        (
            {"attention_chunk_size": 8192, "floor_scale": 16, "hidden_size": 64},
            {"attention_chunk_size", "floor_scale"},
            None,
        ),
        ({"mamba_chunk_size": 256, "chunk_size_feed_forward": 0}, {"mamba_chunk_size"}, None),
        ({"rope_parameters": {"full_attention": {"original_max_position_embeddings": 4096}}}, set(), 4096),
        ({"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 64}, set(), 64),
        ({"rope_parameters": {"rope_type": "default"}, "original_max_position_embeddings": 4096}, set(), None),
        (
            {
                "rope_parameters": {"long": {"rope_type": "dynamic"}, "near": {"rope_type": "default"}},
                "max_position_embeddings": 64,
            },
            set(),
            64,
        ),
        ({"vision_config": SimpleNamespace(chunk_size=8)}, set(), None),
    ],
)
def test_lengths_are_read_from_the_configuration(settings, lengths, original):
    config = SimpleNamespace(**settings)
    traits = Traits.of(SimpleNamespace(config=config, graph=()))
    assert traits.lengths.keys() == lengths
    assert traits.original_positions == original


def test_sizes_of_chunks_are_kept():
    chunked = [step(0, [0] * 3, range(3)), step(1, [0], [3]), step(2, [1] * 2, range(2)), step(3, [1] * 2, [2, 3])]
    assert extent(recording(*chunked), PLAIN).chunks == (2, 3)
    assert extent(recording(*chunked), PLAIN).most_chunks == 2
    assert extent(recording(*chunked, step(4, [0], [4])), PLAIN).longest_pause == 2
    assert extent(recording(step(0, [0] * 4, range(4))), PLAIN).chunks == ()


def test_steps_that_are_labelled_decode_and_compute_a_prompt_are_counted():
    steps = [
        step(at, *rows, phase="decode") for at, rows in enumerate((([0] * 4, range(4)), ([1], [3]), ([0, 0], [4, 5])))
    ]
    assert mislabelled_steps(recording(*steps)) == 1
    assert mislabelled_steps(recording(step(0, [0] * 4, range(4), phase="prefill"))) == 0


def test_a_ragged_batch_holds_requests_of_different_lengths():
    assert "ragged_batch" in reached_triggers(recording(step(0, [0, 1], [3, 2])))
    even = reached_triggers(recording(step(0, [0, 1], [3, 3])))
    assert "batch" in even
    assert "ragged_batch" not in even


def test_a_prompt_beside_a_request_in_decode():
    first = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9])
    beside = step(1, [0, 1, 1, 1, 1], [4, 0, 1, 2, 3], sampled=[9, -1, -1, -1, 9])
    assert "mixed_batch" in reached_triggers(recording(first, beside))
    after = step(1, [1] * 4, range(4), sampled=[-1, -1, -1, 9])
    both = step(2, [0, 1], [4, 4], sampled=[9, 9])
    assert "mixed_batch" not in reached_triggers(recording(first, after, both))


def test_equal_requests_of_one_step():
    assert "equal_requests" in reached_triggers(recording(step(0, [0, 1], [3, 3])))
    assert "equal_requests" not in reached_triggers(recording(step(0, [0, 1], [3, 2])))


def test_what_a_step_has_of_the_requests_of_earlier_ones():
    both, alone, again = step(0, [0, 1], [0, 0]), step(1, [0], [1]), step(2, [0, 1], [2, 1])
    paused, ended = reached_triggers(recording(both, alone, again)), reached_triggers(recording(both, alone))
    assert "paused" in paused
    assert "uneven_end" not in paused
    assert "uneven_end" in ended
    assert "paused" not in ended, "its last token was sampled, and no step computes it"
    assert "uneven_end" not in reached_triggers(recording(both))


def test_what_an_earlier_request_found_in_the_cache_is_computed_again():
    requests = [RequestInfo(id=index, prompt_length=4, token_ids=list(range(8))) for index in range(3)]
    first, hit, again = step(0, [0] * 4, range(4)), step(1, [1] * 2, [2, 3]), step(2, [2] * 4, range(4))

    def recorded(*steps):
        return SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests))

    assert "evicted" in reached_triggers(recorded(first, hit, again))
    assert "evicted" not in reached_triggers(recorded(first, again, hit))
    assert "evicted" in unreached_triggers(recorded(first), ("prefix_hit",), PLAIN)
    assert extent(recorded(first, hit, step(2, [2] * 2, [2, 3])), PLAIN).most_hits == 2
    assert extent(recorded(first, hit, step(2, [2] * 2, [2, 3])), PLAIN).hit_sizes == (2,)
    assert extent(recorded(first, hit, step(2, [2], [3])), PLAIN).most_hits == 1
    assert extent(recorded(first), PLAIN).most_hits == 0


def test_what_requests_of_a_step_are_to_each_other():
    assert "shared_prefix" in reached_triggers(recording(step(0, [0, 1], [3, 2])))
    assert "shared_prefix" not in reached_triggers(recording(step(0, [0, 1], [3, 3])))
    assert "equal_lengths" in reached_triggers(recording(step(0, [0, 0, 1, 1], [0, 1, 0, 1])))
    assert "equal_lengths" not in reached_triggers(recording(step(0, [0, 1], [3, 3])))
    assert "same_token" in reached_triggers(recording(step(0, [0, 1], [4, 4])))
    assert "same_token" not in reached_triggers(recording(step(0, [0, 1], [4, 5]))), "other tokens"
    assert "same_token" not in reached_triggers(recording(step(0, [0, 1], [3, 3]))), "of prompts"
    assert "reordered" in reached_triggers(recording(step(0, [1, 0], [3, 2])))
    assert "reordered" not in reached_triggers(recording(step(0, [0, 0, 1], [3, 4, 2])))


def test_how_much_a_workload_had():
    steps = step(0, [0] * 4, range(4)), step(1, [0, 1], [4, 0])
    traits = replace(PLAIN, num_positions=64, vocab_size=256)
    reached = extent(recording(*steps), traits)
    assert (reached.requests_at_once, reached.positions, reached.token_ids) == (2, 5, 5)
    assert (reached.all_positions, reached.all_token_ids) == (64, 256)
    assert (reached.steps, reached.step_sizes, reached.shortest_prompt) == (2, (2, 4), 4)
    assert (reached.requests, reached.most_chunks, reached.longest_pause) == (2, 1, 0)
    assert extent(recording(), None).positions == 0


def test_a_decode_step_that_opens_a_block():
    prefill = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9], tables={0: [1]})
    assert "new_block" in reached_triggers(recording(prefill, step(1, [0], [4], sampled=[9], tables={0: [1, 2]})))
    assert "new_block" not in reached_triggers(recording(prefill, step(1, [0], [4], sampled=[9], tables={0: [1]})))


@pytest.mark.parametrize(("tables", "is_preempted"), [({0: [1]}, True), (None, False)])
def test_only_an_engine_with_blocks_can_lose_them(tables, is_preempted):
    """One without a cache computes every position in every step."""
    steps = [step(0, [0] * 4, range(4), tables=tables), step(1, [0] * 5, range(5), tables=tables)]
    assert ("preempted" in reached_triggers(recording(*steps))) == is_preempted
    once = [step(0, [0] * 4, range(4), tables=tables), step(1, [0], [4], tables=tables)]
    assert "preempted" not in reached_triggers(recording(*once))


def test_an_engine_that_goes_on_from_its_cache_and_then_begins_anew_has_lost_it():
    """It shows no blocks; that it has a cache shows in a step that computes none of what was there."""
    decoded = [step(0, [0] * 4, range(4)), step(1, [0], [4])]
    assert "preempted" in reached_triggers(recording(*decoded, step(2, [0] * 6, range(6))))
    assert "preempted" not in reached_triggers(recording(*decoded, step(2, [0] * 2, [4, 5]))), "it went back one row"
    assert "preempted" not in reached_triggers(recording(*decoded, step(2, [1] * 6, range(6)))), "another request"


def test_a_prompt_in_chunks():
    whole = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9])
    assert "chunked_prefill" not in reached_triggers(recording(whole))
    first, last = step(0, [0] * 3, range(3), sampled=[-1] * 3), step(1, [0], [3], sampled=[9])
    assert "chunked_prefill" in reached_triggers(recording(first, last))
    assert "chunked_prefill" in reached_triggers(recording(step(0, [0] * 3, range(3)), step(1, [0], [3])))
    early = step(0, [0] * 3, range(3), sampled=[-1, -1, 9])  # it chose a token: that was its prompt
    assert "chunked_prefill" not in reached_triggers(recording(early))


def test_a_request_that_begins_behind_its_beginning():
    first = step(0, [0] * 4, range(4))
    hit = reached_triggers(recording(first, step(1, [1] * 2, [2, 3])))
    assert "prefix_hit" in hit
    assert "forked" not in hit
    together = reached_triggers(recording(first, step(1, [0, 1], [4, 4])))
    assert "forked" in together
    assert "forked" not in reached_triggers(recording(step(0, [0] * 3, range(3)), step(1, [0, 1], [3, 5])))


def test_traits_of_a_model(checkpoints, tiny):
    llama = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    original = llama.config.rope_parameters["original_max_position_embeddings"]
    of_llama = Traits.of(llama)
    assert (of_llama.num_groups, of_llama.window, of_llama.original_positions) == (3, None, original)
    assert (of_llama.num_positions, of_llama.vocab_size) == (llama.config.max_position_embeddings, 256)
    of_gemma, of_mamba = Traits.of(tiny("gemma3_text")), Traits.of(tiny("mamba"))
    assert (of_gemma.num_groups, of_gemma.window, of_gemma.original_positions) == (2, WINDOW, None)
    assert (of_mamba.num_groups, of_mamba.window, of_mamba.num_positions) == (1, None, None)


def test_a_requirement_that_is_not_reached_fails(bench, tmp_path):
    bench = bench("llama-tiny")
    sound = bench.recorded().write(tmp_path / "r")
    assert "gqa" in bench.compare(sound).coverage.triggers
    assert bench.compare(sound, require=("gqa", "ragged_batch")).findings == ()
    (finding,) = bench.compare(sound, require=("window_exceeded",)).findings
    assert finding.code is Code.TRIGGER_NOT_REACHED
    assert "sliding window" in finding.message


# A loop over steps and requests that knows nothing of the code: every condition by its definition.


def by_definition(steps, requests):
    """Conditions that steps reach; each step is rows, sampled rows or None, block tables or None, and its phase."""
    reached, computed, num_blocks, went_on, latest, hits = set(), {}, {}, set(), set(), []
    last = {}
    for of, at in (row for rows, _, _, phase in steps for row in rows if phase != "readback"):
        last[of] = max(at, last.get(of, 0))
    for rows, sampled, tables, phase in steps:
        if any(len(blocks) > 1 for blocks in (tables or {}).values()):
            reached.add("block_boundary")
        if phase == "readback":
            continue
        present = {request: [at for of, at in rows if of == request] for request in sorted({of for of, _ in rows})}
        if len(present) > 1:
            reached.add("batch")
            if len({max(positions) for positions in present.values()}) > 1:
                reached.add("ragged_batch")
        ended = {request for request, before in computed.items() if last[request] in before}
        if computed.keys() - ended - present.keys():
            reached.add("paused")
        if ended & latest - present.keys() and latest & present.keys():
            reached.add("uneven_end")
        in_decode, prefixes, latest = set(), [], set(present)
        for request, positions in present.items():
            tokens, prompt_length = requests[request]
            prefixes.append(tokens[: max(positions) + 1])
            chose = positions if sampled is None else [at for of, at in sampled if of == request]
            blocks = len((tables or {}).get(request, ()))
            all_chose = sampled is not None and set(chose) == set(positions)
            if (len(chose) == 1 or all_chose) and min(chose) >= prompt_length:
                in_decode.add(request)
                reached.add("decode")
                if len(chose) > 1:
                    reached.add("drafts_accepted")
                if request in num_blocks and blocks > num_blocks[request]:
                    reached.add("new_block")
            num_blocks[request] = blocks
            first = min(positions)
            if request not in computed and first > 0:
                reached.add("prefix_hit")
                hits.append(tokens[:first])
                if not any(requests[earlier][0][:prompt_length] == tokens[:prompt_length] for earlier in computed):
                    reached.add("partial_hit")
                others = [running for running in present if set(range(first)) <= computed.get(running, set())]
                if any(requests[running][0][:first] == tokens[:first] for running in others):
                    reached.add("forked")
            elif request not in computed and any(tokens[:prompt_length][: len(hit)] == hit for hit in hits):
                reached.add("evicted")
            before = computed.setdefault(request, set())
            if (tables or (first == 0 and request in went_on)) and before & set(positions):
                reached.add("preempted")
            if before and first > max(before):
                went_on.add(request)
            if set(positions) - before and max(positions) < prompt_length - 1 and (sampled is None or not chose):
                reached.add("chunked_prefill")
            before |= set(positions)
        if in_decode and in_decode < set(present):
            reached.add("mixed_batch")
        if len(set(prefixes)) < len(prefixes):
            reached.add("equal_requests")
        numbers = [number for number in Counter(of for of, _ in rows).values() if number > 1]
        if len(set(numbers)) < len(numbers):
            reached.add("equal_lengths")
        decoded = [requests[of][0][max(at for who, at in rows if who == of)] for of in in_decode]
        if len(present) > 1 and len(set(decoded)) < len(decoded):
            reached.add("same_token")
        if any((of, at + 1) in rows and requests[of][0][at] == requests[of][0][at + 1] for of, at in rows):
            reached.add("repeated_token")
        if any(one[:2] == two[:2] and one != two for one in prefixes for two in prefixes):
            reached.add("shared_prefix")
        if list(dict.fromkeys(of for of, _ in rows)) != list(present):
            reached.add("reordered")
    return reached


@pytest.mark.parametrize("seed", range(60))
def test_conditions_are_those_of_the_loop(seed):
    generator = random.Random(seed)
    shared = [generator.randint(1, 2) for _ in range(9)]
    requests = {id_: (tuple(shared[:4] + [id_] * 2 if id_ != 5 else [7] * 6), 4) for id_ in (2, 5, 9)}
    steps = []
    for _ in range(generator.randint(1, 4)):
        rows = []
        for request in generator.sample([2, 5, 9], generator.randint(1, 3)):
            begin = generator.randint(0, 4)
            rows += [(request, at) for at in range(begin, min(begin + generator.randint(1, 5), 6))]
        generator.shuffle(rows)
        sampled = generator.sample(rows, generator.randint(0, min(2, len(rows)))) if generator.random() < 0.7 else None
        tables = None
        if generator.random() < 0.5:
            tables = {request: [0] * generator.randint(1, 3) for request in generator.sample([2, 5, 9], 2)}
        steps.append((rows, sampled, tables, generator.choice(["mixed", "mixed", "mixed", "readback"])))
    made = [
        in_memory.Step(
            rows, phase=phase, tables=tables,
            sampled=None if sampled is None else [9 if row in sampled else -1 for row in rows],
        )
        for rows, sampled, tables, phase in steps
    ]  # fmt: skip
    recorded = in_memory.recording_of({id_: tokens for id_, (tokens, _) in requests.items()}, made, prompt_length=4)
    assert set(reached_triggers(recorded)) == by_definition(steps, requests)


@pytest.mark.parametrize(
    ("last", "reached"), [(3, set()), (4, {"window_exceeded"}), (5, {"window_exceeded", "rope_extended"})]
)
def test_the_last_position_decides_what_the_model_was_asked_for(last, reached):
    traits = Traits(num_groups=1, window=4, original_positions=5)
    steps = [in_memory.Step([(0, 0), (0, last)]), in_memory.Step([]), in_memory.Step([(0, 1)])]
    recorded = in_memory.recording_of({0: range(9)}, steps, prompt_length=9)
    actual = set(reached_triggers(recorded, traits))
    assert actual & {"window_exceeded", "rope_extended"} == reached
    nothing = in_memory.recording_of({0: range(9)}, [])
    assert reached_triggers(nothing, Traits(num_groups=2, window=0, original_positions=0)) == ()
    one = in_memory.recording_of({0: range(9)}, [in_memory.Step([(0, 0)])], prompt_length=9)
    assert "gqa" in reached_triggers(one, Traits(num_groups=2, window=None, original_positions=None))


@pytest.mark.parametrize(
    ("config", "num_groups"),
    [({"num_attention_heads": 6, "num_key_value_heads": 2}, 3), ({"num_attention_heads": 6}, 1), ({}, 1),
     ({"num_attention_heads": 6, "num_key_value_heads": None}, 1)],
)  # fmt: skip
def test_traits_of_a_configuration(config, num_groups):
    def hf(windows, **config):
        graph = [SimpleNamespace(window=window) for window in windows]
        return SimpleNamespace(config=SimpleNamespace(**config), graph=graph)

    assert Traits.of(hf([None, 8, 4], **config)) == Traits(num_groups=num_groups, window=4, original_positions=None)
    rope = {"rope_parameters": {"original_max_position_embeddings": 77}}
    assert Traits.of(hf([None], **rope)) == Traits(num_groups=1, window=None, original_positions=77)


def test_drafts_are_no_batch_and_no_fork_and_what_follows_them_has_gone_back():
    """Two of three drafts are rejected in step 1; the request goes on at position 6."""
    requests = [
        RequestInfo(id=0, prompt_length=4, token_ids=list(range(12))),
        RequestInfo(id=1, prompt_length=6, token_ids=[*range(6), 90, 91], draft_of=0),
    ]
    tables = {0: [1, 2], 1: [1, 2]}
    prefill = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9], tables={0: [1]})
    verification = step(1, [0, 0, 1, 1], [4, 5, 6, 7], sampled=[9] * 4, tables=tables)
    after = step(2, [0], [6], sampled=[9], tables={0: [1, 2]})
    assert "drafts_together" in unreached_triggers(
        SimpleNamespace(steps=[prefill], manifest=SimpleNamespace(requests=requests)), (), PLAIN
    )

    def reached(*steps):
        return reached_triggers(SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests)))

    assert reached(prefill, verification) == ("decode", "new_block", "block_boundary", "drafts_accepted")
    assert reached(prefill, verification, after) == (*reached(prefill, verification)[:3], "rewound", "drafts_accepted")


def test_drafts_of_two_requests_in_one_step():
    requests = [RequestInfo(id=index, prompt_length=4, token_ids=list(range(9))) for index in range(2)]
    drafts = [RequestInfo(id=2 + of, prompt_length=4, token_ids=[*range(5), 90 + of], draft_of=of) for of in range(2)]
    manifest = SimpleNamespace(requests=[*requests, *drafts])

    def reached(*steps):
        return reached_triggers(SimpleNamespace(steps=steps, manifest=manifest))

    prefill = step(0, [0] * 4 + [1] * 4, [*range(4)] * 2)
    assert "drafts_together" in reached(prefill, step(1, [0, 2, 1, 3], [4, 5, 4, 5]))
    assert "drafts_together" not in reached(prefill, step(1, [0, 2, 1], [4, 5, 4]), step(2, [0, 1, 3], [5, 5, 5]))


def test_how_many_tokens_were_taken_back_at_once():
    draft = RequestInfo(id=1, prompt_length=5, token_ids=[*range(5), 90, 91, 92], draft_of=0)
    requests = [RequestInfo(id=0, prompt_length=4, token_ids=list(range(9))), draft]
    steps = [step(0, [0] * 4, range(4)), step(1, [0, 1, 1], [4, 5, 6]), step(2, [0], [5])]
    recorded = SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests))
    assert extent(recorded, PLAIN).taken_back == 2
    recorded.steps = [steps[0], step(1, [1], [5]), step(2, [1], [6]), step(3, [0], [5])]
    assert extent(recorded, PLAIN).longest_pause == 0, "its drafts are the request's own"
    assert extent(recorded, PLAIN).requests == 1
    assert extent(recording(*steps[:1]), PLAIN).taken_back == 0
