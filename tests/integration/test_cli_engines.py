"""Engines of other packages: found by their entry point, and held to what they declare."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from harness.errors import Code

from .commands import ENGINE

PAGE = (Path(__file__).parents[2] / "docs" / "write-an-adapter.md").read_text(encoding="utf-8")
HALF = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "attn_residual")


def block(language: str) -> str:
    """Return the only code block of a language on the page."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(code)


@pytest.fixture
def check(harness, llama, workload):
    return lambda engine, *options: harness(
        "check",
        "--model",
        llama,
        *workload,
        "--schedule",
        "plain",
        "--engine",
        engine,
        "--engine-timeout",
        "0",
        "--format",
        "json",
        *options,
    )


def codes(ran):
    return {finding["code"] for finding in ran.json["findings"]}


def keep(condition: str) -> str:
    """Return the source of an engine that records only the taps for which the condition on `name` holds."""
    tap = f"    def tap(self, name, tensor):\n        if {condition}:\n            self.writer.tap(name, tensor)\n\n"
    return ENGINE.replace("    def __getattr__", f"{tap}    def __getattr__")


def test_the_engine_of_the_page(check, install):
    entry_points = tomllib.loads(block("toml"))["project"]["entry-points"]
    ((name, opener),) = entry_points["inference_harness.engines"].items()
    ran = check(install(block("python"), name=name, opener=opener.partition(":")[2]))
    assert ran.status == 0, ran.err + ran.out
    document = ran.json
    assert document["engine"] == name
    lacking = ["q_rope", "k_rope", "attention", "attn_residual", "mlp.act", "output", "k_cache", "v_cache"]
    assert document["coverage"]["not_offered"] == lacking
    assert document["coverage"]["missing"] == 0
    judged = {tap["name"]: tap["judged_by"] for tap in document["taps"]}
    assert judged["model.layers.0.self_attn.q_proj"] == "local"
    through = {tap["name"]: tap["through"] for tap in document["taps"]}
    assert judged["model.layers.0.self_attn.o_proj"] == "local"
    assert through["model.layers.0.self_attn.o_proj"] == [f"model.layers.0.{tap}" for tap in lacking[:3]]
    assert len(judged) == 3 + 3 * 9


