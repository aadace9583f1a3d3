"""What SGLang's server returns for the text of a model with tool calls, at once and streamed. No harness here.

    pip download --no-deps sglang==0.5.23, unzip it; python sglang_cases.py FOLDER    # no GPU, no kernels, no model

The package itself is not imported, which needs kernels; its parsers are plain Python (orjson, partial-json-parser,
pydantic and openai must be there). `streamed` does what `_process_tool_call_stream` and
`_check_for_unstreamed_tool_args` of serving_chat.py do. A token of its own, such as <tool_call>, is never cut.
"""

import json
import logging
import re
import sys
import types

logging.disable(logging.CRITICAL)
for package in ("sglang", "sglang.srt"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [f"{sys.argv[1]}/{package.replace('.', '/')}"]
for package in ("IPython", "IPython.display"):
    sys.modules[package] = types.ModuleType(package)
sys.modules["IPython.display"].HTML = sys.modules["IPython.display"].display = None

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [Tool(type="function", function={"name": "weather", "description": "Do it.", "parameters": SCHEMA})]


def split(text):
    return re.findall("|".join(map(re.escape, MARKS)) + "|.", text, re.S)


def at_once(name, text):
    parser = FunctionCallParser(TOOLS, name)
    if not parser.has_tool_call(text):
        return shown(text, [])
    try:
        content, calls = parser.parse_non_stream(text)
    except Exception:
        return shown(text, [])
    return shown(content, [(call.name, call.parameters) for call in calls])


def streamed(name, text, size, first):
    parser, pieces = FunctionCallParser(TOOLS, name), split(text)
    ends = [0, *range(first, len(pieces), size), len(pieces)]
    pieces = ["".join(pieces[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
    content, calls = "", {}
    for more, parts in (*map(parser.parse_stream_chunk, pieces), parser.parse_stream_end()):
        content += more or ""
        for part in parts:
            call = calls.setdefault(part.tool_index, ["", ""])
            call[0] += part.name or ""
            call[1] += part.parameters or ""
    told, sent = parser.detector.prev_tool_call_arr, parser.detector.streamed_args_for_tool
    at = len(told) - 1
    if told and at < len(sent):
        whole = told[at].get("arguments", {})
        whole = whole if isinstance(whole, str) else json.dumps(whole, ensure_ascii=False)
        if whole.startswith(sent[at]):
            calls.setdefault(at, ["", ""])[1] += whole[len(sent[at]) :]
    return shown(content, calls.values())


def shown(content, calls):
    return json.dumps({"content": content or "", "calls": [list(call) for call in calls]}, ensure_ascii=False)


def case(what, name, text):
    print(f"\n{name}: {what}\n  text    {text!r}\n  at once {at_once(name, text)}")
    by_result = {}
    for size in (*range(1, 13), 999):
        for first in range(1, min(size, len(text)) + 1):
            by_result.setdefault(streamed(name, text, size, first), []).append((size, first))
    for result, cuts in by_result.items():
        sizes = sorted({size for size, _ in cuts})
        print(
            f"  {len(cuts)} cuts; in pieces of {','.join(map(str, sizes))}; one of {cuts[0][1]} first\n          {result}"
        )


def hermes(*arguments):
    calls = ('{"name": "weather", "arguments": ' + json.dumps(values) + "}" for values in arguments)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def mistral(*arguments):
    calls = ('{"name": "weather", "arguments": ' + json.dumps(values) + ', "id": "call00000"}' for values in arguments)
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


def qwen(name, value):
    return f"<tool_call>\n<function=weather>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


if __name__ == "__main__":
    for name in ("hermes", "qwen25"):
        case("no arguments", name, hermes({}))
        case("content before a call", name, "Let me see.\n" + hermes({"n": 1}))
        case("two calls", name, hermes({"n": 1}, {"n": 2}))
        case("a closing mark in a string", name, hermes({"text": "</tool_call>"}))
    case("no arguments", "llama3", '{"name": "weather", "parameters": {}}')
    case("an answer in JSON that is no call", "llama3", '{"a": 1}')
    case("content with braces", "llama3", "{{ 7 * 7 }}")
    case("no arguments", "mistral", mistral({}))
    case("two calls", "mistral", mistral({"n": 1}, {"n": 2}))
    case("content that ends in a bracket", "mistral", " [1]")
    case("a string NULL", "qwen3_coder", qwen("text", "NULL"))
    for mark in ("</parameter>", "</function>", "<parameter=n>"):
        case("a mark in a string", "qwen3_coder", qwen("text", mark))
