"""Servers that show little, lie, or say something else: what is known is judged, and the rest is a clear error."""

import json
from contextlib import contextmanager

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from harness.errors import HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.chat.run import check_tokens
from harness.formats.checkpoint import Checkpoint
from harness.results.check import Outcome

from .....loopback import serving
from .test_faults import HF, as_hf

CHAT = "/v1/chat/completions"


@contextmanager
def stub(pages):
    """Serve functions from bodies to answers; bytes go out as they are, and half of what was promised if it is None."""

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        message = await receive()
        page = pages.get(scope["path"])
        answer = page(json.loads(message.get("body") or b"null")) if page else b"not here"
        content = (
            b'{"choices": [' if answer is None else answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        )
        length = len(content) + (100 if answer is None else 0)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200 if page else 404, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    with serving(app) as url:
        yield Address(url=url, retries=0, timeout_s=600)


def check(folder, pages, num=25):
    with stub(pages) as address:
        return check_tokens(Checkpoint(folder), address, model="m", num_conversations=num)


@pytest.fixture(scope="module")
def ids_of(chat_folder):
    hf = HF(chat_folder)
    return lambda body: hf([as_hf(message) for message in body["messages"]], body.get("tools"))


def usage(count):
    return {"choices": [{"message": {"content": ""}}], "usage": {"prompt_tokens": count}}


def test_a_number_of_tokens_proves_a_number(chat_folder, ids_of):
    result = check(chat_folder, {CHAT: lambda body: usage(len(ids_of(body)))})
    assert (result.outcome, result.evidence) == (Outcome.PASS, "usage.prompt_tokens")
    assert result.proves == "the number of tokens, not which they are"
    assert set(result.not_judged) == {
        "plain text", "end tokens", "text of /v1/completions", "text of /v1/chat/completions",
    }  # fmt: skip
    result = check(chat_folder, {CHAT: lambda body: usage(len(ids_of(body)) + 1)})
    assert result.differences[0].name == "BOS twice or EOS at the end"
    assert result.differences[0].actual_ids is None


def test_pages_that_tokenise_conversations(chat_folder, ids_of):
    hf = HF(chat_folder).tokenizer
    tokenize = {
        "/tokenize": lambda body: {"tokens": ids_of(body) if "messages" in body else hf(body["prompt"])["input_ids"]}
    }
    assert check(chat_folder, tokenize).evidence == "/tokenize"
    template = {"/apply-template": lambda body: {"prompt": hf.decode(ids_of(body)).removeprefix("<|begin|>")}}
    result = check(chat_folder, template)
    assert result.evidence == "/apply-template"
    assert result.differences


def test_prompt_logprobs_name_the_tokens(chat_folder, ids_of):
    def answer(body):
        if "prompt_logprobs" not in body:
            return usage(0)
        ids = ids_of(body)
        return {
            **usage(len(ids)),
            "prompt_logprobs": [None, *({str(token_id): {"logprob": -1.0}} for token_id in ids[1:])],
        }

    result = check(chat_folder, {CHAT: answer})
    assert (result.outcome, result.evidence) == (Outcome.PASS, "prompt_logprobs")


def test_counts_that_contradict_the_tokens(chat_folder, ids_of):
    result = check(chat_folder, {CHAT: lambda body: {**usage(3), "prompt_token_ids": ids_of(body)}}, num=3)
    (finding,) = result.findings
    assert finding.code == "H116"
    assert finding.message.startswith("usage counts 3 tokens of the prompt, the server shows ")


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (
            {"choices": [], "prompt_token_ids": ["x", {}]},
            "H115",
            "prompt_token_ids: the prompt's tokens are not tokens",
        ),
        ({"choices": [], "prompt_token_ids": [10**30]}, "H115", "are not tokens of the model"),
        ({"choices": {"a": 1}, "usage": [1]}, "H115", "usage.prompt_tokens: not in the answer"),
        ([], "H115", "the server shows nothing of what it makes of a conversation"),
        (b"<html>hello</html>", "H115", "the answer is no JSON: <html>hello</html>"),
        (None, "H114", "the connection ended in the middle of an answer"),
    ],
    ids=["strings", "huge", "other forms", "a list", "HTML", "a hang-up"],
)
def test_a_server_that_says_something_else(chat_folder, answer, code, says):
    with pytest.raises(HarnessError) as caught:
        check(chat_folder, {CHAT: lambda _body: answer})
    assert caught.value.code == code
    assert says in str(caught.value)
