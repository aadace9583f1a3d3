"""`harness check --tensors` on files laid out as SGLang 0.5.23 and msprobe 26.2.0 lay them out."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

IDS = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40]
EXAMPLES = Path(__file__).parents[1] / "examples"
SGLANG = {
    "qkv_proj": "self_attn.qkv_proj", "rotary": "self_attn.rotary_emb", "attn": "self_attn.attn",
    "o_proj": "self_attn.o_proj", "gate_up_proj": "mlp.gate_up_proj", "act": "mlp.act_fn",
    "down_proj": "mlp.down_proj",
}  # fmt: skip
"""Modules of the toy under the names that SGLang's have."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dump").mkdir()
    return tmp_path / "dump"


@pytest.fixture
def check(harness, checkpoints, folder):
    def run(dtype="float32"):
        model, tokens = str(checkpoints / "qwen2-tiny"), ",".join(map(str, IDS))
        options = ["--model", model, "--token-ids", tokens, "--dtype", dtype, "--format", "json"]
        return harness("check", "--tensors", folder, *options)

    return run


@pytest.fixture
def step(monkeypatch, checkpoints):
    """Return what the modules of the fused toy make of a prompt and of a token after it, each as (path, outputs)."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("fused_engine")

    def run(plant=lambda model: None):
        engine, calls = module.FusedEngine(checkpoints / "qwen2-tiny", torch.float32), []
        plant(engine.model)

        def hook(path):
            def see(_module, _args, output):
                outputs = output if isinstance(output, tuple) else (output,)
                calls.append((path, [item.clone() for item in outputs if item is not None]))

            return see

        for path, item in engine.model.named_modules():
            if not list(item.children()):
                item.register_forward_hook(hook(path))
        engine.step([(0, IDS, 0)])
        prompt, calls = calls, []
        engine.step([(0, [7], len(IDS))])
        return prompt, calls

    return run


def sglang_name(path):
    parts = path.split(".")
    if parts[0] != "layers":
        return {"embed": "model.embed_tokens", "norm": "model.norm", "head": "logits_processor"}[path]
    return f"model.layers.{parts[1]}.{SGLANG.get(parts[2], parts[2])}"


def write_passes(folder, steps, *, pid=77):
    """Write what `--debug-tensor-dump-output-folder` does.

    A pass is written when the inner model ends, so that logits stand in the next file. The module of all layers is
    hooked under each layer's name, and each of them has its last call. A tied head is the embedding's module.
    """
    place, left = folder / f"TP0_PP0_Rank0_pid{pid}", {}
    place.mkdir()
    for number, calls in enumerate(steps):
        tensors, left = left, {}
        for path, outputs in calls:
            names = [f"layers.{at}.rotary" for at in range(3)] if path.endswith("rotary") else [path]
            for name in names:
                saved = outputs[0] if len(outputs) == 1 else outputs
                (left if path == "head" else tensors)[sglang_name(name)] = saved
        tensors["lm_head"] = tensors["model.embed_tokens"]
        tensors["model.forward_batch_info.input_ids"] = torch.tensor(IDS)
        torch.save(tensors, place / f"Pass{number:05d}.pt")


def write_dumper(folder, steps):
    """Write what `DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all` does: a file for each output, with its layer."""
    place, index = folder / "dump_20261127_214245_630594", 0
    place.mkdir()
    for number, calls in enumerate(steps):
        layer = 0
        for path, outputs in calls:
            layer = int(path.split(".")[1]) if path.startswith("layers") and "rotary" not in path else layer
            for at, value in enumerate(outputs):
                index += 1
                name = f"non_intrusive__{sglang_name(path)}.output" + (f".{at}" if len(outputs) > 1 else "")
                meta = {"step": number, "rank": 0, "dump_index": index, "name": name, "layer_id": layer}
                tags = f"step={number}___rank=0___dump_index={index}___name={name}___recompute_status=disabled"
                torch.save({"value": value, "meta": meta}, place / f"{tags}___layer_id={layer}.pt")


def test_the_passes_of_sglang(check, folder, step):
    write_passes(folder, step())
    ran = check()
    assert ran.status == 0, ran.out + ran.err
    sources = {source["tap"]: source["tensor"] for source in ran.json["sources"]}
    assert sources["model.layers.0.self_attn.k_proj"].endswith(
        "Pass00000.pt: model.layers.0.self_attn.qkv_proj, columns 128 to 191"
    )
    assert sources["model.layers.0.output"].endswith("Pass00000.pt: model.layers.1.input_layernorm.1")
    assert sources["lm_head"] == "TP0_PP0_Rank0_pid77/Pass00001.pt: logits_processor"
    assert [tap for tap in sources if tap.endswith("q_rope")] == ["model.layers.2.q_rope"], "the last call of all"
    assert ran.json["tokens"] == {"compared": 1, "equal": 1, "ties": 0}


def test_the_files_of_sglangs_dumper(check, folder, step):
    write_dumper(folder, step())
    ran = check()
    assert ran.status == 0, ran.out + ran.err
    assert len(ran.json["sources"]) == ran.json["num_taps"] == 48
    rotary = next(source["tensor"] for source in ran.json["sources"] if source["tap"] == "model.layers.1.k_rope")
    assert "model.layers.0.self_attn.rotary_emb.output.1" in rotary
    assert rotary.endswith("layer_id=1.pt: value")


def scaled(model):
    def less(_module, args):
        return (args[0] * 0.5, *args[1:])

    for layer in model.layers:
        layer.attn.register_forward_pre_hook(less)


def wrong_eps(model):
    model.layers[1].post_attention_layernorm.eps = 0.05


def swapped(model):
    weight = model.layers[1].gate_up_proj.weight
    weight.data = torch.cat([*reversed(weight.chunk(2))])


BUGS = [
    (scaled, "model.layers.0.attention"),
    (wrong_eps, "model.layers.1.post_attention_layernorm"),
    (swapped, "model.layers.1.mlp.act"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", [write_passes, write_dumper])
@pytest.mark.parametrize(("plant", "tap"), BUGS)
def test_a_bug_in_sglang_is_where_it_is(check, folder, step, write, plant, tap):
    """Queries of another layer under this layer's name are not taken for its own (`scaled`, in the passes)."""
    write(folder, step(plant))
    ran = check()
    assert ran.status == 1, ran.out + ran.err
    assert ran.json["first_divergence"]["tap"] == tap


