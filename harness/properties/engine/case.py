"""One workload for a whole engine, the way in which it runs differently, how Hypothesis draws both, and its program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.properties.core.falsify import NamedAdapter

MOST_REQUESTS = 4
LONGEST_PROMPT = 24
MOST_NEW_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """Requests, and how they run differently from each alone on an engine with its defaults."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    order: tuple[int, ...]
    """In which the requests are added."""
    warm_up: tuple[tuple[int, ...], ...] = ()
    """Prompts that the engine serves before, for what they leave in its cache."""
    options: Mapping[str, int | bool] = field(default_factory=dict)
    """Of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One way to run requests that must not change what an engine computes."""

    what: str
    options: tuple[str, ...] = ()
    """Parameters of the constructor that it needs."""
    helpful: tuple[str, ...] = ()
    """Parameters that make it happen more often."""
    counter: str | None = None
    """The adapter's method that counts how often it happened."""


RELATIONS = {
    "batch": Relation(what="who else is in the batch"),
    "order": Relation(what="the order of the requests"),
    "block size": Relation(what="the block size", options=("block_size",)),
    "placement": Relation(what="the place of the blocks", options=("block_order",)),
    "chunks": Relation(what="how prompts are cut into chunks", options=("max_num_batched_tokens",)),
    "few at once": Relation(what="how many requests run at once", options=("max_num_seqs",)),
    "prefix hit": Relation(
        what="a prefix hit", options=("prefix_caching",), helpful=("block_size",), counter="num_cached_tokens"
    ),
    "preemption": Relation(what="a preemption", options=("num_blocks", "block_size"), counter="num_preemptions"),
    "speculation": Relation(
        what="drafts that are verified", options=("num_drafts",), helpful=("block_size",), counter="num_verified_drafts"
    ),
    "poison": Relation(what="content of unallocated blocks", options=("poison",)),
    "padding": Relation(what="rows of padding", options=("padding",)),
    "all": Relation(what="any of these"),
}
"""By name."""


def engine_cases(
    relation: str, *, vocab_size: int, max_model_len: int, offered: frozenset[str]
) -> SearchStrategy[EngineCase]:
    """Return cases of a relation, with those options that the engine offers."""
    cases = _cases(relation, vocab_size, max_model_len, offered)
    if relation != "preemption":
        return cases
    return _crowds(vocab_size, min(LONGEST_PROMPT, max_model_len - MOST_NEW_TOKENS)) | cases


