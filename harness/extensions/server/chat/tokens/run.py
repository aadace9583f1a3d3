"""The jobs: the chats of a server, or of a function, against HF's."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.chat.tokens.conversations import Conversation
from harness.extensions.server.chat.tokens.facts import template_notes
from harness.extensions.server.chat.tokens.rendering import Renderer
from harness.extensions.server.chat.tokens.result import Difference, TokensResult
from harness.extensions.server.chat.tokens.search import ConversationSearch, find_smallest, texts
from harness.extensions.server.chat.tokens.seen import Seen, Sight, see, strongest
from harness.extensions.server.chat.tokens.written import Writing
from harness.extensions.server.endpoint.address import Address
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.dialect import COMPLETIONS
from harness.extensions.server.endpoint.parse import only_choice
from harness.extensions.server.endpoint.probe import probe_server
from harness.extensions.server.endpoint.probed import FATAL, words
from harness.extensions.server.endpoint.run import eos_ids
from harness.formats.checkpoint import Checkpoint
from harness.results.check import Finding

_USER = Conversation(messages=({"role": "user", "content": "x"},))
_BIAS = 100.0

RenderFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Sequence[int]]
"""Takes messages and tools, in HF's form, and returns token ids up to where the assistant's answer begins."""


def compare_renderings(
    render: RenderFunction,
    model: Checkpoint | str | os.PathLike[str],
    *,
    num_conversations: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokensResult:
    """Compare a function with HF's tokenizer and chat template.

    Whatever `render` raises is a refusal; `model` is a checkpoint, or its folder.

    Raises:
        HarnessError: NO_TOKENIZER, NO_CHAT_TEMPLATE, BAD_TEMPLATE.
    """
    checkpoint = Checkpoint.of(model)
    renderer = Renderer(checkpoint.tokenizer)

    def seen(conversation: Conversation) -> Seen:
        messages, tools = [dict(own) for own in conversation.messages], [dict(own) for own in conversation.tools]
        try:
            return Seen(token_ids=tuple(int(token_id) for token_id in render(messages, tools or None)))
        except Exception as error:
            return Seen(refusal=f"{type(error).__name__}: {error}"[:200])

    search = ConversationSearch(
        renderer=renderer, see=seen, num=num_conversations, seed=seed, progress=progress or no_progress
    )
    search.look()
    return TokensResult(
        subject=getattr(render, "__name__", "function"),
        server="",
        served_model="",
        model=str(checkpoint.folder),
        evidence="token ids",
        proves="the tokens that the function returns",
        features=[str(feature) for feature in search.features],
        differences=search.run(),
        num_conversations=search.num_compared,
        num_texts=0,
        num_ends=0,
        not_judged=search.not_judged,
        notes=tuple(template_notes(renderer)),
    )


def check_tokens(
    checkpoint: Checkpoint,
    address: Address,
    *,
    model: str,
    num_conversations: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokensResult:
    """Compare what a server makes of conversations with HF's tokenizer and chat template.

    `model` is what the checkpoint is called.

    Raises:
        HarnessError: NO_TOKENIZER, NO_CHAT_TEMPLATE, BAD_TEMPLATE; as `Client.post`; ENDPOINT_CANNOT: the server shows
            nothing of what it makes of a conversation.
    """
    renderer = Renderer(checkpoint.tokenizer)
    with asyncio.Runner() as runner:
        job = _Job(runner, checkpoint, address, renderer)
        return job.result(model, num_conversations, seed, progress or no_progress)


class _Job:
    """The check of one server, whose requests run on one event loop."""

    def __init__(self, runner: asyncio.Runner, checkpoint: Checkpoint, address: Address, renderer: Renderer) -> None:
        self._runner, self._checkpoint, self._renderer = runner, checkpoint, renderer
        self._client = Client(address)
        size = checkpoint.config.get("vocab_size")
        self._size = max(len(renderer.tokenizer.hf), size if isinstance(size, int) else 0)
        self._not_judged: dict[str, str] = {}

    def result(self, model: str, num: int, seed: int, progress: Progress) -> TokensResult:
        """Run the check."""
        run, client = self._runner.run, self._client
        run(client.__aenter__())
        try:
            progress("probe", 0, 1)
            probed = run(probe_server(client, model))
            sight = Sight(client, probed.dialect.model, self._has_token)
            way = run(strongest(sight, _USER))
            findings: list[Finding] = []

            def seen(conversation: Conversation) -> Seen:
                own = run(see(way, sight, conversation))
                findings.extend(_miscounted(own) if not findings else ())
                return own

            search = ConversationSearch(
                renderer=self._renderer, see=seen, num=num, seed=seed, body_of=sight.body, progress=progress
            )
            search.look()
            differences = search.run()
            num_texts, text_differences = self._texts(num, seed)
            num_ends, end_findings = self._ends(probed.dialect.model)
            progress("text", 0, 1)
            writing = Writing(client, probed.dialect.model, self._renderer.tokenizer.hf)
            run(writing.run())
            return TokensResult(
                subject=client.address.url,
                server=probed.server,
                served_model=probed.dialect.model,
                model=model,
                evidence=way.name,
                proves=way.proves,
                features=[str(feature) for feature in search.features],
                differences=[*differences, *text_differences, *writing.differences],
                num_conversations=search.num_compared,
                num_texts=num_texts,
                num_ends=num_ends,
                num_answers=writing.num_answers,
                not_judged=search.not_judged | self._not_judged | writing.not_judged,
                findings=[*findings, *end_findings],
                notes=tuple(template_notes(self._renderer)),
            )
        finally:
            run(client.__aexit__(None, None, None))

    def _has_token(self, token_id: object) -> bool:
        return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < self._size

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._runner.run(self._client.post(path, body))

    def _texts(self, num: int, seed: int) -> tuple[int, list[Difference]]:
        """Compare plain texts that the server tokenises, and puts together again."""
        try:
            self._tokens_of("x")
        except HarnessError as error:
            if error.code in FATAL:
                raise
            self._not_judged["plain text"] = words(error)
            return 0, []
        asked: dict[str, str | None] = {}

        def wrong(text: str) -> bool:
            if text not in asked:
                asked[text] = self._wrong_text(text)
            return asked[text] is not None

        smallest = find_smallest(texts(self._renderer.special), wrong, num, seed)
        if smallest is None:
            return len(asked), []
        hf = self._renderer.tokenizer.hf
        difference = Difference(
            name="plain text is tokenised otherwise",
            messages=({"role": "text", "content": smallest},),
            tools=(),
            expected=repr(hf(smallest)["input_ids"])[:200],
            actual=str(asked[smallest]),
            expected_ids=hf(smallest)["input_ids"],
            actual_ids=None,
        )
        return len(asked), [difference]

    def _tokens_of(self, text: str) -> list[int]:
        page = self._post("/tokenize", {"prompt": text, "content": text})
        tokens = page.get("tokens") if isinstance(page, dict) else None
        if not isinstance(tokens, list) or not all(self._has_token(token) for token in tokens):
            what = "the answer has no tokens of the model"
            raise HarnessError(Code.ENDPOINT_UNREADABLE, what, where="/tokenize", actual=repr(page)[:200])
        return tokens

    def _wrong_text(self, text: str) -> str | None:
        """Return the tokens that a text becomes if they are not HF's: with or without those that HF puts before."""
        hf, tokens = self._renderer.tokenizer.hf, self._tokens_of(text)
        expected = [list(hf(text, add_special_tokens=adds)["input_ids"]) for adds in (True, False)]
        return None if tokens in expected else repr(tokens)[:200]

    def _ends(self, model: str) -> tuple[int, list[Finding]]:
        """See whether each end token of the generation config ends an answer, by a bias that makes it certain."""
        prompt = self._renderer.render(_USER)
        assert prompt is not None
        ends = sorted(eos_ids(self._checkpoint.folder, self._checkpoint.config.get("eos_token_id")))
        plain = next(own for own in range(self._size) if own not in {*ends, *self._renderer.special})
        base = {"model": model, "prompt": list(prompt.token_ids), "max_tokens": 3, "temperature": 0}
        reasons = {}
        try:
            for token_id in (plain, *ends):
                body = base | {"logit_bias": {str(token_id): _BIAS}}
                reasons[token_id] = only_choice(self._post(COMPLETIONS, body), where=COMPLETIONS).get("finish_reason")
            unbiased = only_choice(self._post(COMPLETIONS, base), where=COMPLETIONS)
            biased = only_choice(self._post(COMPLETIONS, base | {"logit_bias": {str(plain): _BIAS}}), where=COMPLETIONS)
        except HarnessError as error:
            if error.code in FATAL:
                raise
            self._not_judged["end tokens"] = words(error)
            return 0, []
        if not ends or unbiased.get("text") == biased.get("text") or reasons[plain] != "length":
            self._not_judged["end tokens"] = "no logit_bias makes a token certain" if ends else "the model names none"
            return 0, []
        return len(ends), list(_unending(ends, reasons))


def _miscounted(seen: Seen) -> Iterator[Finding]:
    if seen.token_ids is not None and seen.count not in (None, len(seen.token_ids)):
        message = f"usage counts {seen.count} tokens of the prompt, the server shows {len(seen.token_ids)}"
        yield Finding(code=Code.ENDPOINT_TOKENS, message=message)


def _unending(ends: Sequence[int], reasons: Mapping[int, Any]) -> Iterator[Finding]:
    for token_id in ends:
        if reasons[token_id] != "stop":
            message = f"token {token_id}, an end of text by the model's configuration, does not end an answer"
            yield Finding(code=Code.ENDPOINT_TOKENS, message=message)
