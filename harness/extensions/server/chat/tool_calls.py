"""The check of a parser: it reads what HF's template writes, at once and in pieces.

What a model writes is HF's rendering of an answer, from the generation prompt to the end of the turn.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.judge import DeadlineError, deadline
from harness.extensions.server.chat.conversations import Renderer
from harness.extensions.server.chat.reading import (
    FormError,
    Named,
    Reading,
    held_mark,
    name_difference,
    pieces_of,
    read_message,
    read_stream,
)
from harness.extensions.server.chat.result import FunctionDifference, FunctionResult
from harness.extensions.server.chat.search import find_smallest
from harness.extensions.server.chat.utterances import USER, Utterance, answers, hard_answers, marks_of, samples
from harness.extensions.server.truth import eos_ids
from harness.formats.checkpoint import Checkpoint

ParseFunction = Callable[[str, list[dict[str, Any]]], Any]
"""Takes the model's text and the tools, and returns a message in OpenAI's form, or a list of calls."""
StreamFunction = Callable[[Iterable[str], list[dict[str, Any]]], Iterable[Any]]
"""Takes the pieces of the text and the tools, and yields deltas in OpenAI's form, or None."""
_MOST_NAMES = 8
_HELD = ", where an argument holds "
_IN_PIECES = re.compile(", in a stream|, at a boundary of pieces")
_WHOLE = (0, 0)
_CUTS = ((1, 0), (3, 1), (7, 2))
"""Length of a piece, and where the first one ends."""
Cut = tuple[int, int] | None


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
        ends = [
            renderer.decode([token_id]) for token_id in eos_ids(checkpoint.folder, renderer.tokenizer.hf.eos_token_id)
        ]
        self._end = re.compile(rf"(?:{'|'.join(map(re.escape, ends))})\s*\Z") if ends else re.compile(r"\Z")
        self.parts, self.refused = self._look()
        self.marks = marks_of(self.text(samples()["a call"]) or "")
        added = renderer.tokenizer.hf.added_tokens_decoder.values()
        self.whole = sorted({str(token) for token in added}, key=len, reverse=True)
        """Added tokens: no piece of a stream has half of one."""

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
                first = self._writers.setdefault(repr((text, answer.tools)), answer)
                if first != answer:
                    self.ambiguous.setdefault(text, (first, answer))
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


