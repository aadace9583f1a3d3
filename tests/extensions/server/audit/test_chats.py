"""Chat templates as hypotheses of an audit: a server that renders chats by another one is told from the sound one."""

import pytest
import torch

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from transformers import LlamaConfig, LlamaForCausalLM

from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.audit.run import run_audit
from harness.plan import plan_engine
from harness.results.check import Outcome

from ..chat.tokens.conftest import TEMPLATE, write_tokenizer
from ..served import serve

UNPROMPTED = TEMPLATE.replace("{%- if add_generation_prompt %}", "{%- if false %}")
ALPACA = "{% for each in messages %}### {{ each.role }}: {{ each.content }}\n{% endfor %}### assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that is sure of some tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chats"))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=256, eos_token_id=258, initializer_range=0.25,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, template in (("unprompted", UNPROMPTED), ("other", ALPACA)):
        (folder / f"{name}.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """The text part of a server, which tests break, and its URL."""
    with serve(folder, model="chat") as server:
        yield server.text, server.url


def audited(folder, url, *names, tokens=100):
    plan = plan_engine(model=str(folder), dtype="float32")
    parts = [name and f"+template={folder / name}.jinja" for name in names]
    result = run_audit(plan, Address(url=url, timeout_s=600), [f"fp32{part}" for part in parts], num_tokens=tokens)
    claim = (
        None
        if result.claim is None
        else names[[hypothesis.name for hypothesis in result.hypotheses].index(result.claim)]
    )
    return result, claim


def test_the_sound_server_is_claimed_to_use_the_own_template(folder, server):
    result, claim = audited(folder, server[1], "", "other", "unprompted")
    assert (result.outcome, claim, result.notes) == (Outcome.PASS, "", ()), result


@pytest.mark.parametrize("name", ["other", "unprompted"])
def test_another_template_is_claimed(folder, server, monkeypatch, name):
    text, url = server
    template = (folder / f"{name}.jinja").read_text()
    monkeypatch.setattr(text._chat_tokenizer, "chat_template", template)
    result, claim = audited(folder, url, "", "other", "unprompted")
    assert (result.outcome, claim) == (Outcome.MISMATCH, name), result


def test_drawn_tokens_alone_tell_two_templates(folder, server, monkeypatch):
    monkeypatch.setattr("reference_engine.server.chat._logprobs", lambda *_: None)
    result, claim = audited(folder, server[1], "other", "", tokens=400)
    assert (result.outcome, claim, result.num_logprobs) == (Outcome.MISMATCH, "", 0), result
    assert result.hypotheses[0].excluded_after is not None


def test_none_of_the_templates_is_claimed_where_a_third_one_is_used(folder, server, monkeypatch):
    text, url = server
    monkeypatch.setattr(text._chat_tokenizer, "chat_template", ALPACA)
    result, claim = audited(folder, url, "", "unprompted")
    assert (claim, any(hypothesis.fits for hypothesis in result.hypotheses)) == (None, False), result


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (None, Code.BAD_OPTION),
        ("{% for each in messages %}", Code.BAD_TEMPLATE),
        ("{{ raise_exception('no') if messages[0].content | length > 1 else 'x' }}", Code.BAD_TEMPLATE),
    ],
)
def test_a_template_that_cannot_be_used(folder, server, tmp_path, template, code):
    file = tmp_path / "bad.jinja"
    if template is not None:
        file.write_text(template)
    plan = plan_engine(model=str(folder), dtype="float32")
    with pytest.raises(HarnessError) as caught:
        run_audit(plan, Address(url=server[1]), ["fp32", f"fp32+template={file}"], num_tokens=20)
    assert caught.value.code is code
