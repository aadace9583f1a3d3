"""What made a trace slower, by its first sentence; steps and kernels by their names."""

import json

import pytest

from harness.profiling.trace.compare import diff_files, diff_traces
from harness.profiling.trace.kernels import category_of, readable
from harness.profiling.trace.phases import stated_step
from harness.profiling.trace.summary import summarize
from harness.report.trace import diff_text, summary_text

from ...benchmarks import trace_regressions as planted

SHORT = {
    "graphs off", "another attention backend", "one GEMM longer", "a copy in each layer", "clocks 31 % lower",
    "a wait in each layer", "memory allocated in a step", "preparing inputs in Python", "scheduling between steps",
    "larger batches", "on a CPU: an operator slower", "nothing, eager", "graphs on: faster", "every eighth step stalls",
}  # fmt: skip


@pytest.mark.parametrize(("name", "before", "changed", "words"), [row for row in planted.PLANTED if row[0] in SHORT])
def test_the_first_sentence_names_what_was_planted(tmp_path, monkeypatch, name, before, changed, words):
    monkeypatch.setattr(planted, "NUM_STEPS", 15)
    sentence = planted.planted_sentence(tmp_path, "t", before, changed, 5)
    assert planted.is_right(sentence, words), sentence


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("execute_context_0(0)_generation_4(4)", ("decode", "4 requests", 4)),
        ("execute_context_1(888_788544)_generation_0(0)", ("prefill", "1 request of 888 tokens", 888)),
        ("execute_8192_context_9(sq8155sk8430sqsq7sqsk7)_generation_37(sq37sk4sqsq37sqsk4)",
         ("mixed", "9 requests of 8,155 tokens, 37 decoding", 8192)),
        ("execute_new_0_cached_7", ("decode", "7 requests", 7)),
        ("[Executor] _forward_step 12: 3 ctx reqs, 0 gen reqs", ("prefill", "3 requests", 0)),
        ("_forward_step: 0 ctx reqs, 1 gen reqs", ("decode", "1 request", 1)),
        ("step[EXTEND bs=15 toks=15360]", ("prefill", "15 requests of 15,360 tokens", 15360)),
        ("step[DECODE bs=32]", ("decode", "32 requests", 32)),
        ("step[TARGET_VERIFY bs=2]", ("target_verify", "2 requests", 0)),
        ("decode[bs=4 toks=4 kv=128]", ("decode", "4 requests", 4)),
        ("warm-up[3]", ("warm-up", "", 0)),
        ("ProfilerStep#3", None),
        ("cublasCreate", None),
    ],
)  # fmt: skip
def test_engines_state_their_steps(name, stated):
    assert stated_step(name) == stated


