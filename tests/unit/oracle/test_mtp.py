"""Layers that predict further tokens, in HF's forward: HF's own numbers, as parts of the model, in every run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import Code, HarnessError
from harness.extensions.faults.zoo.models import tokens
from harness.formats.taps import Kind
from harness.oracle.decode import HFDecoder
from harness.oracle.golden import open_golden
from harness.oracle.make_golden import make_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt
from tests import mtp

LAYERS = {"mellum": 2, "glm4_moe": 46, "deepseek_v3": 61}
"""Those behind which HF looks for further ones."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(name, **options):
        folder = tmp_path_factory.mktemp(name)
        mtp.save(name, folder, num_layers=LAYERS[name], **options)
        return folder

    return save


@pytest.fixture(scope="module")
def mellum(saved):
    return saved("mellum")


def shown(hf, run):
    """Return what the depths give while `run` runs, [requests, tokens, hidden size] each."""
    first, values = hf.config.num_hidden_layers, [[] for _ in range(hf.mtp.num_depths)]
    handles = [
        hf.model.get_decoder()
        .layers[first + at]
        .register_forward_hook(lambda _m, _a, out, at=at: values[at].append(out))
        for at in range(hf.mtp.num_depths)
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return [torch.cat(item, dim=1) for item in values]


def by_hf(folder, ids, num_depths):
    """Return the same by HF's own classes: row p of a depth from the token at p + depth, of those that are there."""
    main = AutoModelForCausalLM.from_pretrained(folder).eval()
    further = mtp.MtpModel.from_pretrained(main).eval()
    values, cache = [], mtp.MtpCache(config=main.config.get_mtp_config())
    with torch.no_grad():
        hidden = main.model(input_ids=ids).last_hidden_state
        for depth in range(num_depths):
            ahead, positions = ids[:, depth + 1 :], torch.arange(depth + 1, ids.shape[1])[None]
            hidden = hidden[:, : ahead.shape[1]]
            hidden = further.forward_layer(depth, hidden, positions, cache, input_ids=ahead)
            values.append(hidden)
    return values


def assert_near(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        ours = ours[:, : theirs.shape[1]]
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_gives_what_hf_gives(saved, name):
    folder, ids = saved(name), tokens(count=20)
    hf = load_model(folder, dtype=torch.float32, mtp=True)
    expected = by_hf(folder, ids, 1)
    assert_near(shown(hf, lambda: hf.run(input_ids=ids, use_cache=False)), expected)
    assert_near(shown(hf, lambda: in_pieces(hf, ids)), expected)


def test_a_second_depth_reads_the_first(saved, monkeypatch):
    from transformers import Glm4MoeForCausalLM

    monkeypatch.setitem(LAYERS, "glm4_moe", 2)
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\."])
    folder, ids = saved("glm4_moe", num_depths=2), tokens(count=20)
    hf = load_model(folder, dtype=torch.float32, mtp=True)
    expected = by_hf(folder, ids, 2)
    assert_near(shown(hf, lambda: hf.run(input_ids=ids, use_cache=False)), expected)
    assert_near(shown(hf, lambda: in_pieces(hf, ids)), expected)
    assert hf.graph.drafted_from == {1: "model.layers.2.post_norm", 2: "model.layers.3.post_norm"}
    assert hf.graph["model.layers.3.hnorm"].inputs == ("model.layers.2.post_norm",)


def in_pieces(hf, ids):
    """Feed the tokens through a cache: a prompt, then one after the other, each told what follows it."""
    with HFDecoder(hf) as decoder:
        for begin, end in ((0, 12), *((at, at + 1) for at in range(12, 20))):
            with hf.mtp.followed_by(ids[:, end:].tolist()):
                decoder.feed(ids[:, begin:end].tolist())


def test_they_are_operations_as_others_are(mellum):
    hf = load_model(mellum, dtype=torch.float32, mtp=True)
    graph = hf.graph
    assert graph["model.layers.2.embed_tokens"].kind is Kind.EMBEDDING
    assert graph["model.layers.2.hnorm"].inputs == ("model.norm",)
    assert graph["model.layers.2.eh_proj.input"].inputs == ("model.layers.2.enorm", "model.layers.2.hnorm")
    assert graph["model.layers.2.k_cache"].window == hf.config.sliding_window
    ahead = {op.layer for op in graph if op.tokens_ahead}
    assert ahead == {2}
    assert not any(op.tokens_ahead for op in load_model(mellum, dtype=torch.float32).graph)


def test_a_golden_has_the_rows_whose_tokens_it_knows(mellum, tmp_path):
    hf = load_model(mellum, dtype=torch.bfloat16, mtp=True)
    prompts = [Prompt(token_ids=[5, 6, 7, 8], max_new_tokens=3), Prompt(token_ids=[9, 10], max_new_tokens=2)]
    golden = make_golden(hf, prompts, tmp_path / "golden")
    (step,) = golden.recording.steps
    rows = step.rows_of("model.layers.2.post_norm").tolist()
    places = list(zip(step.request.tolist(), step.position.tolist(), strict=True))
    assert [places[row] for row in rows] == [(0, at) for at in range(5)] + [(1, at) for at in range(2)]
    assert open_golden(tmp_path / "golden").graph.has_mtp
    without = make_golden(load_model(mellum, dtype=torch.bfloat16), prompts, tmp_path / "other")
    assert without.recording.taps != golden.recording.taps
    assert without.info.key != golden.info.key


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_a_checkpoint_without_them_is_refused(name):
    with pytest.raises(HarnessError, match="transformers runs no layers that predict further tokens") as caught:
        load_model(Path("cases/checkpoints") / name, dtype=torch.float32, mtp=True)
    assert caught.value.code is Code.UNSUPPORTED_ARCHITECTURE


def test_missing_weights_are_said(mellum, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((mellum / "config.json").read_bytes())
    tensors = load_file(mellum / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HarnessError, match=r"weights are missing.*eh_proj"):
        load_model(tmp_path, dtype=torch.float32, mtp=True)
