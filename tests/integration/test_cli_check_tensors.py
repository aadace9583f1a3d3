"""`harness check --tensors`: the verdict on a folder of dumped tensors, and input that cannot be judged."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

IDS = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40]
TOKENS = ",".join(map(str, IDS))


def dump(folder, *, dtype=torch.float32, plant=lambda model: None, ids=IDS):
    """Return the outputs of all modules of HF's model by their paths."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    plant(model)
    shown = {}
    for name, module in model.named_modules():
        if name and name not in ("model", "model.rotary_emb"):
            module.register_forward_hook(
                lambda _m, _a, out, name=name: shown.update({name: (out[0] if isinstance(out, tuple) else out).clone()})
            )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return shown


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dump").mkdir()
    return tmp_path / "dump"


@pytest.fixture
def check(harness, checkpoints, folder):
    def run(*options, tokens=TOKENS):
        model = str(checkpoints / "qwen2-tiny")
        return harness("check", "--tensors", folder, "--model", model, "--token-ids", tokens, *options)

    return run


@pytest.fixture
def qwen2(checkpoints):
    return checkpoints / "qwen2-tiny"


def test_other_values_under_the_name_of_a_tap_are_said(check, qwen2, folder):
    """A sound copy under another name serves the tap; whatever the engine goes on with may be the other."""
    tensors, name = dump(qwen2), "model.layers.1.mlp.down_proj"
    torch.save(tensors | {name: 1.3 * tensors[name], "debug": tensors[name]}, folder / "dump.pt")
    ran = check("--dtype", "float32", "--format", "json")
    assert ran.status == 0, ran.out + ran.err
    told = f"not judged: dump.pt: {name} has the name of a tap that was taken from dump.pt: "
    (note,) = [note for note in ran.json["notes"] if note.startswith(told)]
    assert note.endswith("and holds other values")


def test_what_no_tap_holds_is_said(check, qwen2, folder):
    """A second sequence of a batch, in the columns after those of the first, and tensors of more tokens."""
    tensors, name = dump(qwen2), "model.layers.1.mlp.down_proj"
    longer = torch.cat([tensors[name][0], torch.ones(9, tensors[name].shape[-1])])
    torch.save(
        tensors | {name: torch.cat([tensors[name], 2 * tensors[name]], dim=-1), "longer": longer}, folder / "a.pt"
    )
    ran = check("--dtype", "float32", "--format", "json")
    assert ran.status == 0, ran.out + ran.err
    assert "not judged: tensors without a row for each token: a.pt: longer" in ran.json["notes"]
    assert f"not judged: columns that no tap is taken from: a.pt: {name}" in ran.json["notes"]


def test_one_file_of_a_step_as_sglang_writes_it(check, qwen2, folder):
    """One .pt a forward pass, in a folder of the rank; the logits of the last token stand in the next pass's."""
    (folder / "TP0_PP0_Rank0_pid77").mkdir()
    tensors = dump(qwen2)
    logits = tensors.pop("lm_head")
    tensors |= {"model.forward_batch_info.input_ids": torch.tensor(IDS)}
    torch.save(tensors, folder / "TP0_PP0_Rank0_pid77" / "Pass00000.pt")
    after = {name: torch.randn(1, tensor.shape[-1]) for name, tensor in tensors.items() if tensor.dim() > 1}
    torch.save(after | {"logits_processor": logits[0, -1:]}, folder / "TP0_PP0_Rank0_pid77" / "Pass00001.pt")
    ran = check("--dtype", "float32", "--format", "json")
    assert ran.status == 0, ran.out + ran.err
    report = ran.json
    assert (report["verdict"], report["engine"], report["schedules"]) == ("pass", "tensors", ["plain"])
    assert report["tokens"] == {"compared": 1, "equal": 1, "ties": 0}
    sources = {source["tap"]: source for source in report["sources"]}
    assert sources["lm_head"] == {
        "tap": "lm_head",
        "tensor": "TP0_PP0_Rank0_pid77/Pass00001.pt: logits_processor",
        "code": None,
        "evidence": "it holds what HF computes from the engine's own values",
    }
    assert sources["model.layers.1.self_attn.q_proj"]["tensor"].endswith(
        "Pass00000.pt: model.layers.1.self_attn.q_proj"
    )
    assert (
        "only the prefill of the tokens was judged: neither decode steps nor the KV cache nor rows of padding"
        in report["notes"]
    )
    assert "decode" not in report["coverage"]["triggers"]


def test_one_file_a_tensor_as_msprobe_writes_it(check, qwen2, folder):
    place = folder / "step0" / "rank0" / "dump_tensor_data"
    place.mkdir(parents=True)
    (folder / "step0" / "rank0" / "dump.json").write_text("{}")
    for name, tensor in dump(qwen2, dtype=torch.bfloat16).items():
        torch.save(tensor, place / f"Module.{name}.Any.forward.0.output.0.pt")
    ran = check("--dtype", "bfloat16")
    assert ran.status == 0, ran.out + ran.err
    assert "PASS  tensors" in ran.out
    assert "left out: step0/rank0/dump.json: no file of tensors" in " ".join(ran.out.split())


