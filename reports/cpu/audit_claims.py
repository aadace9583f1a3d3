"""How often `harness server audit` claims what is served, nothing, or something else.

    python reports/cpu/audit_claims.py [--tokens 600] [--audits 20] [--dtype bfloat16] [--only NAME] [--without-logprobs]

Serves each of several truths with the reference engine on the loopback address, asks it once for all tokens, and cuts
the requests into audits. Each is judged with the truth among the hypotheses, and without it.
"""

import argparse
import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvicorn
from safetensors.torch import load_file, save_file

from harness.extensions.server.address import Address
from harness.extensions.server.audit import run as audit
from harness.extensions.server.audit.evidence import View
from harness.extensions.server.audit.hypotheses import load_hypothesis, parse_hypotheses
from harness.extensions.server.sampler.requests import TOKENS, SamplerSetting, ask_draws
from harness.oracle.sampling import SamplingSettings
from harness.plan import plan_engine
from reference_engine import EngineConfig, LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text

FOLDER = Path(__file__).parents[2] / "cases" / "checkpoints" / "qwen3-tiny"
SETTINGS = {"temperature": 0.6, "top_p": 0.8, "top_k": 3}


@contextmanager
def served(folder, dtype, cache=None, **changes):
    """Serve a checkpoint, with what its cache makes of keys and values; requests get other parameters of the sampler than they ask for."""
    from reference_engine import model_runner, sampler
    from reference_engine.kv_cache import KVCache

    original, store = sampler.sample, KVCache.store

    def coarse_store(self, layer, k, v, slots):
        store(self, layer, cache(k), cache(v), slots)

    def sample(logits, sequences):
        return original(logits, [replace(sequence, params=replace(sequence.params, **changes)) for sequence in sequences])

    model_runner.sample = sample if changes else original
    KVCache.store = store if cache is None else coarse_store
    config = EngineConfig(dtype=dtype, max_num_seqs=64, enable_prefix_caching=True)
    with LLMEngine(folder, config) as engine:
        listener = socket.create_server(("127.0.0.1", 0))
        app = build_app(engine, Text(folder), model="tiny")
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Address(url=f"http://127.0.0.1:{listener.getsockname()[1]}", concurrency=32, timeout_s=600)
        finally:
            server.should_exit = True
            thread.join()
            model_runner.sample, KVCache.store = original, store


def written(name, plan, scratch):
    """Write the checkpoint that a hypothesis's weights are, in float32."""
    (hypothesis,) = parse_hypotheses([name, "fp32" if name != "fp32" else "bf16"], SamplingSettings())[:1]
    hf = load_hypothesis(hypothesis, plan, scratch, vocab_size=None)
    out = scratch / f"served-{name}"
    shutil.copytree(FOLDER, out)
    values = {key: value.float().contiguous().clone() for key, value in hf.model.state_dict().items()}
    for file in out.glob("*.safetensors"):
        save_file({key: values[key] for key in load_file(file)}, file, metadata={"format": "pt"})
    return out


