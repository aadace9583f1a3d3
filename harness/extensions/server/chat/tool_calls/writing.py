"""The text that a model writes for an answer: HF's rendering from the generation prompt to the end of the turn."""

import re

from harness.errors import Code, HarnessError
from harness.extensions.server.chat.tokens.rendering import Renderer
from harness.extensions.server.chat.tool_calls.answers import USER, Utterance, marks_of, samples
from harness.extensions.server.endpoint.run import eos_ids
from harness.formats.checkpoint import Checkpoint


class Writer:
    """A template as the model's hand.

    Raises:
        HarnessError: NO_TOOL_TEMPLATE: no call can be written; as `Renderer`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._renderer = renderer = Renderer(checkpoint.tokenizer)
        self._texts: dict[str, str | None] = {}
        self._writers: dict[str, Utterance] = {}
        self.ambiguous: dict[str, tuple[Utterance, Utterance]] = {}
        """Texts that the template makes of two answers."""
        ends = [renderer.decode([own]) for own in eos_ids(checkpoint.folder, renderer.tokenizer.hf.eos_token_id)]
        self._end = re.compile(rf"(?:{'|'.join(map(re.escape, ends))})\s*\Z") if ends else re.compile(r"\Z")
        self.parts, self.refused = self._look()
        self.marks = marks_of(self.text(samples()["a call"]) or "")
        added = renderer.tokenizer.hf.added_tokens_decoder.values()
        self.whole = sorted({str(own) for own in added}, key=len, reverse=True)
        """Tokens of their own, which no piece of a stream can hold half of."""

    def _look(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the parts of answers that the template takes, and why it does not take the others."""
        refused = {}
        for part, sample in samples().items():
            if self.text(sample) is None:
                refused[part] = f"the template refuses it: {self._renderer.refusal}"
        call = samples()["a call"]
        text = self.text(call)
        if text is None or call.calls[0].name not in text or "Oslo" not in text:
            self._refuse(refused.get("a call", "its text of a call has no name, or no arguments"))
        return tuple(part for part in samples() if part not in refused), refused

    def _refuse(self, why: str) -> None:
        raise HarnessError(
            Code.NO_TOOL_TEMPLATE,
            f"the chat template writes no tool calls: {why}",
            where=self._renderer.tokenizer.folder,
            expected="a template that writes the `tool_calls` of an assistant's message behind the generation prompt",
            hint="give the folder of a model that was trained to call tools, with its own template",
        )

    def text(self, answer: Utterance) -> str | None:
        """Return what the model writes; None if the template refuses it, or the generation prompt is another beginning.

        Raises:
            HarnessError: BAD_TEMPLATE, as `Renderer.render`.
        """
        key = repr(answer)
        if key not in self._texts:
            text = self._texts[key] = self._written(answer)
            if text is not None:
                other = self._writers.setdefault(repr((text, answer.tools)), answer)
                if other != answer:
                    self.ambiguous.setdefault(text, (other, answer))
        return self._texts[key]

    def _written(self, answer: Utterance) -> str | None:
        prompt = self._renderer.render(answer.conversation.changed(USER))
        whole = self._renderer.render(answer.conversation, has_prompt=False)
        if prompt is None or whole is None:
            return None
        if not whole.text.startswith(prompt.text):
            self._renderer.refusal = "the generation prompt is no beginning of the rendered answer"
            return None
        return self._end.sub("", whole.text[len(prompt.text) :])
