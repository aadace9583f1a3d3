"""Each fault in the tokens of a conversation is found and named, at a short conversation; a sound server has none."""

import dataclasses

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.chat.report import tokens_text
from harness.extensions.server.chat.run import check_tokens, compare_renderings
from harness.formats.checkpoint import Checkpoint
from harness.report.document import document as result_document
from harness.results.check import Outcome
from reference_engine.errors import RequestError

from .faults import FAULTS


class HF:
    """HF's own rendering, as a fault gets it."""

    def __init__(self, folder):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, messages, tools, *, has_prompt=True):
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=has_prompt, return_dict=False
        )


@pytest.fixture(scope="module")
def hf(chat_folder):
    return HF(chat_folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_function_with_a_fault(chat_folder, hf, fault):
    result = compare_renderings(lambda messages, tools: fault.render(hf, messages, tools), chat_folder)
    names = [difference.name for difference in result.differences]
    assert names == [fault.name]
    assert len(result.differences[0].messages) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_server_with_a_fault(chat_folder, chat_server, hf, monkeypatch, fault):
    text, address = chat_server
    sound = text.encode_chat

    def encode_chat(messages, tools=None):
        read = [as_hf(message) for message in messages]
        try:
            return fault.render(hf, read, tools)
        except ValueError as error:
            raise RequestError(str(error), where="messages") from error

    monkeypatch.setattr(text, "encode_chat", encode_chat)
    result = check_tokens(Checkpoint(chat_folder), address, model="chat", num_conversations=60)
    assert sound is not text.encode_chat
    assert result.outcome is Outcome.MISMATCH
    assert [difference.name for difference in result.differences] == [fault.name]
    assert result.evidence == "prompt_token_ids"


def as_hf(message):
    import json

    calls = message.get("tool_calls")
    if not calls:
        return message
    read = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": read}


def test_a_sound_function_and_a_sound_server(chat_folder, chat_server, hf):
    function = compare_renderings(hf, chat_folder, seed=1)
    assert (function.outcome, function.differences, function.not_judged) == (Outcome.PASS, [], {})
    assert function.num_conversations >= 80
    result = check_tokens(Checkpoint(chat_folder), chat_server[1], model="chat", num_conversations=30)
    assert result.outcome is Outcome.PASS
    assert (result.num_ends, result.not_judged, result.findings) == (2, {}, [])
    assert result.num_texts >= 25
    assert any("writes the special token" in note for note in result.notes)


@pytest.mark.slow
def test_what_is_said_of_a_difference(chat_folder, chat_server, hf, monkeypatch):
    text, address = chat_server
    monkeypatch.setattr(
        text, "encode_chat", lambda messages, tools=None: hf([as_hf(message) for message in messages], None)
    )
    result = check_tokens(Checkpoint(chat_folder), address, model="chat", num_conversations=30)
    words = tokens_text(result, width=100)
    assert words.startswith(f"MISMATCH  reference_engine at {address.url} · chat · ")
    assert "  by          prompt_token_ids: the tokens that the chat was computed from\n" in words
    assert "  H212  tools dropped\n          user        ''\n          tool        {\"type\"" in words
    assert '        expected  \'<|begin|><|start|>tools\\n{"type": "function", "fu\'\n' in words
    assert (
        "        actual    '<|begin|><|start|>user\\n<|end|><|start|>assistant'\n        curl -s http://127.0.0.1:"
        in words
    )
    document = result_document(result)
    assert (document["verdict"], document["differences"][0]["name"]) == ("mismatch", "tools dropped")
    assert document["differences"][0]["body"]["messages"] == [{"role": "user", "content": ""}]
    assert dataclasses.asdict(result).keys() <= document.keys()


@pytest.mark.slow
def test_one_end_token_that_ends_nothing(chat_folder, chat_server, monkeypatch):
    from reference_engine.requests import stopping

    _, address = chat_server
    original = stopping.finish_reason
    monkeypatch.setattr(
        "reference_engine.engine.finish_reason",
        lambda sequence, ends, decode: original(sequence, frozenset(ends) - {259}, decode),
    )
    result = check_tokens(Checkpoint(chat_folder), address, model="chat", num_conversations=5)
    assert [finding.message for finding in result.findings] == [
        "token 259, an end of text by the model's configuration, does not end an answer"
    ]


@pytest.mark.slow
def test_another_tokenizer_behind_the_page(chat_folder, chat_server, monkeypatch):
    text, address = chat_server
    sound = text.encode
    monkeypatch.setattr(text, "encode", lambda text_of_page: sound(text_of_page.strip()))
    result = check_tokens(Checkpoint(chat_folder), address, model="chat", num_conversations=40)
    assert [difference.name for difference in result.differences] == [
        "plain text is tokenised otherwise",
        "the echo is not the prompt and its answer",
    ]
    assert result.differences[0].messages[0]["content"].strip() == ""
