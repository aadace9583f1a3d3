"""Templates that refuse, loop, grow, or reach for what they must not: a clear error, in bounded time."""

import re

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")

from harness.errors import HarnessError
from harness.extensions.server.chat.conversations import Conversation, Renderer, samples
from harness.formats.checkpoint import HFTokenizer

from .conftest import write_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
BAD = {
    "a loop": (LOOP, "it does not end within 0.5 s"),
    "recursion": (MACRO, "it refuses one message of a user: RecursionError"),
    "much text": ("{{ 'x' * 5000000 }}", "it makes more than 4,194,304 characters of one conversation"),
    "much memory": ("{% set x = 'x' * 10**11 %}{{ x | length }}", "it takes more than 2 GiB"),
    "a file": ("{% include '/etc/passwd' %}", "it refuses one message of a user: TypeError: no loader"),
    "the interpreter": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "it refuses one message of a user: Sec"),
    "syntax": ("{% for %}", "it refuses one message of a user: TemplateSyntaxError"),
    "a refusal": ("{{ raise_exception('not today') }}", "it refuses one message of a user: TemplateError: not today"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_template_is_an_error_that_says_so(tmp_path, monkeypatch, name):
    template, says = BAD[name]
    monkeypatch.setattr("harness.formats.checkpoint.template._MOST_S", 0.5)
    tokenizer = HFTokenizer.load(write_tokenizer(tmp_path, template))
    with pytest.raises(HarnessError, match=f"H213: the chat template cannot be used: {re.escape(says)}") as caught:
        Renderer(tokenizer)
    assert caught.value.exit_status == 2


def test_a_tokenizer_without_template(tmp_path):
    with pytest.raises(HarnessError, match="H080: the tokenizer has no chat template"):
        Renderer(HFTokenizer.load(write_tokenizer(tmp_path, None)))


def test_a_conversation_that_a_template_refuses_is_none(tmp_path):
    template = (
        "{% for own in messages %}{% if own.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}x"
    )
    renderer = Renderer(HFTokenizer.load(write_tokenizer(tmp_path, template)))
    assert [renderer.render(sample) is None for sample in samples().values()] == [True, *[False] * 5]
    assert renderer.refusal == "TemplateError: no"


def test_limits_are_taken_back(tmp_path):
    import resource
    import sys

    before = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    renderer = Renderer(HFTokenizer.load(write_tokenizer(tmp_path)))
    renderer.render(Conversation(messages=({"role": "user", "content": "x"},)))
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()) == before