def test_arrays_under_names_that_say_nothing(check, qwen2, folder):
    """numpy has no bfloat16: the arrays are of float32 and hold bfloat16's numbers."""
    for at, tensor in enumerate(dump(qwen2, dtype=torch.bfloat16).values()):
        np.save(folder / f"{at * 37 % 101}.npy", tensor[0].float().numpy())
    ran = check("--dtype", "bfloat16")
    assert ran.status == 0, ran.out + ran.err


def test_a_bug_is_found_where_it_is(check, qwen2, folder):
    def plant(model):
        model.model.layers[1].input_layernorm.variance_epsilon = 0.05

    torch.save(dump(qwen2, plant=plant), folder / "all.pt")
    ran = check("--dtype", "float32", "--format", "json")
    assert ran.status == 1
    assert ran.json["first_divergence"]["tap"] == "model.layers.1.input_layernorm"
    assert (
        "model.layers.1.input_layernorm from all.pt: model.layers.1.input_layernorm: it holds another value than HF "
        "computes, and was taken because HF computes what the engine computes next only from it"
    ) in ran.json["notes"]


def test_nan_is_a_finding(check, qwen2, folder):
    def plant(model):
        def spoil(_module, _args, output):
            output[:, 4] = float("nan")

        model.model.layers[1].mlp.down_proj.register_forward_hook(spoil)

    torch.save(dump(qwen2, plant=plant), folder / "all.pt")
    ran = check("--dtype", "float32", "--format", "json")
    assert ran.status == 1
    assert ran.json["first_divergence"]["tap"] == "model.layers.1.mlp.down_proj"
    assert "H042" in {finding["code"] for finding in ran.json["findings"]}


def refused(ran, code, *texts):
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith(f"{code}: ")
    for text in texts:
        assert text in ran.err


def test_tensors_without_a_row_for_each_token(check, folder):
    np.save(folder / "a.npy", np.zeros((40, 96)))
    what = "no tensor has a token dimension: none has a row for each of the tokens"
    refused(check("--dtype", "float32"), "H086", what, "a dimension of 12, or a few more with padding", "[40, 96]")


def test_tensors_of_another_prompt(check, qwen2, folder):
    ids = [*IDS]
    ids[5] = 22
    torch.save(dump(qwen2, ids=ids), folder / "x.pt")
    ran = check("--dtype", "float32", tokens=TOKENS)
    refused(
        ran, "H086", "the tensors are of other tokens, or of several requests", "x.pt: model.embed_tokens",
        "expected: 3, 8, 21, 4, 17 from position 3 on", "actual:   3, 8, 22, 4, 17 from position 3 on",
    )  # fmt: skip


def test_tensors_of_two_requests(check, qwen2, folder):
    """Their tokens were computed as one prompt: the rows are those of neither."""
    torch.save(dump(qwen2, ids=[40, 41, *IDS]), folder / "x.pt")
    refused(check("--dtype", "float32"), "H086", "expected: 5, 9, 14", "actual:   40, 41, 5")


def test_tensors_of_another_model(check, folder):
    torch.save({"x": torch.randn(12, 96, generator=torch.Generator().manual_seed(0))}, folder / "x.pt")
    refused(check("--dtype", "float32"), "H086", "none of the tensors holds a value that HF computes of these tokens")


def test_tensors_of_another_dtype(check, qwen2, folder):
    torch.save(dump(qwen2, dtype=torch.bfloat16), folder / "x.pt")
    refused(check("--dtype", "float32"), "H158", "expected: float32", "actual:   bfloat16", "--dtype bfloat16")


def test_an_empty_folder(check):
    refused(check("--dtype", "float32"), "H085", "the folder has no tensors", "an empty folder")


def test_too_few_tokens(check, folder):
    np.save(folder / "a.npy", np.zeros((3, 96)))
    refused(check(tokens="5,9,14"), "H013", "so few tokens do not tell tensors apart", "at least 4")


@pytest.mark.parametrize(
    "option", [["--engine", "hf"], ["--schedule", "batched"], ["--engine-timeout", "9"], ["--lora", "x"]]
)
def test_options_of_engines_that_run(check, option):
    refused(check(*option), "H013", "tensors that were dumped are one prefill of no engine that runs", option[0])


def test_one_request_alone(check):
    refused(check("--token-ids", "1,2,3,4"), "H013", "a folder of tensors is of one request", "give one --token-ids")