@pytest.mark.parametrize(
    ("name", "short", "category"),
    [
        ("ncclDevKernel_AllGather_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_LL", "communication"),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda("
         "at::TensorIteratorBase&)::{lambda()#3}>(int)", "elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, 4> >(x)",
         "reduce_kernel<ArgMaxOps>", "sampling"),
        ("std::enable_if<(((8)>(0))), void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
         "fused_add_rms_norm_kernel", "norm"),
        ("_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipelineQRKSVSA",
         "kentry<FmhaBatchPrefillWithPagedKVCacheKernel>", "attention"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0EEEvPT0_PT_", "add_rmsnorm_quant_kernel", "norm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x192x64_MI16x16x1_SN", "Cijk_Alik_Bljk_BBS MT256x192x64", "GEMM"),
        ("_matmul_ogs_NNT_bf16xmxfp4_16x128_swiglu", "_matmul_ogs_NNT_bf16xmxfp4_16x128_swiglu", "GEMM"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)", "reshape_and_cache_flash_kernel", "cache"),
        ("triton_poi_fused_flash_attention_mul_0", "triton_poi_fused_flash_attention_mul_0", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::<unnamed>::cunn_SoftMaxForward<4, float>(float *)", "cunn_SoftMaxForward", "attention"),
        ("void at::native::elementwise_kernel<128, at::native::<unnamed>::where_kernel_impl(int)>(int)",
         "elementwise_kernel<where_kernel_impl>", "other"),
        ("_Z", "_Z", "other"),
    ],
)  # fmt: skip
def test_kernels_have_a_short_name_and_a_category(name, short, category):
    assert (readable(name), category_of(name)) == (short, category)


def trace(path, sizes, *, step_us=100.0, nested=()):
    """A trace of decode steps of these sizes, each with one operator, as vLLM annotates them."""
    events = []
    for at, size in enumerate(sizes):
        step = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": 1000.0 * at, "dur": step_us}
        name = f"execute_context_0(0)_generation_{size}({size})"
        events += [step | {"name": text} for text in (name, *nested)]
        events.append(step | {"name": "aten::mm", "cat": "cpu_op", "dur": step_us / 2})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_steps_of_like_size_are_compared_with_like(tmp_path):
    before, after = trace(tmp_path / "a.json", [8, 8, 4, 4, 4]), trace(tmp_path / "b.json", [8, 2, 2, 2], step_us=300)
    (phase,) = diff_files(before, after).phases
    assert (phase.num_steps_before, phase.num_steps_after, phase.sizes_before) == (1, 1, ("8 requests",))
    near = trace(tmp_path / "c.json", [9, 9, 2])
    assert diff_files(before, near).phases[0].sizes_after == ("9 requests",)
    unlike = diff_files(before, trace(tmp_path / "d.json", [64, 64], step_us=900))
    assert unlike.unlike == ("decode",)
    assert "of other sizes, 64 requests for 8 requests" in unlike.sentence
    assert "all of them are compared" in diff_text(unlike)
    text = after.read_text().replace("execute_context_0(0)_generation_", "decode[").replace(")", "]").replace("(", "=")
    (tmp_path / "e.json").write_text(text)
    assert "8 requests for steps of no stated size" in diff_files(tmp_path / "e.json", before).sentence


def test_a_step_that_is_annotated_twice_is_one(tmp_path):
    path = trace(tmp_path / "a.json", [32, 32], nested=("step[DECODE bs=32]",))
    (phase,) = summarize(path).phases
    assert (phase.name, phase.count, phase.sizes[0].size) == ("decode", 2, "32 requests")
    assert "32 requests" in summary_text([summarize(path)])


def test_a_trace_without_steps_is_one_step_with_unknown_noise(tmp_path):
    paths = []
    for name, duration in (("a.json", 50.0), ("b.json", 500.0)):
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": duration}
        (tmp_path / name).write_text(json.dumps({"traceEvents": [event]}))
        paths.append(summarize(tmp_path / name))
    sentence = diff_traces(*paths).sentence
    assert sentence.startswith("the trace 0.05 -> 0.5 ms: aten::mm takes 450 us more a step on the CPU")
    assert "noise is unknown" in sentence


def test_a_small_kernel_under_another_name_does_not_hide_a_longer_one(tmp_path):
    paths = []
    for at, (names, duration) in enumerate(((("gemm_a", "gemm_x"), 100.0), (("gemm_a", "gemm_y"), 300.0))):
        events = []
        for step in range(6):
            where = {"ph": "X", "pid": 1, "tid": 1, "ts": 1000.0 * step}
            events.append(where | {"cat": "user_annotation", "name": "step[DECODE bs=2]", "dur": 20.0})
            for number, name in enumerate(names):
                ids = {"args": {"correlation": 2 * step + number}}
                call = where | {
                    "ts": where["ts"] + number,
                    "dur": 0.5,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                }
                kernel = {"cat": "kernel", "name": name, "tid": 7, "dur": 1.0 if number else duration + step}
                events += [call | ids, where | kernel | ids | {"ts": where["ts"] + (5.0 if number else 20.0)}]
        paths.append(tmp_path / f"{at}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events}))
    sentence = diff_files(*paths).sentence
    assert sentence.startswith("decode 0.122 -> 0.323 ms: GEMM 0.103 -> 0.303 ms, gemm_a takes 3 times as long")


def test_a_function_is_the_same_at_another_line_and_a_call_under_another_vendor(tmp_path):
    names = [
        ["model.py(10): forward", "model.py(90): forward", "cache.py(5): grow", "cudaLaunchKernel"],
        ["model.py(14): forward", "model.py(97): forward", "cache.py(6): shrink", "hipLaunchKernel"],
    ]
    paths = []
    for side, (names_of_side, times) in enumerate(zip(names, ((10.0,) * 4, (10.0, 15.0, 10.0, 13.0)), strict=True)):
        events = [
            {"ph": "X", "pid": 1, "tid": 1, "ts": 100.0 * at, "dur": time, "name": name}
            | {"cat": "python_function" if ".py" in name else "cuda_runtime"}
            for at, (name, time) in enumerate(zip(names_of_side, times, strict=True))
        ]
        paths.append(tmp_path / f"{side}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events}))
    changes = {row.name: (row.count_before, row.count_after, row.added_us) for row in diff_files(*paths).changes}
    assert changes == {
        "cache.py(5): grow": (1, 0, -10.0), "cache.py(6): shrink": (0, 1, 10.0),
        "model.py(97): forward": (1, 1, 5.0), "hipLaunchKernel": (1, 1, 3.0),
    }  # fmt: skip