def test_two_runs_in_one_folder_are_refused(check, folder, step):
    """The sound run would hide the bug of the other one."""
    write_passes(folder, step(swapped), pid=77)
    write_passes(folder, step(), pid=78)
    ran = check()
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith("H086: the tensors are of several prefills of these tokens\n")
    assert "2: TP0_PP0_Rank0_pid77/Pass00000.pt: model.embed_tokens; TP0_PP0_Rank0_pid78/Pass0" in ran.err
    assert "leave the files of one process and one step in the folder" in ran.err


def test_ranks_may_hold_the_same(check, folder, step):
    steps = step()
    write_passes(folder, steps)
    shutil.copytree(folder / "TP0_PP0_Rank0_pid77", folder / "TP1_PP0_Rank1_pid78")
    assert check().status == 0


def test_a_prompt_in_chunks_is_refused(check, folder, step):
    """The logits alone are those of the whole prompt: no operation would have been judged."""
    prompt, decode = step()
    first = [(path, [output[:8] for output in outputs]) for path, outputs in prompt if path != "head"]
    first.append(("layers.0.q_norm", [torch.randn(48, 32)]))  # 8 tokens x 6 heads: as many rows as 12 x 4
    second = [(path, [output[8:12] for output in outputs] if path != "head" else outputs) for path, outputs in prompt]
    write_passes(folder, [first, second, decode])
    ran = check()
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith("H086: the tensors are of other tokens, or of several requests\n")
    assert "one request alone and not in chunks" in ran.err