def test_a_case_file_names_no_tensors(harness, tmp_path, qwen2):
    shutil.copytree(qwen2, tmp_path / "model")
    case = tmp_path / "case.toml"
    case.write_text('schema_version = 1\nmodel = "model"\ntensors = "dump"\n[[requests]]\ntoken_ids = [1, 2, 3, 4]\n')
    ran = harness("check", "--case", case)
    assert ran.status == 2
    assert "tensors: case files must not set this field" in ran.err
    assert json.loads('"--tensors"') in ran.err


def test_two_runs_in_one_file(check, qwen2, folder):
    """The tensors of a sound run would hide the wrong activation of the other one."""

    def plant(model):
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()

    runs = {"hf": dump(qwen2), "engine": dump(qwen2, plant=plant)}
    torch.save({f"{run}.{name}": item for run, items in runs.items() for name, item in items.items()}, folder / "a.pt")
    ran = check("--dtype", "float32")
    assert ran.status == 2, ran.out
    assert "H086: the tensors are of two runs of these tokens" in ran.err
    assert "a.pt: engine.model.layers.1.mlp.down_proj" in ran.err


def test_without_the_embedding_the_first_layer_is_judged_on_hfs(check, qwen2, folder):
    def plant(model):
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.variance_epsilon = 1e-3

    tensors = dump(qwen2, plant=plant)
    del tensors["model.embed_tokens"]
    torch.save(tensors, folder / "a.pt")
    report = check("--dtype", "float32", "--format", "json").json
    first = report["first_divergence"]
    assert (first["tap"], first["explanation"]["cause"][:9]) == ("model.layers.0.input_layernorm", "wrong eps")
    sources = {source["tap"]: source["tensor"] for source in report["sources"]}
    assert sources["model.embed_tokens"] == "HF's embedding of the tokens"


def gate_for_up(model):
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def other_scale(model):
    model.model.layers[1].self_attn.scaling *= 1.25


def other_theta(model):
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq.copy_(5000.0 ** (-torch.arange(len(inv_freq)) / len(inv_freq)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "first", "cause", "tap"),
    [
        (gate_for_up, "1.mlp.down_proj", "gate and up are swapped", "1.mlp.act"),
        (other_scale, "1.self_attn.o_proj", "the softmax scale is 0.220971 instead of 0.176777", "1.attention"),
        (other_theta, "0.self_attn.o_proj", "wrong rope theta", "0.q_rope"),
    ],
)
def test_a_mistake_of_what_was_not_recorded_is_said_to_be_there(check, qwen2, folder, plant, first, cause, tap):
    torch.save(dump(qwen2, plant=plant), folder / "a.pt")
    divergence = check("--dtype", "float32", "--format", "json").json["first_divergence"]
    explanation = divergence["explanation"]
    assert (divergence["tap"], explanation["tap"]) == (f"model.layers.{first}", f"model.layers.{tap}")
    assert cause in explanation["cause"]
    text = " ".join(check("--dtype", "float32").out.split())
    assert f"it is a mistake of model.layers.{tap}, which was not recorded" in text


def test_names_come_before_what_is_guessed(check, qwen2, folder, tmp_path):
    """The last norm is all zeros, which no other tensor tells, and neither does its name."""
    tensors = dump(qwen2, plant=lambda model: model.model.norm.weight.data.zero_())
    tensors |= {f"t.{at}": tensors.pop(f"model.layers.{at}.self_attn.o_proj") * (1 + at) for at in range(3)}
    torch.save({name: item for name, item in tensors.items() if not name.endswith(".self_attn")}, folder / "a.pt")
    (tmp_path / "names.json").write_text(json.dumps({"t.*": "model.layers.*.self_attn.o_proj"}))
    report = check("--dtype", "float32", "--names", tmp_path / "names.json", "--format", "json").json
    sources = {source["tap"]: source for source in report["sources"]}
    for at in range(3):
        source = sources[f"model.layers.{at}.self_attn.o_proj"]
        assert (source["tensor"], source["evidence"]) == (f"a.pt: t.{at}", "you named it")
    assert report["first_divergence"]["tap"] == "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"0.mlp.gate_proj": "model.layers.0.mlp.up_proj", "0.mlp.up_proj": "model.layers.0.mlp.gate_proj"},
            "H089: a name contradicts what the tensors hold",
        ),
        ({"q_proj": "model.layers.0.self_attn.q_proj"}, "several tensors have this name"),
        ({"layers.0.norm": "model.norm"}, "no tensor with a row for each token has this name"),
        ({"lm_head": "model.norm"}, "the tensor of model.norm has other columns"),
        ({"lm_head": "model.head"}, "HF's model has no such tap"),
        ([], "the file holds no names"),
    ],
)
def test_names_that_cannot_be_right(check, qwen2, folder, tmp_path, names, message):
    torch.save(dump(qwen2), folder / "a.pt")
    (tmp_path / "names.json").write_text(json.dumps(names))
    ran = check("--dtype", "float32", "--names", tmp_path / "names.json")
    assert ran.status == 2, ran.out
    assert message in ran.err