class ParserCheck:
    """The check of one parser, at once and, with `stream`, in pieces. What it raises is a misreading."""

    def __init__(
        self, writer: Writer, parse: ParseFunction, stream: StreamFunction | None, limit_s: float, progress: Progress
    ) -> None:
        self._writer, self._parse, self._stream = writer, parse, stream
        self._limit_s, self._progress = limit_s, progress
        self._hangs = self._has_content = False
        self._readings: dict[tuple[str, Cut], Reading] = {}
        self._smallest: dict[str, tuple[Utterance, Cut]] = {}

    def result(self, model: str, num: int, seed: int) -> FunctionResult:
        """Run the check on `num` generated answers, and on one with each hard text; raises as `Writer.text`."""
        misreadings, not_judged = self._run(num, seed), dict(self._writer.refused)
        if self._stream is None:
            not_judged["streams"] = "no function for them was given"
        if not self._has_content:
            not_judged["content"] = "the parser returns calls alone"
        cuts = [cut for _, cut in self._readings]
        return FunctionResult(
            subject=getattr(self._parse, "__name__", type(self._parse).__name__),
            model=model,
            counts={"text": cuts.count(None), "stream": len(cuts) - cuts.count(None)},
            differences=misreadings,
            not_judged=not_judged,
            notes=tuple(_notes(self._writer)),
        )

    def _run(self, num: int, seed: int) -> list[FunctionDifference]:
        parts, marks = self._writer.parts, self._writer.marks
        cuts = st.none() if self._stream is None else st.none() | st.tuples(st.integers(0, 4), st.integers(0, 120))
        strategy, names = st.tuples(answers(parts, marks), cuts), Counter[str]()

        def look(example: tuple[Utterance, Cut]) -> bool:
            named = self._wrong(*example)
            if named is not None:
                names[named[0]] += 1
                self._smallest[named[0]] = min(self._smallest.get(named[0], example), example, key=self._size)
            self._progress("answers", len(self._readings), max(num, len(self._readings)))
            return False

        for answer in (*(samples()[part] for part in parts), *hard_answers(marks)):
            for cut in (None, *(_CUTS if self._stream else ())):
                look((answer, cut))
        find_smallest(strategy, look, num, seed)
        return [self._misreading(strategy, name, num, seed) for name in _chosen(names)]

    def _misreading(self, strategy: Any, name: str, num: int, seed: int) -> FunctionDifference:
        def shows(example: tuple[Utterance, Cut]) -> bool:
            return (self._wrong(*example) or ("",))[0] == name

        smallest = find_smallest(strategy, shows, num, seed) or self._smallest[name]
        answer, cut = min(smallest, self._smallest[name], key=self._size)
        text, named = self._writer.text(answer), self._wrong(answer, cut)
        assert text is not None
        assert named is not None
        is_sure = self._hangs or self._read(answer, text, cut, again=True) == self._readings[repr(answer), cut]
        pieces = None if cut is None else self._pieces(text, cut)
        shown = {
            "text": repr(text),
            "pieces": " · ".join(map(repr, pieces or ())),
            "written": named[1],
            "read": named[2],
        }
        return FunctionDifference(
            code=Code.TOOL_CALL_DIFFERS,
            name=name if is_sure else f"{name}, and not each time",
            shown={label: words for label, words in shown.items() if words},
            data={"message": answer.message, "tools": answer.tools, "text": text, "pieces": pieces},
        )

    def _size(self, example: tuple[Utterance, Cut]) -> tuple[int, int]:
        text = self._writer.text(example[0]) or ""
        return 0 if example[1] is None else len(self._pieces(text, example[1])), len(text)

    def _pieces(self, text: str, cut: tuple[int, int]) -> tuple[str, ...]:
        return pieces_of(text, *cut, self._writer.whole)

    def _wrong(self, answer: Utterance, cut: Cut) -> Named | None:
        """Return what is read otherwise than it was written, unless the template writes what was read alike."""
        text = self._writer.text(answer)
        reading = None if text is None else self._read(answer, text, cut)
        marks = self._writer.marks
        named = None if reading is None else name_difference(answer, reading, marks)
        if text is None or reading is None or named is None:
            return None
        content = answer.content if reading.content is None else reading.content
        read_again = Utterance(calls=reading.calls, content=content, tools=answer.tools)
        is_like = not reading.wrong and len(read_again.calls) == len(answer.calls) and read_again.fits()
        if is_like and not any(mark in content for mark in marks) and self._writer.text(read_again) == text:
            return None
        held, where = held_mark(answer, marks), ""
        if cut is not None:
            at_once, whole = (self._read(answer, text, item) for item in (None, _WHOLE))
            if at_once is None or whole is None or name_difference(answer, at_once, marks) == named:
                return None  # no mistake of the stream alone
            where = ", in a stream"
            if (name_difference(answer, whole, marks) or ("",))[0] != named[0]:
                named, where = name_difference(answer, reading, None) or named, ", at a boundary of pieces"
        return f"{named[0]}{where}{f'{_HELD}{held}' if held else ''}", *named[1:]

    def _read(self, answer: Utterance, text: str, cut: Cut, *, again: bool = False) -> Reading | None:
        """Return what the parser reads, asked once; None after it did not end."""
        key = repr(answer), cut
        if key in self._readings and not again:
            return self._readings[key]
        if self._hangs:
            return None
        tools = copy.deepcopy([dict(tool) for tool in answer.tools])
        try:
            with deadline(self._limit_s):
                if cut is None or self._stream is None:
                    reading = read_message(self._parse(text, tools))
                else:
                    reading = read_stream(self._stream(iter(self._pieces(text, cut)), tools))
        except FormError as error:
            reading = Reading(wrong=error.args[0], shown=repr(error.args[1])[:200])
        except DeadlineError:
            self._hangs = True
            reading = Reading(wrong=f"the parser does not end within {self._limit_s:g} s")
        except (Exception, SystemExit) as error:
            name = type(error).__name__
            reading = Reading(wrong=f"the parser raises {name}", shown=f"{name}: {error}"[:200])
        self._has_content = self._has_content or reading.content is not None
        return reading if again else self._readings.setdefault(key, reading)


def _chosen(names: Counter[str]) -> list[str]:
    """Return the most frequent names; with a mark in an argument one of each mark, at once and in pieces."""
    ordered = [name for name, _ in names.most_common()]
    plain = [name for name in ordered if _HELD not in name]
    held = [name for name in ordered if _HELD in name and name.partition(_HELD)[0] not in plain]
    first = {(name.partition(_HELD)[2], _IN_PIECES.search(name) is None): name for name in reversed(held)}
    return [*plain[:_MOST_NAMES], *(name for name in held if name in first.values())][:_MOST_NAMES]


def _notes(writer: Writer) -> Iterator[str]:
    """Yield what the template writes alike: one pair of each name."""
    seen = set()
    for text, pair in sorted(writer.ambiguous.items(), key=lambda item: len(repr(item[1]))):
        second, first = sorted(pair, key=lambda answer: len(repr(answer)))
        named = name_difference(first, Reading(second.calls, second.content), ())
        if named is not None and named[0] not in seen:
            seen.add(named[0])
            yield f"the template writes {named[1]} and {named[2]} alike ({named[0]}), as {text[:120]!r}"
