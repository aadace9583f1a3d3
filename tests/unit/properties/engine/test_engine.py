"""The engine suite passes the reference engine, and finds what makes an engine depend on how it is run."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings

from harness.errors import Code, HarnessError
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.engine.case import RELATIONS
from harness.properties.engine.suite import NUM_AGAIN, check_engine, not_checked, refusal
from harness.properties.reference.engine import EngineSubject

DEV = PROFILES["dev"].settings()
FEW = settings(DEV, max_examples=12)
OURS = [relation for relation in RELATIONS if refusal(EngineSubject, relation) is None]


class LlamaEngine(EngineSubject):
    model = "llama-tiny"


class Qwen2Engine(EngineSubject):
    model = "qwen2-tiny"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("engine", "relation"),
    [
        (EngineSubject, "prefix hit"),
        (EngineSubject, "preemption"),
        (EngineSubject, "speculation"),
        (EngineSubject, "all"),
        (LlamaEngine, "all"),
        (Qwen2Engine, "all"),
    ],
)
def test_the_reference_engine_passes(engine: Any, relation: str) -> None:
    check_engine(engine, FEW, relation)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [EngineSubject, LlamaEngine, Qwen2Engine])
@pytest.mark.parametrize("relation", OURS)
def test_the_reference_engine_passes_in_many_examples(engine: Any, relation: str) -> None:
    check_engine(engine, settings(DEV, max_examples=60), relation)


class Counting:
    """An engine without a model: the next token follows from the tokens so far, unless something is broken."""

    vocab_size = 50

    def __init__(self, *, block_size: int = 4, max_num_batched_tokens: int = 64, prefix_caching: bool = False) -> None:
        self.block_size = block_size
        self.chunk = max_num_batched_tokens
        self.cached: set[int] | None = set() if prefix_caching else None
        self.num_cached = 0

    def generate(self, prompts: Any, max_new_tokens: Any) -> list[list[int]]:
        return [self.continued(list(prompt), number) for prompt, number in zip(prompts, max_new_tokens, strict=True)]

    def continued(self, tokens: list[int], number: int) -> list[int]:
        for _ in range(number):
            tokens.append(self.next(tokens))
        return tokens[-number:]

    def next(self, tokens: list[int]) -> int:
        if self.cached is not None:
            self.num_cached += tokens[0] in self.cached
            self.cached.add(tokens[0])
        return (sum(i * token for i, token in enumerate(tokens, start=1))) % self.vocab_size

    def num_cached_tokens(self) -> int:
        return self.num_cached


class BlockSizeMatters(Counting):
    def next(self, tokens: list[int]) -> int:
        return super().next(tokens[:-1] if self.block_size == 1 else tokens)


class LastChunkOnly(Counting):
    def next(self, tokens: list[int]) -> int:
        return super().next(tokens[-self.chunk :])


class OrderMatters(Counting):
    def generate(self, prompts: Any, max_new_tokens: Any) -> list[list[int]]:
        generated = super().generate(prompts, max_new_tokens)
        return [[(token + i) % self.vocab_size for token in tokens] for i, tokens in enumerate(generated)]


class WarmUpMatters(Counting):
    def next(self, tokens: list[int]) -> int:
        is_hit = self.cached is not None and tokens[0] in self.cached
        return super().next(tokens[1:] if is_hit and len(tokens) > 1 else tokens)


class Crashes(Counting):
    def generate(self, prompts: Any, max_new_tokens: Any) -> list[list[int]]:
        if len(prompts) > 2:
            raise RuntimeError("out of blocks")
        return super().generate(prompts, max_new_tokens)


class Short(Counting):
    def continued(self, tokens: list[int], number: int) -> list[int]:
        return super().continued(tokens, number)[: self.chunk]


class NeverHits(Counting):
    def next(self, tokens: list[int]) -> int:
        self.cached = None
        return super().next(tokens)


class KeepsAnswers(LastChunkOnly):
    """The same bug, and whatever was answered once is answered again, by any engine of the process."""

    answers: ClassVar[dict[tuple[tuple[int, ...], int], list[int]]] = {}

    def continued(self, tokens: list[int], number: int) -> list[int]:
        key = tuple(tokens), number
        return self.answers.setdefault(key, self.answers.get(key) or super().continued(tokens, number))


def test_answers_that_a_process_keeps_are_seen_in_another() -> None:
    check_engine(KeepsAnswers, DEV, "chunks")
    with pytest.raises(PropertyError, match="answers are kept") as caught:
        check_engine(KeepsAnswers, DEV, "all")
    KeepsAnswers.answers.clear()
    with pytest.raises(AssertionError):
        run(caught.value.program)


def test_an_engine_that_no_other_process_can_import_is_said() -> None:
    class Local(Counting):
        pass

    ((reason, number),) = check_engine(Local, DEV, "all").items()
    assert reason.startswith("not run in a process of their own: ")
    assert number == NUM_AGAIN


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bug", "relation"),
    [
        (BlockSizeMatters, "block size"),
        (LastChunkOnly, "chunks"),
        (OrderMatters, "batch"),
        (WarmUpMatters, "prefix hit"),
        (Crashes, "batch"),
        (Short, "chunks"),
        (LastChunkOnly, "all"),
    ],
)
def test_a_bug_is_reported_as_a_program_that_shows_it(bug: Any, relation: str) -> None:
    check_engine(Counting, DEV, relation)
    with pytest.raises(PropertyError, match="H092") as caught:
        check_engine(bug, DEV, relation)
    assert "hypothesis" not in caught.value.program
    with pytest.raises((AssertionError, RuntimeError)):
        run(caught.value.program)
    run(caught.value.program.replace(bug.__name__, "Counting"))


def run(program: str) -> None:
    exec(compile(program, "program", "exec"), {})


def test_the_program_is_as_short_as_it_can_be() -> None:
    with pytest.raises(PropertyError) as caught:
        check_engine(LastChunkOnly, DEV, "chunks")
    assert caught.value.program.splitlines()[2:] == [
        "prompts, max_new_tokens = [[0, 1]], [1]",
        "plain = [LastChunkOnly().generate([prompt], [n])[0] for prompt, n in zip(prompts, max_new_tokens)]",
        "engine = LastChunkOnly(max_num_batched_tokens=1)",
        "changed = engine.generate(prompts, max_new_tokens)",
        "assert [list(own) for own in changed] == [list(own) for own in plain]",
    ]


class ShortLived(EngineSubject):
    """An engine for requests of a few tokens."""

    max_model_len = 10


def test_a_crowd_of_short_requests_fits_one_by_one() -> None:
    check_engine(ShortLived, FEW, "preemption")


def test_a_relation_that_never_happens_is_no_success() -> None:
    with pytest.raises(HarnessError, match="no example had a prefix hit") as caught:
        check_engine(NeverHits, FEW, "prefix hit")
    assert caught.value.code == Code.TRIGGER_NOT_REACHED


def test_a_tap_that_differs_is_found_where_the_tokens_agree() -> None:
    with pytest.raises(PropertyError) as caught:
        check_engine(Tapped, DEV, "chunks")
    assert "roundings from what it is alone" in caught.value.what
    with pytest.raises(AssertionError):
        run(caught.value.program)


class Tapped(EngineSubject):
    """Its taps are off in chunks of one token."""

    def __init__(self, *, max_num_batched_tokens: int = 2048) -> None:
        super().__init__(max_num_batched_tokens=max_num_batched_tokens)
        self._factor = 1.001 if max_num_batched_tokens == 1 else 1.0

    def taps(self) -> Any:
        rows = super().taps()["model.layers.0.attention"]
        return {"attention": {place: row * self._factor for place, row in rows.items()}}


class EmptyTaps(Counting):
    def taps(self) -> Any:
        return {}


def test_taps_without_rows_are_no_success() -> None:
    with pytest.raises(HarnessError, match="no row of any tap was there to be compared") as caught:
        check_engine(EmptyTaps, FEW, "batch")
    assert caught.value.code == Code.NOTHING_CHECKED


class NearlyTied(Counting):
    """Chooses the other of two logits, one a hair below the other, where there is company."""

    gap = 1e-7

    def generate(self, prompts: Any, max_new_tokens: Any) -> list[list[int]]:
        self.lens = [len(prompt) for prompt in prompts]
        return [[int(len(prompts) > 1)] for _ in prompts]

    def taps(self) -> Any:
        logits = torch.zeros(self.vocab_size)
        logits[:2] = torch.tensor([1.0, 1.0 - self.gap])
        return {"lm_head": {(place, length - 1): logits for place, length in enumerate(self.lens)}}


class FarFromTied(NearlyTied):
    gap = 1e-3


def test_a_choice_between_equals_may_be_either() -> None:
    check_engine(NearlyTied, FEW, "batch")
    with pytest.raises(PropertyError, match="new token 0"):
        check_engine(FarFromTied, FEW, "batch")


def test_what_an_engine_lacks_is_reported() -> None:
    lines = not_checked(Counting)
    assert "engine: a preemption: the constructor has no parameter num_blocks" in lines
    assert any(line.startswith("engine: no taps()") for line in lines)
    unseen = "engine: whether block_size, max_num_batched_tokens have any effect: no method counts it"
    assert unseen in lines
    with pytest.raises(HarnessError, match="H091: the adapter lacks generate or vocab_size"):
        check_engine(object, FEW)