def sliced(view, rows):
    """Return a view of some draws alone, numbered again."""
    part = View(view.settings, len(rows), every=view.every)
    part.most, part.log_p, part.noise = view.most[rows], view.log_p[rows], view.noise[rows]
    part.tempered = view.tempered[:, rows]
    part.whole = {at: view.whole[row] for at, row in enumerate(rows) if row in view.whole}
    for name, values in view.readings.items():
        kept = part.readings.setdefault(name, type(values)())
        kept.exact = {at: values.exact[row] for at, row in enumerate(rows)}
        kept.rounded = {at: values.rounded[row] for at, row in enumerate(rows)}
    return part


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--audits", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--without-logprobs", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan = plan_engine(model=str(FOLDER), dtype=options.dtype)
    base = {"float32": "fp32", "bfloat16": "bf16"}[options.dtype]
    rival = "bf16" if base == "fp32" else "fp32"
    # In bfloat16 the edge of a set of tokens is within rounding, so that top-p and top-k are told in float32 alone.
    settings = [f"{base}+{name}={value}" for name, value in SETTINGS.items() if base == "fp32" or name == "temperature"]
    names = [base, rival, "fp8", "q8", "q4", f"{base}+kv=fp8", *settings]
    totals = {"with": [0, 0, 0], "without": [0, 0, 0]}
    for truth in options.only or [base, "fp8", "q8", "q4", *names[5:], f"{base}+kv=fp8_e5m2", "q5_1"]:
        with TemporaryDirectory() as scratch:
            counts = campaign(truth, names, plan, options, Path(scratch))
        print(json.dumps({"served": truth, "dtype": options.dtype, "logprobs": not options.without_logprobs} | counts), flush=True)
        for kind, (right, none, wrong) in totals.items():
            count = counts[kind]
            totals[kind] = [right + count["right"], none + count["none"], wrong + sum(count["wrong"].values())]
    print(json.dumps({kind: dict(zip(("right", "none", "wrong"), shares)) for kind, shares in totals.items()}))


def campaign(truth, names, plan, options, scratch):
    """Serve one truth, and count the claims of all audits."""
    weights, *parts = truth.split("+")
    (hypothesis,) = parse_hypotheses([truth, "any"], SamplingSettings())[:1]
    changes = {name: getattr(hypothesis.settings, name) for part in parts if (name := part.split("=")[0]) in SETTINGS}
    folder = FOLDER if weights in ("fp32", "bf16") else written(weights, plan, scratch)
    setting, num_draws = SamplerSetting(name="audit", settings=SamplingSettings()), options.tokens * options.audits
    with served(folder, options.dtype, hypothesis.cache, **changes) as address:
        answers = ask_draws(
            plan, address, [setting], num_draws, seed=options.seed, num_again=0, progress=lambda *_: None
        )
    hf = answers.hf
    draws, failed = audit._draws(answers)
    assert not failed
    values = [{} if options.without_logprobs else audit._logprobs(answers, *draw) for draw in draws.values()]
    hypotheses = parse_hypotheses(names, SamplingSettings())
    every = max(1, ceil(len(draws) / 3000))
    views = audit._views(plan, hypotheses, {None: draws}, values, vocab_size=hf.vocab_size, every=every, progress=lambda *_: None)
    counts = {kind: {"right": 0, "none": 0, "wrong": {}} for kind in ("with", "without")}
    needed = []
    per_audit = options.tokens // TOKENS
    for number in range(options.audits):
        rows = [at for at, (request, _) in enumerate(draws.values()) if request.number // per_audit == number]
        places = list(draws)
        table = audit._table({places[row]: None for row in rows}, [values[row] for row in rows])
        for kind in counts:
            if kind == "without" or truth in names:
                kept = [at for at, name in enumerate(names) if kind == "with" or name != truth]
                own_views = [sliced(views[at], rows) for at in kept]
                judged = audit._Judged(hypotheses=[hypotheses[at] for at in kept], views=own_views, logprobs=table)
                results = list(judged.results())
                result = audit.AuditResult(
                    url="", server="", served_model="", model="", dtype="", num_tokens=0, num_requests=0, num_logprobs=0,
                    false_claim=audit.FALSE_CLAIM, hypotheses=tuple(results),
                )
                claim = result.claim
                count = counts[kind]
                if claim is None:
                    count["none"] += 1
                    count["left"] = count.get("left", {})
                    words = "+".join(result.remaining) or "(all excluded)"
                    count["left"][words] = count["left"].get(words, 0) + 1
                elif claim == truth:
                    count["right"] += 1
                else:
                    count["wrong"][claim] = count["wrong"].get(claim, 0) + 1
                if kind == "with" and truth in names:
                    at = names.index(truth)
                    needed.append([results[at].needed, {result.name: result.excluded_after for result in results}])
    if needed:
        counts["needed"] = {name: needed[0][0][name] for name in needed[0][0]}
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
