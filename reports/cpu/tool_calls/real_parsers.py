"""Hold parsers of vLLM, SGLang and transformers to the templates of tests/extensions/server/chat/tool_calls.

python real_parsers.py vllm hermes:hermes mistral:mistral
python real_parsers.py sglang=FOLDER/OF/AN/UNPACKED/WHEEL qwen25:hermes
python real_parsers.py hf qwen2:hermes
"""

import json
import logging
import sys
import types
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
logging.disable(logging.CRITICAL)

import harness
from tests.extensions.server.chat.tool_calls.conftest import write_family


def vllm(name, folder):
    """Return what vLLM's server does with the text of a model, without and with `stream`."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)

    def opened(tools):
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
        parser = kind(tokenizer, request.tools, chat_template_kwargs={"enable_thinking": False})
        return parser, parser.adjust_request(request)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def parse(text, tools):
        parser, request = opened(tools)
        _, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids(text))
        return {"content": content, "tool_calls": calls}

    def stream(pieces, tools):
        parser, request = opened(tools)
        for piece in pieces:
            yield parser.parse_delta(piece, ids(piece), request, [1], finished=False)
        yield parser.parse_delta("", [tokenizer.eos_token_id], request, [1], finished=True)

    return parse, stream


def sglang(name, folder, *, source):
    """Return what SGLang's server does; its package is not imported, whose kernels are not there."""
    for package in ("sglang", "sglang.srt"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [f"{source}/{package.replace('.', '/')}"]
    for package in ("IPython", "IPython.display"):
        sys.modules[package] = types.ModuleType(package)
    sys.modules["IPython.display"].HTML = sys.modules["IPython.display"].display = None
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def opened(tools):
        return FunctionCallParser([Tool(**tool) for tool in tools], name)

    def delta(text, calls):
        deltas = [
            {"index": call.tool_index, "function": {"name": call.name, "arguments": call.parameters}} for call in calls
        ]
        return {"content": text, "tool_calls": deltas}

    def parse(text, tools):  # as _process_tool_calls of serving_chat.py
        parser = opened(tools)
        if not parser.has_tool_call(text):
            return {"content": text}
        try:
            content, calls = parser.parse_non_stream(text)
        except Exception:
            return {"content": text}
        return {"content": content, "tool_calls": [{"name": call.name, "arguments": call.parameters} for call in calls]}

    def stream(pieces, tools):  # as _process_tool_call_stream and _check_for_unstreamed_tool_args
        parser = opened(tools)
        for piece in pieces:
            yield delta(*parser.parse_stream_chunk(piece))
        yield delta(*parser.parse_stream_end())
        told, sent = parser.detector.prev_tool_call_arr, parser.detector.streamed_args_for_tool
        at = len(told) - 1
        if told and at < len(sent):
            arguments = told[at].get("arguments", {})
            whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            if whole.startswith(sent[at]) and whole != sent[at]:
                yield {"tool_calls": [{"index": at, "function": {"arguments": whole[len(sent[at]) :]}}]}

    return parse, stream


def hf(name, folder):
    """Return what `transformers serve` does with the response template that it has for a type of model."""
    from transformers import AutoTokenizer
    from transformers.cli.serving import utils
    from transformers.utils.chat_parsing import ResponseParser

    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = next(template for names, template in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if name in names)
    prefix = "<|im_start|>assistant\n"

    def parse(text, tools):  # as parse_assistant_message
        message = tokenizer.parse_response(text, template, prefix=prefix, tools=tools)
        calls = [vars(utils._normalize_tool_call(call)) for call in message.get("tool_calls") or []]
        return {"content": message.get("content", ""), "tool_calls": calls}

    def stream(pieces, tools):  # as the handlers of chats
        parser, at = ResponseParser(template, prefix=prefix, tools=tools), 0
        for events in (*map(parser.feed, pieces), None):
            for chunk in utils.response_events_to_chunks(parser.finalize()[1] if events is None else events):
                if isinstance(chunk, str):
                    yield {"content": chunk}
                elif isinstance(chunk, utils.ToolCall):
                    yield {"tool_calls": [{"index": at, "function": vars(chunk)}]}
                    at += 1

    return parse, stream


if __name__ == "__main__":
    library, *pairs = sys.argv[1:]
    library, _, source = library.partition("=")
    for name, family in (pair.split(":") for pair in pairs):
        folder = write_family(Path(mkdtemp()) / family, family)
        more = {"source": source} if source else {}
        parse, stream = {"vllm": vllm, "sglang": sglang, "hf": hf}[library](name, folder, **more)
        report = harness.tool_calls(parse, model=folder, stream=stream)
        print(f"===== {library} {name}\n{report}", flush=True)
