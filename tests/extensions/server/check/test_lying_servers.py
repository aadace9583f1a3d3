"""Servers that lie in one way each, in front of a sound engine: no lie passes, and a finding says what was seen."""

import json
import math
import random

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.address import Address
from harness.extensions.server.check.report import endpoint_json, endpoint_text
from harness.extensions.server.check.run import check_endpoint
from harness.results.check import Outcome

from .conftest import PROMPTS, VICTIM, asked_otherwise, changed, changed_events, reply

ANSWER, STREAMED, PROMPT, AGAIN = "each answer", "streams", "the prompt's log probabilities", "from the second on"
PLAIN, SECOND = "answers without log probabilities", "the second of two answers"


def chosen(change):
    """Change each log probability of the new tokens themselves."""

    def lie(choice):
        values = choice["logprobs"]["token_logprobs"]
        values[:] = [change(value, at) for at, value in enumerate(values)]

    return lie


def top(change):
    """Change the mapping of the likeliest tokens, at each new token."""

    def lie(choice):
        values = choice["logprobs"]["top_logprobs"]
        values[:] = [change(dict(item)) for item in values]

    return lie


def every(change):
    """Change each log probability, those of the likeliest tokens too."""

    def lie(choice):
        chosen(lambda value, _at: change(value))(choice)
        top(lambda likeliest: {name: change(value) for name, value in likeliest.items()})(choice)

    return lie


def field(name, value):
    return lambda choice: choice.update({name: value(choice) if callable(value) else value})


def of_logprobs(name, change):
    return lambda choice: choice["logprobs"].update({name: change(choice["logprobs"][name])})


def renormalised(likeliest):
    """The log probabilities of a distribution that top-k has cut."""
    whole = math.log(sum(math.exp(value) for value in likeliest.values()))
    return {name: value - whole for name, value in likeliest.items()}


def permuted(likeliest):
    return dict(zip(likeliest, [*list(likeliest.values())[1:], next(iter(likeliest.values()))], strict=True))


def without_second(likeliest):
    return dict([*list(likeliest.items())[:1], *list(likeliest.items())[2:], ("token_id:7", -9.0)])


def first(number):
    return lambda values: values[:number]


def noisy(scale):
    draw = random.Random(0)
    return lambda value: min(0.0, value + draw.gauss(0, scale))


def prompt_only(change):
    """Change the log probabilities of the prompt, all but the first, which has none."""

    def lie(choice):
        values = choice["logprobs"]["token_logprobs"]
        values[1:-1] = [change(value, at) for at, value in enumerate(values[1:-1])]
        choice["logprobs"]["top_logprobs"][1:-1] = [{}] * len(values[1:-1])

    return lie


def usage(name, more):
    return lambda choice: choice["usage"].update({name: choice["usage"][name] + more})


def shifted(values):
    return [*values[1:], values[0]]


