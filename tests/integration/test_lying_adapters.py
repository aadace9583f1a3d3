"""Adapters that lie, in as many ways as we know: none of them gets a pass that was not earned."""

import shutil

import pytest

from .commands import ENGINE

RUN = "self.inner.run(workload, Between(writer))"
INNER = "self.inner, self.capabilities = inner, inner.capabilities"
WITH = "self.inner, self.capabilities = inner, replace(inner.capabilities, {fields})"
EMBEDDING = "'model.embed_tokens'"
ONE_PRODUCT = "'model.layers.0.self_attn.q_proj'"


def declares(fields: str, does: str = RUN) -> str:
    source = "from dataclasses import replace\n" + ENGINE.replace(INNER, WITH.format(fields=fields))
    return source.replace(RUN, does)


def keeps_only(*taps: str) -> str:
    """Return an engine that declares all but these taps unsupported, and records these alone."""
    method = (
        f"\n\n    def tap(self, name, tensor):\n        name in ({', '.join(taps)},) and self.writer.tap(name, tensor)"
    )
    source = declares("unsupported_taps=UNSUPPORTED", RUN)
    source = source.replace("return getattr(self.writer, name)", f"return getattr(self.writer, name){method}")
    kept = "{" + ", ".join(taps) + "}"
    match = f"""
    def match_taps(self, graph):
        taps = tuple(op.tap for op in graph if op.tap not in {kept})
        self.capabilities = replace(self.capabilities, unsupported_taps=taps)
"""
    return source.replace("unsupported_taps=UNSUPPORTED", "unsupported_taps=()").replace(
        "    def run(self", match + "\n    def run(self"
    )


def alters(expression: str, condition: str = "True") -> str:
    """Return an engine whose recorded tensors are altered where a condition on `name` holds."""
    method = (
        f"\n\n    def tap(self, name, tensor):\n        self.writer.tap(name, {expression} if {condition} else tensor)"
    )
    return ENGINE.replace("return getattr(self.writer, name)", f"return getattr(self.writer, name){method}")


def between(signature: str, does: str) -> str:
    """Return an engine between which and the recording stands another method."""
    method = f"\n\n    {signature}\n        {does}"
    return ENGINE.replace("return getattr(self.writer, name)", f"return getattr(self.writer, name){method}")


def begins(change: str) -> str:
    """Return an engine that says something else of each step's rows."""
    return between("def begin_step(self, **given):", f"{change}\n        self.writer.begin_step(**given)")


O_PROJ = "'o_proj' in name"
OTHER_TOKENS = """other = [
            each.model_copy(update={"token_ids": [t % 40 + 3 for t in each.token_ids]}) for each in workload.requests
        ]
        self.inner.run(replace(workload, requests=other), Between(writer))"""
GARBAGE_FIRST = """class Garbage(Between):
            def tap(self, name, tensor):
                self.writer.tap(name, tensor * 0 if "o_proj" in name else tensor)
        self.inner.run(workload, Garbage(writer))
        self.inner.run(workload, Between(writer))"""
GARBAGE_LAST = GARBAGE_FIRST.rpartition("\n")[0].replace(
    "self.inner.run(workload, Garbage(writer))",
    "self.inner.run(workload, Between(writer)); self.inner.run(workload, Garbage(writer))",
)
OVERWRITES = """self.inner.run(workload, Between(writer))
        import pathlib
        step = sorted(pathlib.Path(writer.path).glob("step-*"))[0]
        step.write_bytes(step.read_bytes()[:-8] + b"\\0" * 8)"""
OWN_MANIFEST = """import pathlib
        (pathlib.Path(writer.path) / "manifest.json").write_text('{"schema_version": 2, "steps": []}')"""
SUBCLASS = """
from harness.engines import Capabilities
class Nothing(Capabilities):
    def wanted(self, graph):
        return []
    def all_unsupported_taps(self):
        return ()
"""