@st.composite
def _cases(draw: DrawFn, relation: str, vocab_size: int, max_model_len: int, offered: frozenset[str]) -> EngineCase:
    max_new_tokens = draw(st.lists(st.integers(1, MOST_NEW_TOKENS), min_size=1, max_size=MOST_REQUESTS))
    longest = min(LONGEST_PROMPT, max_model_len - MOST_NEW_TOKENS)
    prompts = tuple(draw(_prompts(vocab_size, longest, len(max_new_tokens))))
    lens = [len(prompt) + new for prompt, new in zip(prompts, max_new_tokens, strict=True)]
    wanted = offered if relation == "all" else {*RELATIONS[relation].options, *RELATIONS[relation].helpful} & offered
    options: dict[str, int | bool] = {}
    for name in sorted(wanted):
        if relation != "all" or name == "block_size" or draw(st.booleans()):
            # The event needs full blocks.
            is_small = name == "block_size" and RELATIONS[relation].counter is not None
            options[name] = draw(st.integers(1, 4) if is_small else _OPTIONS[name])
    if "num_blocks" in options:
        # As many as the largest request needs, so that several together soon have too few.
        largest = -(-max(lens) // options["block_size"])
        options["num_blocks"] = largest + draw(st.integers(0, 2))
    warm_up = draw(_related(prompts)) if options.get("prefix_caching") else ()
    if "num_blocks" in options:
        warm_up = tuple(prompt for prompt in warm_up if len(prompt) < max(lens))
    order = draw(st.permutations(range(len(prompts)))) if relation in ("order", "all") else range(len(prompts))
    return EngineCase(
        prompts=prompts, max_new_tokens=tuple(max_new_tokens), order=tuple(order), warm_up=warm_up, options=options
    )


_OPTIONS: Mapping[str, SearchStrategy[int] | SearchStrategy[bool]] = {
    "block_size": st.integers(1, 9) | st.sampled_from((2, 16, 32)),
    "num_blocks": st.just(0),
    "max_num_batched_tokens": st.integers(1, 24),
    "max_num_seqs": st.integers(1, 3),
    "prefix_caching": st.just(True),
    "block_order": st.integers(1, 99),
    "poison": st.just(True),
    "padding": st.integers(1, 8),
    "num_drafts": st.integers(1, 5),
}


@st.composite
def _crowds(draw: DrawFn, vocab_size: int, longest: int) -> EngineCase:
    """Draw requests that start together in a pool that holds their prompts, and grow until it does not."""
    block_size = draw(st.integers(1, MOST_NEW_TOKENS - 2))
    # Each opens a block after its prompt before it ends, and no prompt is shorter than what another grows by.
    new_tokens = st.integers(block_size + 1, MOST_NEW_TOKENS)
    max_new_tokens = draw(st.lists(new_tokens, min_size=2, max_size=MOST_REQUESTS))
    least = min(2 * MOST_NEW_TOKENS, longest)
    drawn = draw(_prompts(vocab_size, longest, len(max_new_tokens)))
    prompts = [(prompt * -(-least // len(prompt)))[:longest] for prompt in drawn]
    all_prompts = sum(-(-len(prompt) // block_size) for prompt in prompts) + draw(st.integers(0, 1))
    lens = [len(prompt) + new for prompt, new in zip(prompts, max_new_tokens, strict=True)]
    num_blocks = max(all_prompts, -(-max(lens) // block_size))  # where prompts are short, one request may need more
    return EngineCase(
        prompts=tuple(prompts),
        max_new_tokens=tuple(max_new_tokens),
        order=tuple(range(len(prompts))),
        options={"block_size": block_size, "num_blocks": num_blocks},
    )


@st.composite
def _prompts(draw: DrawFn, vocab_size: int, longest: int, num_prompts: int) -> list[tuple[int, ...]]:
    """Draw prompts that repeat themselves, so that what comes next depends on what was, and that begin alike."""
    tokens = st.integers(0, vocab_size - 1)
    shared = draw(st.lists(tokens, max_size=longest // 2))
    prompts = []
    for _ in range(num_prompts):
        repeated = draw(st.lists(tokens, min_size=1, max_size=longest // 2))
        prompt = (shared if draw(st.booleans()) else []) + repeated * draw(st.integers(1, 3))
        prompts.append(tuple(prompt[:longest]))
    return prompts


def _related(prompts: tuple[tuple[int, ...], ...]) -> SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Return one or two of the prompts, or beginnings of them."""

    def beginnings(prompt: tuple[int, ...]) -> SearchStrategy[tuple[int, ...]]:
        return st.just(prompt) | st.integers(1, len(prompt)).map(lambda length: prompt[:length])

    return st.lists(st.sampled_from(prompts).flatmap(beginnings), min_size=1, max_size=2).map(tuple)


def token_program(adapter: NamedAdapter, case: EngineCase) -> str:
    """Return a program that asserts that the tokens of all requests are those of each alone."""
    name = adapter.expression
    alone = f"plain = [{name}().generate([prompt], [n])[0] for prompt, n in zip(prompts, max_new_tokens)]"
    is_sorted = list(case.order) == sorted(case.order)
    expected = "plain" if is_sorted else f"[plain[i] for i in {list(case.order)}]"
    lines = [*_opening(adapter, case), alone, *_running(adapter, case)]
    return "\n".join([*lines, f"assert [list(own) for own in changed] == [list(own) for own in {expected}]"]) + "\n"


def expected_program(adapter: NamedAdapter, case: EngineCase, expected: list[list[int]]) -> str:
    """Return a program that asserts the tokens of the requests, in their order, in a process of its own."""
    lines = [*_opening(adapter, case), *_running(adapter, case)]
    return "\n".join([*lines, f"assert [list(own) for own in changed] == {expected}"]) + "\n"


def tap_program(
    adapter: NamedAdapter, case: EngineCase, request: int, tap: str, place: tuple[int, int], bound: float, unit: float
) -> str:
    """Return a program that asserts that one row of a tap is what it is alone; `place` is its key among the taps."""
    lines = [
        *_opening(adapter, case),
        *_running(adapter, case),
        f"alone = {adapter.expression}()",
        f"alone.generate([prompts[{request}]], [max_new_tokens[{request}]])",
        f'expected = alone.taps()["{tap}"][0, {place[1]}].double()',
        f'actual = engine.taps()["{tap}"][{place[0]}, {place[1]}].double()',
        f"error = (actual - expected).norm() / expected.norm() / {unit:.4g}",
        'print(f"{error:.3g} roundings")',
        f"assert error <= {bound:g}",
    ]
    return "\n".join(lines) + "\n"


def _opening(adapter: NamedAdapter, case: EngineCase) -> list[str]:
    prompts = [list(prompt) for prompt in case.prompts]
    return [
        *adapter.imports,
        "",
        f"prompts, max_new_tokens = {prompts}, {list(case.max_new_tokens)}",
    ]


def _running(adapter: NamedAdapter, case: EngineCase) -> list[str]:
    options = ", ".join(f"{name}={value!r}" for name, value in case.options.items())
    lines = [f"engine = {adapter.expression}({options})"]
    if case.warm_up:
        warm_up = [list(prompt) for prompt in case.warm_up]
        lines += [f"engine.generate({warm_up}, {[1] * len(warm_up)})"]
    if list(case.order) == sorted(case.order):
        return [*lines, "changed = engine.generate(prompts, max_new_tokens)"]
    order = list(case.order)
    ordered = [f"[{values}[i] for i in {order}]" for values in ("prompts", "max_new_tokens")]
    return [*lines, f"changed = engine.generate({', '.join(ordered)})"]
