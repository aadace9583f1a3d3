from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from reference_engine import EngineConfig, FinishReason, LLMEngine, SamplingParams
from reference_engine.errors import ConfigError, RequestError
from reference_engine.requests.stopping import find_stop

from .schedules import finish


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": math.nan}, "temperature is impossible.*a finite number of at least 0, found nan"),
        ({"temperature": math.inf}, "found inf"),
        ({"temperature": -0.1}, "found -0.1"),
        ({"temperature": True}, "found True"),
        ({"top_k": -1}, "top_k.*an integer of at least 0, found -1"),
        ({"top_k": 1.5}, "found 1.5"),
        ({"top_p": 0}, "top_p.*above 0, at most 1, found 0"),
        ({"top_p": 1.01}, "found 1.01"),
        ({"min_p": -1e-9}, "min_p.*found -1e-09"),
        ({"repetition_penalty": 0}, "repetition_penalty.*found 0"),
        ({"repetition_penalty": "1"}, "found '1'"),
        ({"seed": -1}, "seed.*found -1"),
        ({"num_logprobs": -1}, "num_logprobs.*found -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is impossible.*an integer of at least 1, found 0"),
        ({"stop": [5]}, r"stop is impossible.*a list of strings, none of them empty, found \[5\]"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": 5}, "stop is impossible.*found 5"),
        ({"stop_token_ids": 5}, "stop_token_ids is impossible.*a list of token ids, found 5"),
        ({"forced_token_ids": 5}, "forced_token_ids is impossible.*a list of token ids, found 5"),
        ({"ignore_eos": "yes"}, "True, False or None, found 'yes'"),
        ({"cache_salt": None}, "cache_salt is impossible.*a string, found None"),
        ({"max_new_tokens": 1, "forced_token_ids": [1, 2]}, "at most max_new_tokens = 1 forced_token_ids, found 2"),
    ],
)
def test_an_impossible_value_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_greedy_is_the_default_and_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams().is_plain
    assert not SamplingParams(temperature=1.0).is_plain
    assert not SamplingParams(num_logprobs=0).is_plain
    assert SamplingParams(stop="end").stop == ("end",)


def test_the_first_stop_string_wins() -> None:
    assert find_stop("abcd", ["cd", "bc"]) == 1
    assert find_stop("abcd", ["x"]) is None


PROMPTS = [[4, 5, 6, 7, 8], [9, 10], [11]]
DRAWING = [
    SamplingParams(max_new_tokens=9, temperature=1.2, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=9, temperature=0.9, top_p=0.9, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_new_tokens=9, ignore_eos=True, num_logprobs=2),
]


def test_draws_do_not_depend_on_the_schedule(checkpoint: Any) -> None:
    def run(**config: Any) -> list[tuple[int, ...]]:
        engine = LLMEngine(checkpoint.folder, EngineConfig(block_size=3, **config))
        return [output.token_ids for output in engine.generate(PROMPTS, DRAWING)]

    together = run()
    assert run(max_num_seqs=1) == together
    assert run(max_num_batched_tokens=2) == together
    assert run(num_blocks=1 + 7, debug_checks=True) == together, "preempted"
    assert run(seed=1)[0] == together[0], "its own seed"
    assert run(seed=1)[1] != together[1], "the engine's"


def test_logprobs_come_with_every_token(checkpoint: Any) -> None:
    _, _, output = LLMEngine(checkpoint.folder).generate(PROMPTS, DRAWING)
    logits = checkpoint.logits([*PROMPTS[2], *output.token_ids])[: len(output.token_ids)]
    expected = logits.log_softmax(dim=-1).amax(dim=-1).tolist()
    assert [logprobs.logprob for logprobs in output.logprobs] == pytest.approx(expected, abs=1e-4)
    assert [logprobs.top[0][0] for logprobs in output.logprobs] == list(output.token_ids)
    assert [len(logprobs.top) for logprobs in output.logprobs] == [2] * 9


def test_forks_without_a_seed_draw_differently(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    parent = engine.add_request([4, 5], SamplingParams(max_new_tokens=9, temperature=3.0, ignore_eos=True))
    engine.step()
    forks = engine.fork(parent), engine.fork(parent)
    tokens = finish(engine)
    assert set(tokens) == {parent, *forks}
    assert len({tuple(drawn) for drawn in tokens.values()}) == 3


def test_a_stop_token_ends_even_where_eos_is_ignored(checkpoint: Any) -> None:
    params = SamplingParams(max_new_tokens=4, forced_token_ids=[7, 3, 9, 8], stop_token_ids=[9])
    (output,) = LLMEngine(checkpoint.folder).generate([[4]], params)
    assert (output.token_ids, output.finish_reason) == ((7, 3, 9), FinishReason.STOP)
    with pytest.raises(RequestError, match=r"stop_token_ids\[0\]: expected 0 <= id < 97, found 97"):
        LLMEngine(checkpoint.folder).add_request([4], SamplingParams(stop_token_ids=[97]))


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """The checkpoint, with a tokenizer of which token 10 is "a", 11 is "b", and so on."""
    for path in checkpoint.folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = {chr(ord("a") + i): 10 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **words}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("stop", "num_tokens", "text", "reason"),
    [
        ("c", 3, "ab", FinishReason.STOP),
        (["zz", "bcd"], 4, "a", FinishReason.STOP),
        (["x"], 5, "abcde", FinishReason.LENGTH),
    ],
)
def test_a_stop_string_may_lie_across_tokens(
    folder: Path, stop: Any, num_tokens: int, text: str, reason: FinishReason
) -> None:
    engine = LLMEngine(folder)
    params = SamplingParams(max_new_tokens=5, forced_token_ids=[10, 11, 12, 13, 14], stop=stop)
    (output,) = engine.generate([engine.tokenizer.encode("d")], params)
    assert (len(output.token_ids), output.text, output.finish_reason) == (num_tokens, text, reason)


def test_prompts_may_be_text_beside_token_ids(folder: Path) -> None:
    engine = LLMEngine(folder)
    params = SamplingParams(max_new_tokens=3, forced_token_ids=[10, 11, 12])
    text, token_ids = engine.generate(["d", [13]], params)
    assert (text.prompt_token_ids, text.token_ids) == (token_ids.prompt_token_ids, token_ids.token_ids)
    assert (text.prompt_token_ids, text.text, token_ids.text) == ((13,), "abc", None)


def test_text_without_a_tokenizer_is_refused(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        engine.generate([[4], "d"])
    assert not engine.has_unfinished()


def test_stop_strings_without_a_tokenizer_are_refused_and_others_go_on(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    kept = engine.add_request([4], SamplingParams(max_new_tokens=2, ignore_eos=True))
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        engine.add_request([4], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="at most the vocabulary of 97, found 98"):
        engine.add_request([4], SamplingParams(num_logprobs=98))
    assert [output.request_id for _ in range(2) for output in engine.step()] == [kept, kept]


def test_a_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        LLMEngine(folder).add_request([4], SamplingParams(stop="x"))
