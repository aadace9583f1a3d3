"""`harness check --lora`: an engine with an adapter against the merged weights, and adapters that are wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.formats.checkpoint import Checkpoint
from harness.oracle.lora import adapter_notes, load_adapted
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.lora import adapter as lora

from ..unit.lora_adapter import FOLDER, write_adapter

WORKLOAD = [
    "--model",
    FOLDER,
    "--token-ids",
    "1,64,155,143,3,64,7,8,9",
    "--token-ids",
    "1,20,31,7",
    "--max-new-tokens",
    4,
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("lora") / "adapter", seed=1, rank=4, alpha=8.0)


@pytest.fixture
def check(harness, adapter):
    def run(*options, dtype="float32"):
        return harness("check", *WORKLOAD, "--lora", adapter, "--dtype", dtype, "--format", "json", *options)

    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "dtype"), [("reference", "float32"), ("reference", "bfloat16"), ("hf", "float16")])
def test_a_sound_engine_passes(check, engine, dtype):
    ran = check("--engine", engine, dtype=dtype)
    assert (ran.status, ran.json["verdict"]) == (0, "pass"), ran.json["findings"][:3]


def left_out(update):
    return lambda self, x: torch.zeros_like(update(self, x))


def other_scale(update):
    return lambda self, x: update(self, x) * 0.75


def not_divided_by_the_rank(update):
    return lambda self, x: update(self, x) * len(self.a_RI)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "dtype"),
    [
        (left_out, "the adapter is not applied", "bfloat16"),
        (other_scale, "the adapter's scale is 0.75 times what it should be", "float32"),
        (not_divided_by_the_rank, "the adapter's scale is alpha, not divided by the rank", "float32"),
    ],
)
def test_a_wrong_adapter_is_named(check, monkeypatch, fault, cause, dtype):
    monkeypatch.setattr(lora.LowRank, "__call__", fault(lora.LowRank.__call__))
    ran = check("--schedule", "batched", dtype=dtype)
    assert ran.status == 1
    divergence = ran.json["first_divergence"]
    assert divergence["tap"] == "model.layers.0.self_attn.q_proj"
    assert divergence["explanation"]["cause"] == cause
    assert divergence["explanation"]["is_cause"]


@pytest.mark.slow
def test_rows_that_get_no_adapter_in_a_batch_are_named(check, monkeypatch):
    """Half of the rows of every step are taken for the base model's."""
    add = lora.Adapter.add

    def add_to_first(self, product, rows_T, x_TI, y_TO):
        add(self, product, rows_T[: max(1, len(rows_T) // 2)], x_TI, y_TO)

    monkeypatch.setattr(lora.Adapter, "add", add_to_first)
    ran = check("--schedule", "batched")
    assert ran.status == 1
    assert ran.json["first_divergence"]["explanation"]["cause"] == "the adapter is not applied"


@pytest.mark.slow
def test_the_neighbours_adapter_in_a_mixed_batch_is_named(check, harness, adapter, monkeypatch, tmp_path):
    """The second half of the rows of a step are given the adapter that another request asked for."""
    neighbours = write_adapter(tmp_path / "neighbour", seed=2)
    config = ModelConfig.from_folder(FOLDER)
    neighbour = lora.read_adapter("neighbour", neighbours, config, torch.float32, torch.device("cpu"))
    add = lora.Adapter.add

    def mixed(self, product, rows_T, x_TI, y_TO):
        half = len(rows_T) // 2
        add(self, product, rows_T[:half], x_TI, y_TO)
        add(neighbour, product, rows_T[half:], x_TI, y_TO)

    monkeypatch.setattr(lora.Adapter, "add", mixed)
    ran = check("--schedule", "batched", "--lora", neighbours)
    assert ran.status == 1
    assert ran.json["first_divergence"]["explanation"]["cause"] == f"the adapter is another one: {neighbours}"


@pytest.mark.slow
def test_rows_of_b_in_another_order_are_named(check, monkeypatch):
    call = lora.LowRank.__call__
    monkeypatch.setattr(lora.LowRank, "__call__", lambda self, x: call(self, x).roll(1, dims=-1))
    ran = check("--schedule", "batched")
    assert ran.json["first_divergence"]["explanation"]["cause"] == "the rows of the adapter's B are in another order"


def test_a_and_b_swapped_on_a_square_layer_are_named(harness, monkeypatch, tmp_path):
    """The o_proj of qwen2-tiny is square: nothing refuses the swapped tensors."""
    base = FOLDER.parent / "qwen2-tiny"
    folder = write_adapter(tmp_path / "square", seed=1, base=base, modules=("o_proj",))
    monkeypatch.setattr(lora.LowRank, "__call__", lambda self, x: x @ self.b_OR @ self.a_RI * self.scaling)
    options = ["--dtype", "float32", "--schedule", "batched", "--format", "json"]
    ran = harness("check", "--model", base, *WORKLOAD[2:], "--lora", folder, *options)
    divergence = ran.json["first_divergence"]
    assert divergence["tap"] == "model.layers.0.self_attn.o_proj"
    cause = "A and B of the adapter are swapped, or their product is transposed"
    assert divergence["explanation"]["cause"] == cause


def test_the_golden_of_an_adapter_is_another_one(harness, adapter, tmp_path):
    options = ["golden", *WORKLOAD, "--dtype", "float32", "--format", "json"]
    plain, adapted = harness(*options), harness(*options, "--lora", adapter)
    assert plain.json["golden"] != adapted.json["golden"]


def test_an_adapter_that_changes_nothing_is_said(harness, tmp_path):
    folder = write_adapter(tmp_path / "zeros", seed=1, modules=("q_proj", "v_proj"))
    tensors = load_file(folder / "adapter_model.safetensors")
    zeros = {key: tensor * (not key.endswith("q_proj.lora_B.weight")) for key, tensor in tensors.items()}
    save_file(zeros, folder / "adapter_model.safetensors")
    ran = harness("check", *WORKLOAD, "--lora", folder, "--dtype", "float32", "--schedule", "plain", "--format", "json")
    assert ran.status == 0
    says = "the adapter changes nothing at 3 of its 6 modules, where A or B is all zeros: whether the engine applies it"
    assert [note for note in ran.json["notes"] if note.startswith(says)]


def test_an_adapter_within_roundings_of_the_dtype_is_said(tmp_path):
    """An engine that does not apply it passed, and the report said "not judged: nothing"."""
    folder = write_adapter(tmp_path / "small", seed=1, modules=("q_proj",))
    tensors = load_file(folder / "adapter_model.safetensors")
    small = {key: tensor * (1e-3 if key.endswith("lora_B.weight") else 1) for key, tensor in tensors.items()}
    for dtype, num_small in ((torch.bfloat16, 3), (torch.float32, 0)):
        save_file(tensors, folder / "adapter_model.safetensors")
        assert not [*adapter_notes(load_adapted(Checkpoint(FOLDER), dtype=dtype, lora=folder))]
        save_file(small, folder / "adapter_model.safetensors")
        notes = [*adapter_notes(load_adapted(Checkpoint(FOLDER), dtype=dtype, lora=folder))]
        assert len(notes) == bool(num_small)
        assert all(f"bfloat16 or less at {num_small} of its 3 modules" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "is_said"),
    [("meta-llama/Llama-3-8B", True), ("Qwen/qwen3-tiny", False), (str(FOLDER) + "/", False), (None, False)],
)
def test_an_adapter_of_another_base_model_is_said(tmp_path, name, is_said):
    folder = write_adapter(tmp_path / "a", seed=1, modules=("q_proj",), base_model_name_or_path=name)
    notes = [*adapter_notes(load_adapted(Checkpoint(FOLDER), dtype=torch.float32, lora=folder))]
    assert bool(notes) == is_said
    assert all("names another base model, 'meta-llama/Llama-3-8B'" in note for note in notes)


def test_a_folder_that_is_no_adapter(harness, tmp_path):
    ran = harness("check", *WORKLOAD, "--lora", tmp_path)
    assert ran.status == 2
    assert "the adapter's config cannot be read" in ran.err


def test_swapped_tensors_are_refused(check, harness, adapter, tmp_path):
    folder = write_adapter(tmp_path / "swapped", seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    swapped_tensors = {
        key: tensors[key.replace("_A.", "_X.").replace("_B.", "_A.").replace("_X.", "_B.")].clone() for key in tensors
    }
    save_file(swapped_tensors, folder / "adapter_model.safetensors")
    ran = harness("golden", *WORKLOAD, "--lora", folder)
    assert (ran.status, ran.err[:4]) == (2, "H119")
