"""Each fault in the text that a server writes is found and named; the sound server has none."""

import asyncio
import dataclasses

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.chat.report import tokens_text
from harness.extensions.server.chat.result import TokensResult
from harness.extensions.server.chat.text import TextCheck
from harness.extensions.server.client import Client
from reference_engine.requests import stopping
from reference_engine.server import answer, chat, choice, completions
from reference_engine.server.schema import _Request

from .test_bad_servers import stub

PIECES, FIND, PARAMS, COMPLETE = choice.pieces, stopping.find_stop, _Request.sampling_params, completions.complete


class Alone(choice.Detokenizer):
    """Decodes each token by itself."""

    def add(self, token_id):
        return self._decode([token_id])

    def finish(self):
        return ""


def streamed(change):
    """Change the pieces of streams alone: `change` takes the piece before its yield, and whether it is the last."""

    def plant(monkeypatch, text):
        async def pieces(engine, texts, prompt, params):
            async for piece in PIECES(engine, texts, prompt, params):
                yield change(piece)

        for module in (completions, chat):
            monkeypatch.setattr(module, "pieces", pieces)

    return plant


def at_the_end(**fields):
    return lambda piece: dataclasses.replace(piece, **fields) if piece.finish_reason else piece


def eager(monkeypatch, text):
    """A stream that holds nothing back, nor halves of characters."""

    async def pieces(engine, texts, prompt, params):
        async for output in engine.generate(prompt, params):
            reason = output.finish_reason and choice._REASONS[output.finish_reason]
            yield choice.ContinuationPiece(
                text=texts.decode([output.token_id]), token_ids=[output.token_id], finish_reason=reason
            )

    for module in (completions, chat):
        monkeypatch.setattr(module, "pieces", pieces)


def unheld(monkeypatch, text):
    """A stream that holds no part of a stop string back."""

    async def pieces(engine, texts, prompt, params):
        detokenizer = choice.Detokenizer(texts.decode, prompt[-5:])
        async for output in engine.generate(prompt, params):
            reason = output.finish_reason and choice._REASONS[output.finish_reason]
            ready = detokenizer.add(output.token_id) + (detokenizer.finish() if reason else "")
            yield choice.ContinuationPiece(text=ready, token_ids=[output.token_id], finish_reason=reason)

    for module in (completions, chat):
        monkeypatch.setattr(module, "pieces", pieces)


def stops(find, *modules):
    def plant(monkeypatch, text):
        for module in modules or (choice,):
            monkeypatch.setattr(module, "find_stop", find)

    return plant


def cut_late(text, stops):
    end = FIND(text, stops)
    return end if end is None else end + next(len(item) for item in stops if text.startswith(item, end))


def lost(text, stops):
    end = FIND(text, stops)
    return max(0, len(text) - max(map(len, stops)) + 1) if end is None and stops else end


def params(**changes):
    def plant(monkeypatch, text):
        def changed_params(self, **fields):
            sound = PARAMS(self, **fields)
            return dataclasses.replace(sound, **{name: change(sound) for name, change in changes.items()})

        monkeypatch.setattr(_Request, "sampling_params", changed_params)

    return plant


def requests(change):
    def plant(monkeypatch, text):
        async def complete(engine, texts, request, prompts, model):
            return await change(request, lambda asked: COMPLETE(engine, texts, asked, prompts, model))

        monkeypatch.setattr("reference_engine.server.app.complete", complete)

    return plant


async def copied(request, run):
    body = await run(request)
    return {**body, "choices": [{**item, "text": body["choices"][0]["text"]} for item in body["choices"]]}


async def stripped_echo(request, run):
    body = await run(request)
    return {
        **body,
        "choices": [
            {**item, "text": item["text"].replace(request.prompt, request.prompt.strip())} for item in body["choices"]
        ],
    }


def patched(module, name, value):
    return lambda monkeypatch, text: monkeypatch.setattr(module, name, value)


def with_special(monkeypatch, text):
    sound = text._tokenizer.decode
    monkeypatch.setattr(text._tokenizer, "decode", lambda ids, **_: sound(ids, with_special=True))


