"""vLLM's server reads no call whose argument has the end mark of a call: two plain requests, no harness.

    python -m vllm.entrypoints.openai.api_server --model FOLDER --enable-auto-tool-choice --tool-call-parser hermes
    python reports/cpu/tool_calls/vllm_server_case.py http://127.0.0.1:8000 FOLDER

The model is made to write each text, so any model with a template of Hermes's kind will do (../server_model.py).
"""

import json
import sys
import urllib.request

URL, MODEL = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}

for city in ("Ulm", "</tool_call>"):
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
        "structured_outputs": {"choice": [f"<tool_call>\n{call}\n</tool_call>"]},
        "max_tokens": 200,
    }
    data = json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{URL}/v1/chat/completions", data, {"content-type": "application/json"})
    ) as answer:
        message = json.load(answer)["choices"][0]["message"]
    print(f"{city!r}: content {message['content']!r}, calls", [call["function"] for call in message.get("tool_calls") or []])
