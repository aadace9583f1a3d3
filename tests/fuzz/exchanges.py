"""Damaged bodies for `reference-engine serve`, damaged answers for the check of a server: neither ends its reader."""

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from harness.base.files import parse_json
from harness.errors import HarnessError
from harness.extensions.server.check.judge import JudgedCompletion, Promised, judge
from harness.extensions.server.check.requests import Sent, walk_of
from harness.extensions.server.completion import Completion, join_events, read_answer
from harness.extensions.server.names import TokenNames
from harness.extensions.server.truth import TruthRow
from harness.formats.checkpoint import Checkpoint
from harness.oracle.requests import Prompt
from reference_engine import EngineConfig, LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.connections import ImpatientProtocol
from reference_engine.server.text import Text

from ..loopback import serving
from .fuzzer import Handled
from .mutate import Mutation, damaged, damaged_json

FOLDER = Path(__file__).parents[2] / "cases" / "checkpoints" / "qwen3-tiny"
PROMPT, NEW, VOCABULARY = [1, 64, 155, 143, 3, 64], [5, 9, 7], 256
_MUTATIONS: Sequence[Mutation] = (damaged, damaged_json, damaged_json, damaged_json)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": PROMPT, "max_tokens": 2, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1,
        "n": 2, "logprobs": 2, "repetition_penalty": 1.1, "stop": ["zz"], "stop_token_ids": [7], "ignore_eos": True,
        "stream": False, "echo": False, "return_token_ids": True, "model": "tiny", "user": "x",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hu"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2,
    },
    "/tokenize": {"prompt": "hu rin"},
    "/detokenize": {"tokens": PROMPT},
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One kind of message that crosses a network."""

    name: str
    handle: Callable[[bytes, Random], tuple[str, list[str]]]
    """Gives a damaged message to its reader; returns how that ended, and what must not have happened."""
    template: dict[str, Any]
    seconds: float = 0.02

    def fuzz(self, seed: int) -> Handled:
        """Damage the message, give it to its reader, and look at what came of it."""
        random = Random(f"{self.name} {seed}")
        content = random.choice(_MUTATIONS)(json.dumps(self.template).encode(), random)
        try:
            ending, violations = self.handle(content, random)
        except Exception:
            ending, violations = "raised", [traceback.format_exc()[-600:]]
        return Handled(ending=ending, violations=[f"{self.name}, seed {seed}: {what}" for what in violations])


@contextmanager
def exchanges() -> Iterator[list[Exchange]]:
    """Yield all kinds of messages, while a server runs on the loopback address."""
    config = EngineConfig(dtype="float32", max_num_seqs=16, enable_prefix_caching=True)
    with LLMEngine(FOLDER, config) as engine:
        app = build_app(engine, Text(FOLDER), model="tiny")
        with serving(app, http=ImpatientProtocol) as url, httpx.Client(base_url=url, timeout=30) as client:
            poster = _Poster(client)
            bodies = [
                Exchange(name=f"body of {path}", handle=poster.to(path), template=body) for path, body in BODIES.items()
            ]
            yield [*bodies, *_answers()]


@dataclass(slots=True)
class _Poster:
    client: httpx.Client

    def to(self, path: str) -> Callable[[bytes, Random], tuple[str, list[str]]]:
        """Return what posts a body to a page, and then looks whether the server is well."""

        def post(content: bytes, _random: Random) -> tuple[str, list[str]]:
            answer = self.client.post(path, content=content, headers={"content-type": "application/json"})
            wrong = [f"status {answer.status_code}: {answer.text[:300]}"] if answer.status_code >= 500 else []
            health = self.client.get("/health")
            wrong += [] if health.status_code == 200 else [f"the server is dead: {health.text}"]
            return str(answer.status_code), wrong

        return post


def _answers() -> list[Exchange]:
    named = {
        "token_ids": NEW,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in NEW],
            "token_logprobs": [-0.1, -0.2, -0.3],
            "top_logprobs": [{f"token_id:{token}": -0.1, "token_id:11": -3.0} for token in NEW],
        },
    }
    chat = [
        {"token": "a", "id": token, "logprob": -0.1, "top_logprobs": [{"id": token, "token": "a", "logprob": -0.1}]}
        for token in NEW
    ]
    forms: dict[str, dict[str, Any]] = {
        "named": named,
        "chat": {"logprobs": {"content": chat}, "token_ids": NEW},
        "prompt": {**named, "prompt_logprobs": [None, *({str(token): {"logprob": -0.5}} for token in PROMPT[1:])]},
    }
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(NEW)}
    names = TokenNames(Checkpoint(FOLDER), vocab_size=VOCABULARY)
    exchanges = []
    for name, form in forms.items():
        body = {"choices": [{"text": "a b c", "finish_reason": "length", **form}], "usage": usage}
        exchanges.append(Exchange(name=f"answer, {name}", handle=_Judge(names).whole, template=body, seconds=0.002))
        events = {"events": [body, {"choices": [], "usage": usage}]}
        exchanges.append(
            Exchange(name=f"stream, {name}", handle=_Judge(names).streamed, template=events, seconds=0.002)
        )
    return exchanges


@dataclass(slots=True)
class _Judge:
    """Reads and judges an answer, against a truth that is drawn: what the numbers are does not matter."""

    names: TokenNames
    eos: frozenset[int] = field(default=frozenset([2]))

    def whole(self, content: bytes, random: Random) -> tuple[str, list[str]]:
        return self._ending(lambda: parse_json(content.decode("utf-8", errors="replace")), random)

    def streamed(self, content: bytes, random: Random) -> tuple[str, list[str]]:
        def events() -> Any:
            document = parse_json(content.decode("utf-8", errors="replace"))
            parts = document.get("events") if isinstance(document, dict) else None
            return join_events(parts if isinstance(parts, list) else [document])

        return self._ending(events, random)

    def _ending(self, body: Callable[[], Any], random: Random) -> tuple[str, list[str]]:
        try:
            answer = read_answer(body(), PROMPT, self.names, where="here")
        except HarnessError as error:
            return error.code.value, []
        except ValueError as error:
            return ("no JSON", []) if "parse_json" in traceback.format_exc() else ("raised", [repr(error)])
        findings = judge([self._case(answer, random)]).findings
        for finding in findings:
            finding.message.encode()
        return f"{len(findings) > 0:d}", []

    def _case(self, answer: Completion, random: Random) -> JudgedCompletion:
        prompt = Prompt(token_ids=tuple(PROMPT), max_new_tokens=len(NEW))
        sent = Sent(request=0, prompt=prompt.token_ids, max_tokens=len(NEW), result=answer)
        walk = walk_of(prompt, [sent], eos=self.eos, num_top=2)
        assert walk is not None
        assert all(0 <= token < VOCABULARY for tokens in walk.wanted.values() for token in tokens)
        rows = {}
        for position, wanted in walk.wanted.items():
            logprobs = {token: -random.random() - 0.01 for token in {*wanted, 11, 12, 13}}
            top = tuple(sorted(logprobs, key=lambda token: -logprobs[token]))[:3]
            rows[position] = TruthRow(top=top, logprobs=logprobs, control=logprobs, logit_noise=1e-5, resolution=1e-7)
        return JudgedCompletion(
            request=0, prompt=prompt.token_ids, answer=answer, rows=rows, walked=answer.token_ids,
            asked_tokens=len(NEW), eos=self.eos,
            promised=Promised(
                has_logprobs=True, num_top=2, has_prompt=False, counts_prompt=True, is_named_alone=lambda _token: True
            ),
        )  # fmt: skip
