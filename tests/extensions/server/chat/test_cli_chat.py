"""`harness server chat`: options, exit statuses and the forms of the report."""

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from .tokens.conftest import chat_folder, chat_server

__all__ = ["chat_folder", "chat_server"]


def test_a_sound_server_and_one_that_drops_the_tools(harness, chat_folder, chat_server, monkeypatch):
    text, address = chat_server
    options = ["--endpoint", address.url, "--model", chat_folder, "--conversations", 20]
    ran = harness("server", "chat", *options)
    assert (ran.status, ran.err) == (0, ""), ran.out
    assert ran.out.startswith(f"PASS  reference_engine at {address.url} · ")
    sound = text.encode_chat
    monkeypatch.setattr(text, "encode_chat", lambda messages, tools=None: sound(messages))
    ran = harness("server", "chat", *options, "--format", "json")
    assert (ran.status, ran.json["verdict"]) == (1, "mismatch")
    assert [difference["name"] for difference in ran.json["differences"]] == ["tools dropped"]
    assert ran.json["proves"] == "the tokens that the chat was computed from"


def test_a_model_without_template_and_a_server_that_is_not_there(harness, chat_folder):
    ran = harness("server", "chat", "--endpoint", "http://127.0.0.1:9", "--model", "qwen3-tiny")
    assert ran.status == 2
    assert "H080: the tokenizer has no chat template" in ran.err
    ran = harness("server", "chat", "--endpoint", "http://127.0.0.1:9", "--model", chat_folder, "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H110")
