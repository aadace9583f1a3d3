"""torch's variable-length kernel: what it serves, and what it is handed; on a GPU, what it gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.attention.select import find_backend
from reference_engine.errors import ConfigError
from reference_engine.fast.attention import varlen
from reference_engine.fast.attention.limits import KernelLimits
from reference_engine.fast.fast_kernels import FastKernels

from ..recorder import Recorder
from ..test_attention import naive
from ..test_kv_cache import make_spec

BACKENDS = FastKernels.backends

PROMPTS = [list(range(4, 41)), [5, 6, 7], list(range(4, 24)), [44]]
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
SERVED = make_spec(dtype=torch.bfloat16, head_dim=64, block_size=512, device=torch.device("cuda"))


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: None, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """The kernel's signature and documentation, request by request in float64."""
    assert (cu_seq_k, enable_gqa, num_splits) == (None, True, 1)
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    lengths = cu_seq_q.diff()
    assert (max_q, max_k) == (int(lengths.max()), int(seqused_k.max()))
    left, right = window_size
    assert right == 0
    out = torch.empty_like(q)
    for request, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[request]), int(cu_seq_q[request + 1]))
        own_k, own_v = (pages[block_table[request].long()].flatten(0, 1)[:length] for pages in (k, v))
        heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2])
        scores = torch.einsum("tnh,cnh->ntc", q[rows].double(), own_k[:, heads].double()) * scale
        num_rows = rows.stop - rows.start
        distance = torch.arange(length - num_rows, length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & ((left < 0) | (distance <= left))
        probs = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("ntc,cnh->tnh", probs, own_v[:, heads].double()).to(q.dtype)
    return out


@pytest.fixture
def _by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: by_definition)
    monkeypatch.setattr(varlen.VarlenAttention, "limits", KernelLimits())


@pytest.mark.usefixtures("_by_definition")
@pytest.mark.parametrize("limits", [{"block_size": 3, "max_num_batched_tokens": 9}, {"block_size": 16}])
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2-sliding"], indirect=True)
def test_the_kernel_is_handed_what_its_documentation_asks_for(checkpoint: Any, limits: dict[str, Any]) -> None:
    config = EngineConfig(dtype="float32", max_model_len=64, enable_prefix_caching=True, **limits)
    expected, actual = Recorder(), Recorder()
    paged = LLMEngine(checkpoint.folder, config, observer=expected).generate(PROMPTS, PARAMS)
    engine = LLMEngine(checkpoint.folder, replace(config, attention_backend="varlen"), observer=actual)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in paged]
    for output in outputs:
        for tap in ("lm_head", "model.layers.1.k_cache"):
            actual_rows, expected_rows = (recorder.rows(tap, output.request_id) for recorder in (actual, expected))
            torch.testing.assert_close(actual_rows, expected_rows, rtol=1e-4, atol=1e-4)


def test_the_function_that_stands_in_for_the_kernel_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 6, 8), torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    actual = by_definition(
        q, k, v, torch.tensor([0, 4], dtype=torch.int32), None, 4, 7, scale=8**-0.5, window_size=(2, 0),
        enable_gqa=True, seqused_k=torch.tensor([7], dtype=torch.int32),
        block_table=torch.tensor([[2, 1]], dtype=torch.int32), num_splits=1,
    )  # fmt: skip
    own_k, own_v = (torch.cat((pages[2], pages[1]))[:7] for pages in (k, v))
    torch.testing.assert_close(actual.double(), naive(q, own_k, own_v, window=3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": torch.float32}, "dtype bfloat16 or float16, found float32"),
        ({"head_dim": 20}, "head_dim 8 or 16"),
        ({"block_size": 16}, "block_size a multiple of 256, found 16"),
        ({"device": torch.device("cpu")}, "device cuda, found cpu"),
    ],
)
def test_what_it_cannot_serve_is_said(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: by_definition)
    assert find_backend("varlen", SERVED, BACKENDS) is BACKENDS["varlen"]
    with pytest.raises(ConfigError, match=expected):
        find_backend("varlen", replace(SERVED, **change), BACKENDS)


def test_a_varlen_attn_without_block_tables_is_not_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(query: Any, key: Any, *, scale: Any = None, window_size: Any = (-1, -1)) -> None: ...

    monkeypatch.setattr(varlen.importlib, "import_module", lambda name: SimpleNamespace(varlen_attn=of_torch_2_11))
    assert varlen._kernel.__wrapped__() is None
    monkeypatch.setattr(varlen.importlib, "import_module", lambda name: SimpleNamespace(varlen_attn=by_definition))
    assert varlen._kernel.__wrapped__() is by_definition


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: None)
    with pytest.raises(ConfigError, match=r"a torch whose varlen_attn reads block tables \(2.13 does\), found 2"):
        find_backend("varlen", SERVED, BACKENDS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(
    varlen._kernel() is None, reason=f"torch {torch.__version__} has no varlen_attn that reads block tables (2.13 has)"
)
@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)  # whose heads have 16 dimensions
def test_on_a_gpu_it_is_as_near_as_paged(checkpoint: Any) -> None:
    forced = SamplingParams(max_new_tokens=3, forced_token_ids=[5, 9])
    config = EngineConfig(dtype="bfloat16", device="cuda", block_size=256, max_model_len=64)
    expected = checkpoint.logits([*PROMPTS[2], 5, 9])[len(PROMPTS[2]) - 1 :].double()
    errors = []
    for backend in ("paged", "varlen"):
        recorder = Recorder()
        engine = LLMEngine(checkpoint.folder, replace(config, attention_backend=backend), observer=recorder)
        (output,) = engine.generate([PROMPTS[2]], forced)
        logits = recorder.rows("lm_head", output.request_id).double().cpu()
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert errors[1] <= 2 * errors[0]
