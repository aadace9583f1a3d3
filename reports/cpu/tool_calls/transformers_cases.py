"""What `transformers serve` returns for the text of a model with tool calls. No harness here.

python transformers_cases.py    # transformers 5.23, no model
"""

import json

from transformers.cli.serving import utils
from transformers.utils.chat_parsing import parse_response

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Do it.", "parameters": SCHEMA}}]


def case(what, kind, text):
    """Print what is read out of a text."""
    template = next(template for kinds, template in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if kind in kinds)
    print(f"\n{kind}: {what}\n  text  {text!r}")
    try:
        message = parse_response(text, template, prefix="<|im_start|>assistant\n", tools=TOOLS)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    print(f"  read  {message!r}")


def qwen(value):
    """Return a call as Qwen's template writes it."""
    return f"<tool_call>\n<function=weather>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"


if __name__ == "__main__":
    call = json.dumps({"name": "weather", "arguments": {"text": "</tool_call>"}})
    case("a closing mark in a string", "qwen2", f"<tool_call>\n{call}\n</tool_call>")
    case("whitespace around a string", "qwen3_5", qwen(" x "))
    case("a mark in a string", "qwen3_5", qwen("</parameter>"))
