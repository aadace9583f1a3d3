"""`--prompt-file FILE.json`: a conversation in the checkpoint's chat template, checked as the same tokens are."""

import json

import pytest

import harness as api
from harness.errors import Code

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }} | {% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hu rin"}, {"role": "assistant", "content": "pun"}]
TOOLS = [{"type": "function", "function": {"name": "shau", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def chatting(changed):
    return changed("qwen3-tiny", tokenizer_config={"chat_template": TEMPLATE})


@pytest.fixture
def chat(tmp_path):
    def write(content):
        path = tmp_path / "chat.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def tokens(harness, model, tmp_path, *options):
    out = tmp_path / f"golden-{len(list(tmp_path.iterdir()))}"
    ran = harness("golden", "--model", model, *options, "--max-new-tokens", "2", "--out", out)
    assert ran.status == 0, ran.err
    requests = json.loads((out / "manifest.json").read_text())["requests"]
    return [request["token_ids"][: request["prompt_length"]] for request in requests]


def test_the_prompt_is_what_the_template_makes(harness, chatting, chat, tmp_path):
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(chatting)("hu rin | pun | ", add_special_tokens=False)["input_ids"]
    (made,) = tokens(harness, chatting, tmp_path, "--prompt-file", chat(MESSAGES))
    assert made[-len(expected) :] == expected
    (with_tools,) = tokens(harness, chatting, tmp_path, "--prompt-file", chat({"messages": MESSAGES, "tools": TOOLS}))
    assert len(with_tools) > len(made)


def test_a_chat_is_checked(harness, chatting, chat):
    ran = harness(
        "check", "--model", chatting, "--prompt-file", chat(MESSAGES), "--max-new-tokens", "2", "--schedule", "plain"
    )
    assert ran.status == 0, ran.err
    assert ran.out.startswith("PASS")


def test_messages_from_python(chatting):
    report = api.check("reference", model=chatting, prompts=[MESSAGES], max_new_tokens=2, schedules=["plain"])
    assert report.is_ok


def test_a_checkpoint_without_a_template(harness, checkpoints, chat):
    ran = harness("check", "--model", checkpoints / "qwen3-tiny", "--prompt-file", chat(MESSAGES))
    assert (ran.status, ran.err[:4]) == (2, Code.NO_CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "the conversation is not valid JSON"),
        ("[]", "the file holds no conversation"),
        ('"hello"', "the file holds no conversation"),
        ({"messages": MESSAGES, "temperature": 1}, "temperature: not understood"),
        ({"tools": TOOLS}, "the file holds no conversation"),
        ([1, 2], "the file holds no conversation"),
    ],
)
def test_a_file_that_holds_no_chat(harness, chatting, chat, content, words):
    ran = harness("check", "--model", chatting, "--prompt-file", chat(content))
    assert (ran.status, ran.err[:4]) == (2, Code.BAD_OPTION)
    assert words in ran.err


def test_the_case_of_a_suffix_is_no_matter(harness, chatting, chat, tmp_path):
    upper = chat(MESSAGES).rename(tmp_path / "CHAT.JSON")
    assert tokens(harness, chatting, tmp_path, "--prompt-file", upper) == tokens(
        harness, chatting, tmp_path, "--prompt-file", chat(MESSAGES)
    )


def test_a_file_that_is_not_there(harness, chatting, tmp_path):
    ran = harness("check", "--model", chatting, "--prompt-file", tmp_path / "nowhere.json")
    assert (ran.status, ran.err[:4]) == (2, Code.BAD_OPTION)
    assert "the file cannot be read: No such file or directory" in ran.err