NONE = -9999.0
LIES = {
    # of the log probabilities of the new tokens
    "-9999": (ANSWER, chosen(lambda _v, _at: NONE), "-9999.0, which stands for none; HF's is"),
    "-9999 once": (ANSWER, chosen(lambda v, at: NONE if at == 3 else v), "-9999.0, which stands for none"),
    "-9999 of all": (ANSWER, every(lambda _v: NONE), "-9999.0, which stands for none"),
    "-Infinity": (ANSWER, chosen(lambda _v, _at: -math.inf), "-inf, which stands for none"),
    "-Infinity once": (ANSWER, chosen(lambda v, at: -math.inf if at == 7 else v), "-inf, which stands for none"),
    "the lowest float32": (ANSWER, every(lambda _v: -3.4028234663852886e38), "which stands for none"),
    "Infinity": (ANSWER, chosen(lambda _v, _at: math.inf), "is inf"),
    "NaN": (ANSWER, every(lambda _v: math.nan), "is nan"),
    "NaN once": (ANSWER, chosen(lambda v, at: math.nan if at == 5 else v), "is nan"),
    "null": (ANSWER, chosen(lambda _v, _at: None), "is null, HF's is"),
    "null once": (ANSWER, chosen(lambda v, at: None if at == 7 else v), "is null, HF's is"),
    "null of all": (ANSWER, every(lambda _v: None), "is null, HF's is"),
    "words": (ANSWER, chosen(lambda _v, _at: "-0.5"), "is null, HF's is"),
    "true": (ANSWER, chosen(lambda _v, _at: True), "is null, HF's is"),
    "a mapping": (ANSWER, chosen(lambda v, _at: {"logprob": v}), "is null, HF's is"),
    "too large an integer": (ANSWER, chosen(lambda _v, _at: 10**400), "is 1e+300"),
    "positive": (ANSWER, every(lambda v: -v), "the log probability of token"),
    "all 0": (ANSWER, every(lambda _v: 0.0), "are off"),
    "constant": (ANSWER, chosen(lambda _v, _at: -0.5), "of the chosen tokens are off"),
    "constant of all": (ANSWER, every(lambda _v: -1.0), "are off"),
    "rounded to one decimal": (ANSWER, every(lambda v: round(v, 1)), "of the chosen tokens are off"),
    "rounded to three decimals": (ANSWER, every(lambda v: round(v, 3)), "are off"),
    "base 2": (ANSWER, every(lambda v: v / math.log(2)), "are off"),
    "base 10": (ANSWER, every(lambda v: v / math.log(10)), "are off"),
    "probabilities": (ANSWER, every(math.exp), "the log probability of token"),
    "of another temperature": (ANSWER, every(lambda v: 0.5 * v), "are off"),
    "1 % larger": (ANSWER, every(lambda v: 1.01 * v), "are off"),
    "with noise": (ANSWER, every(noisy(1e-3)), "are off"),
    "shifted by one token": (ANSWER, of_logprobs("token_logprobs", shifted), "of the chosen tokens are off"),
    "the likeliest shifted": (ANSWER, of_logprobs("top_logprobs", shifted), "are off"),
    "all shifted": (ANSWER, lambda choice: [of_logprobs(name, shifted)(choice) for name in choice["logprobs"]],
                    "are of"),
    "of a truncated distribution": (ANSWER, top(renormalised), "of the likeliest tokens are off"),
    "swapped": (ANSWER, top(permuted), "of the likeliest tokens are off"),
    "without the second": (ANSWER, top(without_second), "is not among the 5 likeliest ones"),
    "of the two likeliest": (ANSWER, top(lambda named: dict(list(named.items())[:2])), "2 of the 5 likeliest tokens"),
    "of no likeliest": (ANSWER, of_logprobs("top_logprobs", lambda values: [{} for _ in values]), "none of the 5"),
    "no likeliest": (ANSWER, of_logprobs("top_logprobs", lambda _logprobs: None), "none of the 5 likeliest tokens"),
    "the likeliest without numbers": (ANSWER, top(dict.fromkeys), "is null, HF's is"),
    "of fewer tokens": (ANSWER, lambda choice: [of_logprobs(name, first(5))(choice) for name in choice["logprobs"]],
                        "5 of 8 log probabilities of the new tokens are there"),
    "fewer of their own": (ANSWER, of_logprobs("token_logprobs", first(5)), "is null, HF's is"),
    "none": (ANSWER, field("logprobs", None), "none of 8 log probabilities of the new tokens are there"),
    "an empty mapping": (ANSWER, field("logprobs", {}), "none of 8 log probabilities"),
    "empty lists": (ANSWER, field("logprobs", {"tokens": [], "token_logprobs": [], "top_logprobs": []}),
                    "none of 8 log probabilities"),
    "no field": (ANSWER, lambda choice: choice.pop("logprobs"), "none of 8 log probabilities"),
    "of other tokens": (ANSWER, of_logprobs("tokens", lambda names: ["token_id:9"] * len(names)), "are of 9"),
    # only in some answers
    "none in streams": (STREAMED, lambda choice: choice.pop("logprobs", None), "none of 8 log probabilities"),
    "null in streams": (STREAMED, lambda choice: choice["logprobs"] and chosen(lambda _v, _at: None)(choice),
                        "is null"),
    "fewer in streams": (STREAMED, lambda choice: choice["token_ids"] == [] or choice.pop("logprobs")
                         if random.random() < 0.5 else choice.update(logprobs=None), "log probabilities"),
    "none from the second on": (AGAIN, field("logprobs", None), "none of"),
    "constant from the second on": (AGAIN, every(lambda _v: -1.0), "are off"),
    "other tokens from the second on": (AGAIN, field("token_ids", lambda choice: choice["token_ids"][::-1]),
                                        "expected"),
    # of the prompt
    "none of the prompt": (PROMPT, field("logprobs", None), "of the prompt's tokens are there"),
    "-9999 of the prompt": (PROMPT, prompt_only(lambda _v, _at: NONE), "-9999.0, which stands for none"),
    "null of the prompt": (PROMPT, prompt_only(lambda _v, _at: None), "is null, HF's is"),
    "constant of the prompt": (PROMPT, prompt_only(lambda _v, _at: -1.0), "of the prompt are off"),
    "of another prompt": (PROMPT, of_logprobs("tokens", lambda names: [names[0], "token_id:9", *names[2:]]),
                          "the echo of the prompt has other tokens"),
    # of what clients ask for
    "garbage without log probabilities": (PLAIN, field("text", "garbage"), "the text is another one than in the first"),
    "a second answer of other tokens": (SECOND, field("token_ids", [1, 2, 3, 4, 5, 6, 7, 8]), "expected"),
    # of tokens, counts and ends
    "another text beside the tokens": (ANSWER, field("text", "garbage"), "the text is 'garbage', and its tokens are"),
    "tokens of another prompt": (ANSWER, field("token_ids", [1, 2, 3, 4, 5, 6, 7, 8]), "expected"),
    "tokens in another order": (ANSWER, field("token_ids", lambda choice: choice["token_ids"][::-1]), "expected"),
    "an end that is none": (ANSWER, lambda choice: [field("token_ids", choice["token_ids"][:2])(choice),
                                                  field("finish_reason", "stop")(choice)],
                            "stops after 2 tokens, where the model does not end"),
    "an unknown end": (ANSWER, field("finish_reason", ["length"]), "finish_reason \"['length']\""),
    "no end": (ANSWER, field("finish_reason", None), "finish_reason None"),
    "a negative token": (ANSWER, field("token_ids", [-1] * 8), "a token that the model does not have"),
    "a token outside of the vocabulary": (ANSWER, field("token_ids", [10**9] * 8), "does not have: 1000000000"),
    "truth for a token": (ANSWER, field("token_ids", [True] * 8), "a token that the model does not have: True"),
    "no token": (ANSWER, field("token_ids", [None] * 8), "a token that the model does not have: None"),
    "more new tokens counted": (ANSWER, usage("completion_tokens", 1), "usage counts 9 new tokens, the answer has 8"),
    "fewer new tokens counted": (ANSWER, usage("completion_tokens", -3), "usage counts 5 new tokens"),
    "more tokens of the prompt counted": (ANSWER, usage("prompt_tokens", 5), "usage counts 13 tokens of the prompt, 8"),
}  # fmt: skip


