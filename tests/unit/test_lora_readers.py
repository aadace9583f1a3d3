"""Two readers of adapters, the oracle's and the reference engine's, which share no line, and PEFT itself as a third."""

import copy
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.errors import Code, HarnessError
from harness.oracle.lora import LoraLinear, add_adapter
from harness.oracle.model import load_model
from reference_engine import EngineError, ModelConfig
from reference_engine.lora.adapter import read_adapter

from .lora_adapter import FOLDER, write_adapter
from .lora_cases import ACCEPTED, REFUSED, random_settings

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what it is asked for

NUM_DRAWN = 60


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def hf():
    return load_model(FOLDER, dtype=torch.float32, stays=True)


@pytest.fixture
def read(base, hf):
    """Read an adapter three times: what each adds to which weight, or None where it is refused."""

    def by_oracle(folder):
        adapted = copy.copy(hf)
        adapted.model = copy.deepcopy(hf.model)
        add_adapter(adapted, folder)
        layers = {path: item for path, item in adapted.model.named_modules() if isinstance(item, LoraLinear)}
        return {path: item.scaling * item.lora_b.double() @ item.lora_a.double() for path, item in layers.items()}

    def by_engine(folder):
        config = ModelConfig.from_folder(FOLDER)
        adapter = read_adapter("own", folder, config, torch.float32, torch.device("cpu"))
        updates = [update for product in adapter.updates.values() for update in product]
        return {item.name: item.scaling * item.b_OR.double() @ item.a_RI.double() for item in updates}

    def by_peft(folder):
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).double()
        layers = {path: item for path, item in model.base_model.model.named_modules() if hasattr(item, "lora_A")}
        return {path: layer.get_delta_weight("default").detach() for path, layer in layers.items()}

    return lambda folder: (refusable(by_oracle, folder), refusable(by_engine, folder), lambda: by_peft(folder))


def refusable(reader, folder):
    try:
        return reader(folder)
    except (HarnessError, EngineError) as error:
        if getattr(error, "code", Code.BAD_LORA) is not Code.BAD_LORA:
            raise
        return None


def save_by_peft(base, settings, folder, seed):
    """Write an adapter as PEFT does, with random weights; None if it makes none of these settings."""
    try:
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    except (ValueError, TypeError):
        return None
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    model.save_pretrained(folder)
    return folder


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for path in actual:
        torch.testing.assert_close(
            actual[path], expected[path], rtol=1e-5, atol=1e-6, msg=lambda text, at=path: f"{at}: {text}"
        )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", ACCEPTED, ids=json.dumps)
def test_what_peft_saved_is_read_as_peft_reads_it(base, read, settings, tmp_path):
    folder = save_by_peft(base, settings, tmp_path / "adapter", seed=1)
    oracle, engine, by_peft = read(folder)
    assert oracle
    assert_same(oracle, by_peft())
    assert_same(oracle, engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch", range(4))
def test_drawn_configs(base, read, batch, tmp_path):
    """What PEFT makes of them is read alike, and the tensors of one with the config of another are refused."""
    draw = random.Random(batch)
    made = [save_by_peft(base, random_settings(draw), tmp_path / f"{at}", seed=at) for at in range(NUM_DRAWN // 4)]
    made = [folder for folder in made if folder is not None]
    assert len(made) > NUM_DRAWN // 8
    for folder in made:
        oracle, engine, by_peft = read(folder)
        if oracle is None:  # it sorts its patterns where it saves them, and cannot load these ranks itself
            assert engine is None
            with pytest.raises(RuntimeError, match="size mismatch"):
                by_peft()
            continue
        assert_same(oracle, by_peft())
        assert_same(oracle, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", range(4))
def test_configs_that_are_changed_behind_their_weights(base, read, batch, tmp_path):
    """Both readers refuse, or both read what PEFT reads."""
    draw = random.Random(100 + batch)
    num_refused = 0
    for at in range(NUM_DRAWN // 4):
        settings = random_settings(draw)
        folder = save_by_peft(base, settings, tmp_path / f"{at}", seed=at)
        if folder is None:
            continue
        changes = random_settings(draw)
        changed = {field: changes[field] for field in draw.sample(sorted(changes), draw.choice([1, 1, 2, 3]))}
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changed))
        oracle, engine, by_peft = read(folder)
        assert (oracle is None) == (engine is None), changed
        num_refused += oracle is None
        if oracle is not None:
            assert_same(oracle, engine)
            assert_same(oracle, by_peft())
    assert num_refused


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_is_not_understood_is_refused_by_both(read, field, value, tmp_path):
    folder = write_adapter(tmp_path / "adapter", seed=1, modules=("q_proj",))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert read(folder)[0]
    (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    oracle, engine, _ = read(folder)
    assert oracle is engine is None


def test_every_field_of_peft_is_known():
    """A version of PEFT with another field fails here: is it without effect, refused, or read?"""
    from harness.oracle.lora import _WITHOUT_EFFECT, AdapterConfig
    from reference_engine.lora import config as engine

    refused = {
        "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
        "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora",
        "velora_config",
    }  # fmt: skip
    known = {*AdapterConfig.model_fields, *_WITHOUT_EFFECT}
    assert {*engine._READ, *engine._SERVED, *engine._WITHOUT_EFFECT} == known
    assert set(peft.LoraConfig.__dataclass_fields__) - known == refused


def test_an_adapter_of_zeros_is_read(read, tmp_path):
    folder = write_adapter(tmp_path / "adapter", seed=1, modules=("q_proj",))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {key: tensor * ("lora_A" in key) for key, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    oracle, engine, _ = read(folder)
    assert_same(oracle, engine)
    assert not any(delta.any() for delta in oracle.values())
