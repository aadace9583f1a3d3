"""onnxruntime-genai's own sampler behind HTTP, one request at a time, so that `harness server sampler --endpoint` can judge it.

    python -m onnxruntime_genai.models.builder -i FOLDER -o EXPORT -p fp32 -e cpu
    python reports/cpu/genai_server.py EXPORT PORT

The prompt is token ids. What a request says of the sampler goes to GenAI's search options as it is.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import onnxruntime_genai as og

model = og.Model(sys.argv[1])
tokenizer = og.Tokenizer(model)
OPTIONS = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float, "min_length": int}


def complete(asked):
    """Return a completion."""
    prompt, params = asked["prompt"], og.GeneratorParams(model)
    options = {name: kind(asked[name]) for name, kind in OPTIONS.items() if name in asked}
    options["do_sample"] = options.get("temperature", 1.0) > 0
    if not options["do_sample"]:
        del options["temperature"]
    if asked.get("seed") is not None:
        options["random_seed"] = asked["seed"]
    params.set_search_options(max_length=len(prompt) + asked.get("max_tokens", 16), **options)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    ids, rows = [], []
    while not generator.is_done():
        generator.generate_next_token()
        ids.append(int(generator.get_next_tokens()[0]))
    text = [tokenizer.decode([token_id]) for token_id in ids]
    choice = {"index": 0, "text": "".join(text), "finish_reason": "length", "token_ids": ids}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return {"id": "0", "object": "text_completion", "model": "genai", "choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    """Answers completions and the list of models."""

    def do_GET(self):
        """Return the list of models."""
        self.answer(200, {"object": "list", "data": [{"id": "genai", "object": "model"}]})

    def do_POST(self):
        """Return a completion, or why there is none."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        unknown = {"logprobs", "echo", "stop", "stream", "min_p", "typical_p", "presence_penalty", "frequency_penalty"}
        refused = [name for name in unknown if asked.get(name)] + [name for name in ("n", "logit_bias") if name in asked]
        if refused or not isinstance(asked.get("prompt"), list) or not self.path.endswith("/completions"):
            return self.answer(400, {"error": {"message": f"not offered: {', '.join(refused) or 'this prompt'}"}})
        try:
            return self.answer(200, complete(asked))
        except Exception as error:
            return self.answer(400, {"error": {"message": str(error)}})

    def answer(self, status, body):
        """Send a body."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args):
        """Say nothing."""


HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