class Liar:
    """Lies to the requests that a kind of lie is about."""

    def __init__(self, kind, lie):
        self.kind, self.lie, self.num_seen, self.num_told = kind, lie, 0, 0

    async def __call__(self, app, scope, receive, send, body):
        is_echo = bool(body.get("echo"))
        self.num_seen += not is_echo and not body.get("stream") and body["prompt"] == VICTIM
        is_meant = {
            ANSWER: not is_echo and not body.get("stream"),
            STREAMED: bool(body.get("stream")),
            PROMPT: is_echo,
            AGAIN: self.num_seen > 1 and not is_echo and not body.get("stream"),
            PLAIN: "logprobs" not in body and not body.get("stream"),
            SECOND: body.get("n") == 2,
        }[self.kind]
        if not is_meant:
            await app(scope, receive, send)
        elif body.get("stream"):
            await changed_events(self._tell_of_an_event)(app, scope, receive, send, body)
        else:
            await changed(self._tell)(app, scope, receive, send, body)

    def _tell(self, answer):
        choice = answer["choices"][-1]
        choice["usage"] = answer["usage"]
        self.lie(choice)
        answer["usage"] = choice.pop("usage")
        self.num_told += 1

    async def _tell_of_an_event(self, choice, _number):
        self.lie(choice)
        self.num_told += 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(LIES))