LENGTH = dict.fromkeys(choice._REASONS, "length")
FAULTS = {
    "a stream of tokens, each decoded alone": (eager, "characters are broken in pieces"),
    "the last piece of a stream is lost": (streamed(at_the_end(text="")), "the end of a streamed text is lost"),
    "a stream that repeats itself": (
        streamed(lambda piece: dataclasses.replace(piece, text=2 * piece.text)),
        "the pieces of a stream are not the whole text",
    ),
    "a stream that says no reason": (streamed(at_the_end(finish_reason=None)), "finish_reason of streaming"),
    "tokens decoded alone": (patched(choice, "Detokenizer", Alone), "the text is not that of its tokens"),
    "special tokens are written": (with_special, "the text is not that of its tokens: special tokens are written"),
    "no stop strings": (params(stop=lambda sound: ()), "a stop string is ignored"),
    "stop strings are written": (stops(cut_late), "the stop string is written"),
    "what was held back is lost": (stops(lost), "text is lost before a stop string, or where none comes"),
    "the first stop string alone": (
        stops(lambda text, strings: FIND(text, strings[:1]), choice, stopping), "text beyond a stop string is written",
    ),
    "nothing is held back": (unheld, "the stop string is written in a stream"),
    "one token too many": (
        params(max_new_tokens=lambda sound: sound.max_new_tokens + 1), "the number of tokens, or finish_reason",
    ),
    "one token too few": (
        params(max_new_tokens=lambda sound: max(1, sound.max_new_tokens - 1)), "the number of tokens, or finish_reason",
    ),
    "always the length": (patched(choice, "_REASONS", LENGTH), "finish_reason of stop"),
    "a count too large": (
        patched(completions, "usage", lambda num, new: answer.usage(num, new + 2)),
        "usage counts other tokens than the answer has",
    ),
    "n is ignored": (
        requests(lambda request, run: run(request.model_copy(update={"n": 1}))), "n is 2, and there is 1 choice",
    ),
    "copies of one draw": (requests(copied), "both choices are the same draw"),
    "echo is ignored": (requests(lambda request, run: run(request.model_copy(update={"echo": False}))),
                        "echo is ignored"),
    "an echo without its spaces": (
        requests(lambda request, run: stripped_echo(request, run) if request.echo else run(request)),
        "the echo is not the prompt and its answer",
    ),
}  # fmt: skip


def written(address, tokenizer):
    async def run():
        async with Client(address) as client:
            writing = TextCheck(client, "chat", tokenizer)
            await writing.run()
            return writing

    return asyncio.run(run())


@pytest.fixture(scope="module")
def tokenizer(chat_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_folder)


def test_the_sound_server_writes_what_its_tokens_are(chat_server, tokenizer):
    writing = written(chat_server[1], tokenizer)
    assert (writing.differences, writing.not_judged) == ([], {})
    assert writing.num_answers == 63


def test_a_server_that_does_as_vllm_does_is_sound(chat_server, tokenizer, monkeypatch):
    """No temperature above 2, and an echo without its text where token ids are asked for."""
    from fastapi import HTTPException

    async def as_vllm(request, run):
        if request.temperature > 2:
            raise HTTPException(400, "temperature must be in [0, 2]")
        is_hidden = request.echo and request.return_token_ids
        return await run(request.model_copy(update={"echo": False}) if is_hidden else request)

    monkeypatch.setattr("harness.extensions.server.chat.text._PROMPTS", ("one two ",))
    requests(as_vllm)(monkeypatch, chat_server[0])
    writing = written(chat_server[1], tokenizer)
    assert (writing.differences, writing.not_judged) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_found_and_named(chat_server, tokenizer, monkeypatch, name):
    plant, says = FAULTS[name]
    text, address = chat_server
    plant(monkeypatch, text)
    writing = written(address, tokenizer)
    assert says in {difference.name for difference in writing.differences}, writing.differences


@pytest.mark.slow
def test_what_is_said_of_a_text_and_how_to_ask_again(chat_server, tokenizer, monkeypatch):
    text, address = chat_server
    monkeypatch.setattr("harness.extensions.server.chat.text._PROMPTS", ("one two ",))
    requests(lambda request, run: run(request.model_copy(update={"echo": False})))(monkeypatch, text)
    writing = written(address, tokenizer)
    result = TokensResult(
        subject=address.url, server="", served_model="chat", model="chat", evidence="", proves="", features=(),
        num_conversations=1, num_texts=0, num_ends=0, num_answers=writing.num_answers,
        differences=writing.differences, not_judged={},
    )  # fmt: skip
    said = tokens_text(result, width=100)
    assert "  H214  echo is ignored\n          text        'one two '\n        expected  'one two " in said
    assert f"        curl -s {address.url}/v1/completions -H 'content-type: application/json' -d '{{" in said
    assert '"echo": true' in said
    assert "  answers     the text of " in said


def test_servers_that_write_nothing_of_use(tokenizer):
    pages = {
        "/v1/completions": lambda body: {"choices": [{"text": 5}]},
        "/v1/chat/completions": lambda body: {"choices": []},
    }
    with stub(pages) as address:
        writing = written(address, tokenizer)
    assert writing.differences == []
    assert writing.num_answers == 0
    assert writing.not_judged == {
        "text of /v1/completions": "a choice has another form: {'text': 5}",
        "text of /v1/chat/completions": "the answer has no choices: {'choices': []}",
    }