def test_the_session_of_the_page_serves_bench(harness, install, monkeypatch):
    (session,) = re.findall(r"^```python title=session.py\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.setitem(sys.modules, "harness_mine", ModuleType("harness_mine"))
    adapter = ModuleType("harness_mine.adapter")
    exec(block("python"), vars(adapter))
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    name = install(session, name="mine")
    tiny = ("--shape", "tiny", "--repeats", "1", "--requests", "2")
    ran = harness("bench", "engine", *tiny, "--engine", name, "--peer", "reference", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    assert [set(measure["samples"]) for measure in ran.json["measures"]] == [{name, "reference"}] * 4


@pytest.mark.slow
def test_the_page_of_the_adapter_fits_a_qwen(harness, checkpoints, workload, install):
    model = checkpoints / "qwen3-tiny"  # its q_norm and k_norm are recorded by the same hooks
    install(block("python"), name="mine")
    ran = harness("check", "--model", model, *workload, "--schedule", "plain", "--engine", "mine", "--format", "json")
    assert ran.status == 0, ran.err + ran.out
    assert "model.layers.0.self_attn.q_norm" in {tap["name"] for tap in ran.json["taps"]}


def test_an_engine_that_records_nothing(check, install):
    ran = check(install(keep("False")))
    assert ran.status == 1
    assert codes(ran) == {Code.TAP_MISSING}
    coverage = ran.json["coverage"]
    assert (coverage["recorded"], ran.json["taps"]) == (0, [])
    assert coverage["missing"] == coverage["expected"] > 0


def test_an_engine_that_does_not_even_run(check, install):
    ran = check(install(ENGINE.replace("self.inner.run(workload, Between(writer))", "pass")))
    assert ran.status == 1
    assert codes(ran) >= {Code.TAP_MISSING}
    assert ran.json["tokens"]["compared"] == 0


def test_half_of_the_taps_pass_where_the_others_are_declared(check, install):
    condition = f"not name.endswith({HALF})"
    undeclared = check(install(keep(condition)))
    assert undeclared.status == 1
    assert codes(undeclared) == {Code.TAP_MISSING}
    assert len(undeclared.json["coverage"]["missing_taps"]) == 3 * len(HALF)
    capabilities = f'inner.capabilities.__class__(schedules=("plain",), unsupported_taps={HALF})'
    declared = check(
        install(keep(condition).replace("inner, inner.capabilities", f"inner, {capabilities}"), name="declared")
    )
    assert declared.status == 0, declared.out
    assert declared.json["coverage"]["not_offered"] == list(HALF)
    assert declared.json["coverage"]["missing"] == 0


LACKS = (
    "inner.capabilities.__class__(schedules=('plain',), keeps_cache=False, "
    "unsupported_taps=tuple(op.site for op in GRAPH if {}))"
)
GRAPH = """
import torch
from harness.oracle.model import load_model

GRAPH = None


def open_engine(folder, *, dtype, device, options):
    global GRAPH
    GRAPH = load_model(folder, dtype=getattr(torch, dtype), device=device).graph
"""


def lacking_all_but(shown: str) -> str:
    """Return the source of an engine that declares that it can show nothing but one site, and shows nothing else."""
    capabilities = LACKS.format(f"op.site != {shown!r}")
    source = keep(f"name == {shown!r}").replace("inner, inner.capabilities", f"inner, {capabilities}")
    return source.replace("\ndef open_engine(folder, *, dtype, device, options):\n", GRAPH)


def test_an_engine_that_declares_everything_lacking_has_not_passed(check, install):
    """Its tokens are equal, and nobody asked for tokens alone."""
    name = install(lacking_all_but("nothing"))
    ran = check(name)
    assert (ran.status, ran.json["verdict"], ran.json["findings"]) == (5, "nothing", [])
    assert ran.json["tokens"] == {"compared": 6, "equal": 6, "ties": 0}
    assert [note.partition(":")[0] for note in ran.json["notes"]] == [Code.NOTHING_CHECKED]
    asked = check(name, "--taps", "tokens")
    assert (asked.status, asked.json["verdict"]) == (0, "pass")
    assert asked.json["notes"] == ["only tokens were compared, as asked: not one operation was judged"]


def test_an_engine_that_shows_its_logits_alone(check, install):
    ran = check(install(lacking_all_but("lm_head")))
    assert (ran.status, [tap["judged_by"] for tap in ran.json["taps"]]) == (0, ["propagated"])
    (note,) = ran.json["notes"]
    assert re.fullmatch(
        r"only the logits were judged, which show errors from [\d.e-]+ % of a row's norm on, 10 times HF's own; a "
        r"change of all weights from about [\d.e-]+ % on, or of one matrix from about [\d.e-]+ % on",
        note,
    )


def test_less_may_be_asked_for_than_an_engine_declares(check, install):
    name = install(keep("name == 'lm_head'"))
    assert codes(check(name)) == {Code.TAP_MISSING}
    assert check(name, "--taps", "logits").status == 0
    none = install(keep("False"), name="silent")
    assert codes(check(none, "--taps", "logits")) == {Code.TAP_MISSING}
    assert check(none, "--taps", "tokens").status == 0


def test_an_engine_that_shows_its_cache_and_logits(check, install):
    """No operation is judged by itself: what the cache holds is held against the golden."""
    name = install(keep("name == 'lm_head' or name.endswith('_cache')"))
    ran = check(name, "--taps", "cache")
    judged = {tap["name"]: tap["judged_by"] for tap in ran.json["taps"]}
    assert (ran.status, set(judged.values())) == (0, {"propagated", "cache"})
    note = ran.json["notes"][0]
    assert note.startswith(f"{len(judged)} of 54 taps were judged, as asked")
    assert codes(check(name, "--taps", "all")) == {Code.TAP_MISSING}
    logits = install(keep("name == 'lm_head'"), name="logits")
    assert codes(check(logits, "--taps", "cache")) == {Code.TAP_MISSING}


def test_tokens_alone_are_compared_all_the_same(check, install):
    choose = """    def end_step(self, sampled=()):
        self.writer.end_step([(token + 1) % 256 for token in sampled])

"""
    ran = check(
        install(keep("False").replace("    def __getattr__", f"{choose}    def __getattr__")), "--taps", "tokens"
    )
    assert (ran.status, codes(ran)) == (1, {Code.TOKENS_DIFFER})


def test_a_tap_that_was_recorded_only_while_decoding(check, install):
    tap = "name != 'model.layers.1.mlp.act' or len(tensor) == 1"
    ran = check(install(keep(tap)))
    assert ran.status == 1
    (finding,) = [finding for finding in ran.json["findings"] if finding["code"] == Code.ROWS_MISSING]
    assert finding["tap"] == "model.layers.1.mlp.act"
    assert (finding["request"], finding["position"]) == (0, 0)


def test_a_cache_that_was_not_read_back(check, install):
    ran = check(install(keep("not name.endswith('_cache')")))
    assert ran.status == 1
    assert codes(ran) == {Code.TAP_MISSING}


def test_other_tokens_than_the_golden(check, install):
    choose = """    def end_step(self, sampled=()):
        self.writer.end_step([(token + 1) % 256 for token in sampled])

"""
    ran = check(install(ENGINE.replace("    def __getattr__", f"{choose}    def __getattr__")))
    assert ran.status == 1
    assert codes(ran) == {Code.TOKENS_DIFFER}
    assert ran.json["tokens"] == {"compared": 6, "equal": 0, "ties": 0}


def test_two_packages_with_engines_of_one_name(check, install, tmp_path):
    install(ENGINE)
    metadata = tmp_path / "site-foreign" / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[inference_harness.engines]\nforeign = other:open_engine\n")
    ran = check("foreign")
    assert ran.status == 2
    assert ran.json["error"]["code"] == Code.UNKNOWN_ENGINE
    assert "other:open_engine" in ran.json["error"]["actual"]