def test_a_lie_is_a_finding_that_says_what_was_seen(plan, server, name):
    app, url = server
    kind, lie, says = LIES[name]
    app.spoil = liar = Liar(kind, lie)
    result = check_endpoint(plan, Address(url=url, retries=0), num_again=0 if kind is ANSWER else 4)
    findings = [finding for run in result.runs for finding in run.findings]
    assert liar.num_told
    assert result.outcome is Outcome.MISMATCH
    assert any(says in finding.message for finding in findings), findings
    assert {finding.request for finding in findings} == {2}


# Cached answers, and parameters that are taken and not followed


def test_a_cached_answer_of_another_request_is_found(plan, server):
    app, url = server
    kept = []

    async def answer_as_before(inner, scope, receive, send, body):
        if body["max_tokens"] != 8 or body.get("stream") or body.get("echo"):
            await inner(scope, receive, send)
        elif kept:
            await reply(send, kept[0])
        else:
            await changed(lambda answer: kept.append(json.dumps(answer).encode()))(inner, scope, receive, send, body)

    app.spoil, app.spoils_all = answer_as_before, True
    result = check_endpoint(plan, Address(url=url), num_again=0)
    assert result.outcome is Outcome.MISMATCH
    assert any("expected" in finding.message for finding in result.runs[0].findings)


def forgets(*names):
    """Leave fields out of the request: the server takes and ignores them."""
    return lambda body: {name: value for name, value in body.items() if name not in names}


IGNORED = {
    "top_k": (forgets("top_k"), "with 1 at temperature 100 the answer is not the likeliest"),
    "top_p": (forgets("top_p"), "with 1e-06 at temperature 100 the answer is not the likeliest"),
    "min_p": (forgets("min_p"), "with 1 at temperature 100 the answer is not the likeliest"),
    "seed": (forgets("seed"), "one seed draws twice differently"),
    "temperature": (lambda body: body | {"temperature": 0}, "100 changes nothing"),
    "stop": (forgets("stop"), "the answer goes on after"),
    "repetition_penalty": (forgets("repetition_penalty"), "100 changes nothing"),
    "ignore_eos": (forgets("ignore_eos"), "an answer ends at an end of text"),
    "logprobs count": (lambda body: body | ({"logprobs": 1} if "logprobs" in body else {}), "5 asked for, 1 given"),
    "return_token_ids": (forgets("return_token_ids"), "the answer is as without it"),
    "return_tokens_as_token_ids": (forgets("return_tokens_as_token_ids"), "the answer is as without it"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(IGNORED))
def test_a_parameter_that_is_ignored_is_listed_as_ignored(plan, server, name):
    app, url = server
    change, says = IGNORED[name]
    app.spoil, app.spoils_all = asked_otherwise(change), True
    result = check_endpoint(plan, Address(url=url), num_again=0)
    ignored = {capability.name: capability.detail for capability in result.capabilities if capability.is_ignored}
    assert ignored.keys() == {name}
    assert says in ignored[name]
    assert name not in {capability.name for capability in result.capabilities if capability.is_there}
    assert f"ignored     {name} (" in endpoint_text(result, width=200)
    (listed,) = [capability for capability in endpoint_json(result)["capabilities"] if capability["is_ignored"]]
    assert listed["name"] == name
    assert plan.prompts[0].token_ids == tuple(PROMPTS[0])