LIES = {
    "records nothing": (ENGINE.replace(RUN, "pass"), 1, "MISMATCH"),
    "declares all but the embedding": (keeps_only(EMBEDDING), 5, "NOTHING"),
    "declares all but one product": (keeps_only(ONE_PRODUCT), 5, "NOTHING"),
    "declares everything": (keeps_only("'nothing'"), 5, "NOTHING"),
    "expects nothing of itself": (
        SUBCLASS + keeps_only(EMBEDDING).replace("inner.capabilities,", "Nothing(schedules=('plain',)),"), 5, "NOTHING"
    ),
    "declares a string": (declares("sampled_only='model.layers.0.mlp.act'"), 2, ""),
    "records zeros": (alters("tensor * 0"), 1, "MISMATCH"),
    "records NaN": (alters("tensor * float('nan')", "'o_proj' in name"), 1, "MISMATCH"),
    "records infinity": (alters("tensor + float('inf')", "'lm_head' in name"), 1, "MISMATCH"),
    "records rows of others": (alters("tensor.flip(0)", "'mlp' in name"), 1, "MISMATCH"),
    "records no logits": (alters("tensor[:0]", "'lm_head' in name"), (1, 2), ""),
    "runs other tokens": ("from dataclasses import replace\n" + ENGINE.replace(RUN, OTHER_TOKENS), 1, ""),
    "records garbage and then the truth": (ENGINE.replace(RUN, GARBAGE_FIRST), 1, "MISMATCH"),
    "runs one request of two": (
        declares("keeps_cache=True", "self.inner.run(replace(workload, requests=workload.requests[:1]), writer)"), 1, ""
    ),
    "reads back no cache": (
        ENGINE.replace(RUN, "phase = writer.begin_step\n        " + RUN).replace(
            "return getattr(self.writer, name)",
            "return getattr(self.writer, name)\n\n    def tap(self, name, tensor):\n"
            "        '_cache' in name or self.writer.tap(name, tensor)",
        ), 1, "MISMATCH",
    ),
    "overwrites what was recorded": (ENGINE.replace(RUN, OVERWRITES), (1, 2), ""),
    "writes a manifest": (ENGINE.replace(RUN, OWN_MANIFEST), 1, "MISMATCH"),
    "raises what nobody catches": (ENGINE.replace(RUN, "raise type('Odd', (BaseException,), {})('x')"), 2, ""),
    "raises SystemExit": (ENGINE.replace(RUN, RUN + "; raise SystemExit(0)"), 2, ""),
    "raises KeyboardInterrupt": (ENGINE.replace(RUN, "raise KeyboardInterrupt"), 130, ""),
    "closes the recording early": (ENGINE.replace(RUN, "writer.close()"), 1, ""),
    "chooses no tokens": (between("def end_step(self, sampled=()):", "self.writer.end_step(())"), (1, 2), ""),
    "chooses other tokens": (
        between("def end_step(self, sampled=()):", "self.writer.end_step([7] * len(sampled))"), (1, 2), ""
    ),
    "shifts the positions": (begins("given['position'] = [each + 1 for each in given['position']]"), (1, 2), ""),
    "exchanges the requests": (begins("given['request'] = [1 - each for each in given['request']]"), (1, 2), ""),
    "says the rows of a step backwards": (begins("given['position'] = given['position'][::-1]"), (1, 2), ""),
    "records each tap twice": (
        between("def tap(self, name, tensor):", "[self.writer.tap(name, tensor) for _ in range(2)]"), (1, 2), ""
    ),
    "records one layer of two": (
        between("def tap(self, name, tensor):", "'layers.1.' in name or self.writer.tap(name, tensor)"), 1, "MISMATCH"
    ),
    "records the truth and then garbage": (ENGINE.replace(RUN, GARBAGE_LAST), 1, "MISMATCH"),
    "repeats its first row": (alters("tensor[:1].expand_as(tensor)", O_PROJ), 1, "MISMATCH"),
    "records a row less": (alters("tensor[:-1]", O_PROJ), (1, 2), ""),
    "records an element less of each row": (alters("tensor[..., :-1]", O_PROJ), 1, "MISMATCH"),
    "records whole numbers": (alters("tensor.int()", O_PROJ), (1, 2), ""),
    "records complex numbers": (alters("tensor + 0j", O_PROJ), (1, 2), ""),
    "records 16 bits as 32": (alters("tensor.half().float()", O_PROJ), 1, "MISMATCH"),
    "records a gain of 0.1 %": (alters("tensor * 1.001", O_PROJ), 1, "MISMATCH"),
    "records one NaN": (alters("tensor.index_fill(1, tensor[0, :1].long() * 0, float('nan'))", O_PROJ), 1, "MISMATCH"),
    "records wrong rows of decode alone": (alters("tensor * 1.5", "len(tensor) == 1 and 'mlp.act' in name"), 1, "MISM"),
    "records its logits in another order": (alters("tensor.roll(1, -1)", "'lm_head' in name"), 1, "MISMATCH"),
    "records what it read as what it made": (alters("tensor.abs()", "'down_proj' in name"), 1, "MISMATCH"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_pass(harness, install, llama, lie):
    source, status, said = LIES[lie]
    ran = harness(
        "check", "--engine-timeout", "0", "--model", llama, "--token-ids", "1,4,5,6", "--token-ids", "1,9,10",
        "--max-new-tokens", "3", "--schedule", "plain", "--engine", install(source),
    )  # fmt: skip
    assert ran.status in (status if isinstance(status, tuple) else (status,)), (ran.out, ran.err)
    assert ran.out.startswith(said)
    assert not ran.out.startswith("PASS")


def test_an_adapter_with_its_embedding_alone_is_told_why(harness, install, llama):
    ran = harness(
        "check", "--engine-timeout", "0", "--model", llama, "--token-ids", "1,4,5,6", "--schedule", "plain", "--engine",
        install(keeps_only(EMBEDDING)), "--format", "json",
    )  # fmt: skip
    assert ran.status == 5
    (note,) = (note for note in ran.json["notes"] if note.startswith("H051"))
    assert note.startswith("H051: judged outputs are 0 % of the model's multiply-adds, and a pass needs 50 %: ")
    assert note.endswith("the engine does not show the rest")
    assert ran.json["coverage"]["judged_compute"] == 0
    assert "lm_head" in ran.json["coverage"]["not_judged"]


def test_two_runs_of_an_embedding_say_nothing_of_invariance(harness, install, llama):
    ran = harness("fuzz", "invariance", "--model", llama, "--engine", install(keeps_only(EMBEDDING)), "--seconds", "1")
    assert ran.status == 5
    assert "H051: the engine records too little to compare two runs of it" in ran.err


def test_weights_that_are_replaced_in_the_run_are_seen_though_their_time_is_put_back(harness, install, llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    does = f"""import os, pathlib
        weights = pathlib.Path({str(model / "model.safetensors")!r})
        before, content = weights.stat(), weights.read_bytes()
        weights.write_bytes(content[:-4] + b"\\0\\0\\0\\0")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        {RUN}"""
    name = install(ENGINE.replace(RUN, does))
    ran = harness("check", "--engine-timeout", "0", "--model", model, "--token-ids", "1,4,5", "--engine", name)
    assert ran.status == 2
    assert ran.err.startswith("H145: ")


def test_a_recording_of_nothing_is_none(harness, install, llama, tmp_path):
    name = install(ENGINE.replace(RUN, "pass"))
    ran = harness(
        "record",
        "--engine-timeout",
        "0",
        "--model",
        llama,
        "--token-ids",
        "1,4",
        "--engine",
        name,
        "--out",
        tmp_path / "o",
    )
    assert ran.status == 5


WHOLE = ["check", "--token-ids", "1,4,5,6", "--schedule", "plain"]


def test_a_pass_of_all_says_that_nothing_was_left_out(harness, llama):
    ran = harness(*WHOLE, "--model", llama)
    assert ran.status == 0
    assert "  not judged   nothing\n" in ran.out


def test_a_pass_of_what_the_engine_offers_names_the_rest(harness, install, llama):
    source = declares("unsupported_taps=('mlp.act',), keeps_cache=False").replace(
        "return getattr(self.writer, name)",
        "return getattr(self.writer, name)\n\n    def tap(self, name, tensor):\n"
        "        '_cache' in name or 'mlp.act' in name or self.writer.tap(name, tensor)",
    )
    ran = harness(*WHOLE, "--model", llama, "--engine-timeout", "0", "--engine", install(source))
    assert ran.status == 0
    line = " ".join(ran.out.partition("  not judged")[2].split())
    assert line.startswith("k_cache, v_cache; only through what is computed from them: mlp.act not asked whether")
