"""Sound parsers of four formats, to break: at once, and fed with pieces."""

import ast
import json
import re

DECODER = json.JSONDecoder(strict=False)
VALUE = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n(?=<parameter=|</function>\n</tool_call>)", re.S)
CALL = re.compile(r"\n?<tool_call>\n<function=([^>\n]+)>\n")
END = "</function>\n</tool_call>"


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def message(content, calls):
    return {"role": "assistant", "content": content, "tool_calls": [call(*named) for named in calls]}


def hermes(text, tools):
    content, calls, at = text, [], text.find("<tool_call>")
    if at >= 0:
        content = text[:at]
    while at >= 0:
        written, end = DECODER.raw_decode(text, at + len("<tool_call>\n"))
        calls.append((written["name"], written["arguments"]))
        at = text.find("<tool_call>", end)
    return message(content, calls)


def llama(text, tools):
    try:
        written = json.loads(text, strict=False)
        calls = [(written["name"], written["parameters"])]
    except (ValueError, KeyError, TypeError):
        return message(text, [])
    return message("", calls)


def mistral(text, tools):
    content, mark, rest = text.partition("[TOOL_CALLS]")
    calls = json.loads(rest, strict=False) if mark else []
    return message(content, [(written["name"], written["arguments"]) for written in calls])


def qwen3_coder(text, tools):
    first = text.find("<tool_call>")
    calls, at = [], first
    while at >= 0:
        begin = CALL.match(text, at)
        at = begin.end()
        arguments = {}
        while match := VALUE.match(text, at):
            arguments[match[1]] = typed(match[2], schema(tools, begin[1], match[1]))
            at = match.end()
        at += len(END)
        calls.append((begin[1], arguments))
        at = at + 1 if text[at : at + 1] == "\n" else -1
    return message(text if first < 0 else text[:first], calls)


def schema(tools, name, argument):
    function = next(tool["function"] for tool in tools if tool["function"]["name"] == name)
    kinds = function["parameters"]["properties"][argument]["type"]
    return [kinds] if isinstance(kinds, str) else kinds


def typed(text, kinds):
    if "string" in kinds:
        return text
    if kinds[0] in ("array", "object"):
        return json.loads(text, strict=False)
    return ast.literal_eval(text)


PARSERS = {"hermes": hermes, "llama": llama, "mistral": mistral, "qwen3_coder": qwen3_coder}


def streamed(parse):
    """Return a parser that is fed with pieces: what may belong to a call comes at the end."""

    def stream(pieces, tools):
        text, sent = "", 0
        for piece in pieces:
            text += piece
            if (parse is hermes or parse is qwen3_coder) and "<" not in text:
                yield {"content": text[sent:]}
                sent = len(text)
        whole = parse(text, tools)
        yield {"content": whole["content"][sent:]}
        for at, call_ in enumerate(whole["tool_calls"]):
            yield {"tool_calls": [{"index": at, "id": "x", "function": {"name": call_["function"]["name"]}}]}
            arguments = call_["function"]["arguments"]
            for begin in range(0, len(arguments), 5):
                yield {"tool_calls": [{"index": at, "function": {"arguments": arguments[begin : begin + 5]}}]}

    return stream