def write_msprobe(folder, model, *, step=0):
    """Write what `PrecisionDebugger` does at level L0: inputs, outputs and parameters of each module, and an index."""
    place = folder / f"step{step}" / "proc19444" / "dump_tensor_data"
    place.mkdir(parents=True)
    for name in ("dump.json", "stack.json", "construct.json"):
        (place.parent / name).write_text("{}")
    calls = {}

    def see(path):
        def hook(module, args, output):
            name = f"Module.{path}.{type(module).__name__}.forward.{calls.get(path, 0)}"
            calls[path] = calls.get(path, 0) + 1
            for at, argument in enumerate(args):
                torch.save(argument, place / f"{name}.input.{at}.pt")
            for at, item in enumerate(output if isinstance(output, tuple) else [output]):
                torch.save(item, place / f"{name}.output.{at}.pt")
            for key, item in module.named_parameters(recurse=False):
                torch.save(item, place / f"{name}.parameters.{key}.pt")

        return hook

    for path, module in model.named_modules():
        if path and path != "model" and not path.endswith("self_attn"):
            module.register_forward_hook(see(path))
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS]), use_cache=False)


def wrong_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.6


def gelu(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def shifted_norm(model):
    model.model.norm.weight.data += 1


@pytest.mark.parametrize(
    ("plant", "tap"),
    [
        (None, None),
        (wrong_scale, "model.layers.0.attention"),
        (gelu, "model.layers.0.mlp.act"),
        (shifted_norm, "model.norm"),
    ],
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_modules_of_msprobe(check, folder, checkpoints, plant, tap, dtype):
    path = checkpoints / "qwen2-tiny"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True).eval()
    (plant or id)(model)
    write_msprobe(folder, model)
    ran = check(dtype)
    assert ran.status == (1 if plant else 0), ran.out + ran.err
    assert (ran.json["first_divergence"] or {"tap": None})["tap"] == tap
    assert "left out: step0/proc19444/construct.json: no file of tensors" in " ".join(ran.json["notes"])


def test_two_steps_of_msprobe_are_refused(check, folder, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen2-tiny", dtype=torch.float32, local_files_only=True)
    for step in (0, 1):
        write_msprobe(folder, model.eval(), step=step)
    ran = check()
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith("H086: the tensors are of several prefills of these tokens\n")


SPLIT, ADDED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def write_ranks(folder, model, *, scale=1.0):
    """Write what the modules of two tensor-parallel ranks make, before they are added up; `scale` is rank 1's."""
    for rank in (0, 1):
        (folder / f"step0/rank{rank}/proc{100 + rank}").mkdir(parents=True)

    def shares(path, module, inputs, output):
        if path.endswith((*SPLIT, "act_fn")):
            return output.chunk(2, dim=-1)
        if path.endswith(ADDED):
            parts = zip(inputs.chunk(2, dim=-1), module.weight.chunk(2, dim=1), (1.0, scale), strict=True)
            return [(x @ w.T) * factor for x, w, factor in parts]
        if path.endswith("embed_tokens"):
            mine = (inputs < 128)[..., None]
            return output * mine, output * ~mine
        return output, output

    def see(path):
        def hook(module, args, output):
            inputs = args[0] if args else None
            if not isinstance(output, torch.Tensor):
                return None
            parts = shares(path, module, inputs, output)
            for rank, part in enumerate(parts):
                place = folder / f"step0/rank{rank}/proc{100 + rank}"
                torch.save(part.clone(), place / f"Module.{path}.forward.0.output.0.pt")
            return sum(parts) if path.endswith(ADDED) else None

        return hook

    for path, module in model.named_modules():
        if path and path != "model":
            module.register_forward_hook(see(path))
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS]), use_cache=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_what_ranks_hold_is_put_together(check, folder, checkpoints, dtype, scale):
    path = checkpoints / "qwen2-tiny"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True).eval()
    write_ranks(folder, model, scale=scale)
    ran = check(dtype)
    sources = {source["tap"]: source["tensor"] for source in ran.json["sources"]}
    name = "step0/rank*/proc*/Module.model.layers.0.{}.forward.0.output.0.pt, 2 ranks {}"
    assert sources["model.layers.0.self_attn.k_proj"] == name.format("self_attn.k_proj", "side by side")
    if scale == 1.0:
        assert sources["model.layers.0.mlp.down_proj"] == name.format("mlp.down_proj", "added up")
        assert ran.status == 0, ran.out + ran.err
    else:
        assert ran.json["first_divergence"]["tap"] == "model.layers.0.self_attn.o_proj"
