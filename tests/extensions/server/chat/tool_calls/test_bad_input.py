"""Parsers that raise, hang or return something else, and templates that write no calls: clear words, bounded time."""

import re
import sys

import pytest

pytest.importorskip("hypothesis", reason="the extra `test` is not installed")

import harness
from harness.errors import HarnessError
from harness.report.document import document

from .conftest import TEMPLATES, write_family
from .parsers import PARSERS, call, hermes, message, streamed

NO_TOOLS = "{% for own in messages %}<|im_start|>{{ own.role }}\n{{ own.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def hang(text, tools):
    while True:
        pass


def swallow(text, tools):
    while True:
        try:
            hang(text, tools)
        except Exception:  # as careless parsers do
            continue


def refuse(text, tools):
    raise KeyError("arguments")


GARBAGE = {
    "None": (None, "the parser returns no message and no list of calls"),
    "text": ("x", "the parser returns no message and no list of calls"),
    "another mapping": ({"x": 1}, "the parser returns no message and no list of calls"),
    "content of numbers": ({"content": 3}, "the message has another form than OpenAI's"),
    "calls of text": ({"tool_calls": "x"}, "the message has another form than OpenAI's"),
    "a call of text": (["x"], "a call has no name or no arguments"),
    "no name": ([{"arguments": {}}], "a call has no name or no arguments"),
    "a list as arguments": ([{"name": "f", "arguments": "[1]"}], "the arguments of a call are no JSON object"),
    "no JSON": ([{"name": "f", "arguments": "{x}"}], "arguments are no JSON"),
    "deep": ([{"name": "f", "arguments": "[" * 99_999}], "the arguments of a call end too early"),
    "sets": ([{"name": "f", "arguments": {"x": {1}}}], "the arguments of a call are no JSON object"),
    "bytes": ([{"name": "f", "arguments": b"{}"}], "the arguments of a call are no JSON object"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_parser_that_returns_something_else(families, what):
    returned, name = GARBAGE[what]
    (first, *_) = harness.tool_calls(lambda *_: returned, model=families["hermes"], num_answers=1).differences
    assert first.name.startswith(name)


@pytest.mark.parametrize(
    ("delta", "name"),
    [
        (3, "a delta has another form than OpenAI's, in a stream"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "a call's delta has no index, in a stream"),
        (
            {"tool_calls": [{"index": 0, "function": {"arguments": {}}}]},
            "a piece of the arguments is no text, in a stream",
        ),
    ],
)
def test_a_stream_of_something_else(families, delta, name):
    result = harness.tool_calls(hermes, model=families["hermes"], stream=lambda pieces, tools: [delta], num_answers=1)
    assert [difference.name for difference in result.differences] == [name]


def test_a_parser_that_raises(families):
    result = harness.tool_calls(refuse, model=families["hermes"], num_answers=1)
    assert [difference.name for difference in result.differences] == ["the parser raises KeyError"]
    assert result.differences[0].shown["read"] == "KeyError: 'arguments'"
    assert [
        difference.name
        for difference in harness.tool_calls(lambda *_: sys.exit(), model=families["hermes"], num_answers=1).differences
    ] == ["the parser raises SystemExit"]


@pytest.mark.parametrize("parse", [hang, swallow])
def test_a_parser_that_hangs(families, parse):
    result = harness.tool_calls(parse, model=families["hermes"], num_answers=5, limit_s=0.2)
    assert [difference.name for difference in result.differences] == ["the parser does not end within 0.2 s"]
    assert result.counts["text"] == 1


def test_a_parser_that_keeps_state(families):
    seen = set()

    def parse(text, tools):
        is_again = text in seen
        seen.add(text)
        return hermes(text, tools) if is_again else message("", [])

    result = harness.tool_calls(parse, model=families["hermes"], num_answers=5)
    assert all(difference.name.endswith(", and not each time") for difference in result.differences)
    assert result.differences


def test_objects_of_pydantic_and_calls_alone(families):
    class Model:
        def __init__(self, **fields):
            self.fields = fields

        def model_dump(self):
            return self.fields

    def parse(text, tools):
        return [Model(function=Model(**call["function"])) for call in hermes(text, tools)["tool_calls"]]

    result = harness.tool_calls(parse, model=families["hermes"], num_answers=5)
    assert not result.differences
    assert result.not_judged == {
        "streams": "no function for them was given",
        "content": "the parser returns calls alone",
    }


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (f"{NO_TOOLS}{PROMPT}", "its text of a call has no name, or no arguments"),
        (NO_TOOLS.replace("{{ own.content }}", "{{ raise_exception('no') if own.tool_calls }}") + PROMPT,
         "the template refuses it: TemplateError: no"),
        (f"{NO_TOOLS}{{% if add_generation_prompt %}}<|im_start|>model{{% endif %}}",
         "the template refuses it: the generation prompt is no beginning of the rendered answer"),
    ],
    ids=["no tools", "a refusal", "another prompt"],
)  # fmt: skip
def test_a_template_that_writes_no_calls(tmp_path, template, says):
    folder = write_family(tmp_path, "hermes", template)
    with pytest.raises(
        HarnessError, match=re.escape(f"H255: the chat template writes no tool calls: {says}")
    ) as caught:
        harness.tool_calls(hermes, model=folder)
    assert caught.value.exit_status == 2


def test_a_template_that_loops_on_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.formats.checkpoint.template._MOST_S", 0.5)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = write_family(
        tmp_path, "hermes", f"{NO_TOOLS}{{% if messages[-1].tool_calls %}}{loop}{{% endif %}}{PROMPT}"
    )
    with pytest.raises(HarnessError, match=r"H213: the chat template cannot be used: it does not end within 0.5 s"):
        harness.tool_calls(hermes, model=folder)


def test_no_template_and_no_tokenizer(tmp_path):
    with pytest.raises(HarnessError, match="H080: the tokenizer has no chat template"):
        harness.tool_calls(hermes, model=write_family(tmp_path / "a", "hermes", ""))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HarnessError, match="H007: the checkpoint has no tokenizer"):
        harness.tool_calls(hermes, model=tmp_path)


def test_what_a_template_loses_is_said_of_the_template(tmp_path):
    text = (TEMPLATES / "hermes.jinja").read_text()
    dropped = text.replace("message.content %}", "message.content and not message.tool_calls %}")
    result = harness.tool_calls(hermes, model=write_family(tmp_path, "hermes", dropped), num_answers=5)
    assert not result.differences
    assert result.notes[0].startswith("the template writes 'y' and '' alike (the content is lost beside calls), as ")


def test_the_public_function(families):
    report = harness.tool_calls(PARSERS["llama"], model=families["llama"], num_answers=5)
    report.assert_ok()
    assert report
    assert document(report)["verdict"] == "pass"
    broken = harness.tool_calls(lambda text, tools: [call("weather", {})], model=families["llama"], num_answers=5)
    assert not broken
    with pytest.raises(AssertionError, match="H256  an argument is lost"):
        broken.assert_ok()


def test_the_report_at_the_shortest_text(families):
    def parse(text, tools):
        whole = hermes(text, tools)
        return {**whole, "tool_calls": whole["tool_calls"][:1]}

    def stream(pieces, tools):
        return streamed(hermes)((piece.lstrip() for piece in pieces), tools)

    report = harness.tool_calls(parse, model=families["hermes"], stream=stream, num_answers=1)
    text = str(report)
    assert text.splitlines()[0].startswith("MISMATCH  parse · ")
    assert "  H256  a call is missing\n        text      '<tool_call>\\n{" in text
    assert "        written   [{" in text
