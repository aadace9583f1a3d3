"""Configs of adapters that PEFT, the oracle and the reference engine must read alike, or both of ours refuse."""

import random
from typing import Any

ACCEPTED: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj"], "alpha_pattern": {".*q_proj": 800}},
    {"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {"(q|k)_proj": 800, "q_proj": 1}},
    {"target_modules": ["q_proj"], "alpha_pattern": {"_proj": 800}},
    {"target_modules": ["q_proj"], "alpha_pattern": {r"layers\.1\..*": 800}, "rank_pattern": {r".*\.[02]\..*": 3}},
    {"target_modules": ["q_proj"], "alpha_pattern": {r"^model\.layers\.1.self_attn.q_proj": 800}, "use_rslora": True},
    {"target_modules": ["up_proj"], "layers_to_transform": 1},
    {"target_modules": ["up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    {"target_modules": ["up_proj", "model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
    {"target_modules": ["o_proj"], "layers_to_transform": [0, 2], "layers_pattern": ["h", "lay.*"]},
    {"target_modules": ["o_proj"], "layers_to_transform": [], "layers_pattern": []},
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.0.mlp.down_proj", "model.norm"]},
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*\.0\..*"},
    {"target_modules": r".*\.(0|2)\.(mlp|self_attn)\.(up|v)_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    {"target_modules": ["v_proj"], "init_lora_weights": False, "lora_dropout": 0.5, "task_type": "CAUSAL_LM"},
    {"target_modules": ["v_proj"], "init_lora_weights": "gaussian", "modules_to_save": None},
    {"target_modules": ["v_proj"], "init_lora_weights": "orthogonal", "r": 4},
    {"target_modules": ["v_proj"], "init_lora_weights": "mica"},
)
"""Settings of `peft.LoraConfig`."""

REFUSED: tuple[tuple[str, Any], ...] = (
    ("peft_type", "ADALORA"), ("peft_type", None), ("r", 0), ("r", -4), ("r", 4.0), ("r", True), ("r", "4"),
    ("r", 10**400), ("lora_alpha", 0), ("lora_alpha", "8"), ("lora_alpha", 10**400), ("lora_alpha", None),
    ("lora_alpha", float("inf")), ("lora_alpha", float("nan")), ("use_rslora", "false"), ("use_rslora", 1),
    ("rank_pattern", {"q_proj": 0}), ("rank_pattern", [4]), ("rank_pattern", {"(": 4}), ("rank_pattern", {"q.*": 8}),
    ("alpha_pattern", {"q_proj": "8"}), ("alpha_pattern", {"(?i)q_proj": 8}), ("alpha_pattern", {"q{1,9999999999}": 8}),
    ("target_modules", None), ("target_modules", []), ("target_modules", ["k_proj"]), ("target_modules", "q_proj"),
    ("target_modules", [1]), ("target_modules", "("), ("target_modules", ["q_proj", "mlp"]), ("target_modules", {}),
    ("target_modules", ["q_proj", "embed_tokens"]), ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", "all-linear"), ("exclude_modules", ["q_proj"]), ("exclude_modules", ".*1.*"),
    ("exclude_modules", 3), ("layers_to_transform", [0]), ("layers_to_transform", 1), ("layers_to_transform", "0"),
    ("layers_to_transform", True), ("layers_to_transform", [0.0]), ("layers_pattern", "layers"),
    ("layers_pattern", ["h"]), ("bias", "all"), ("bias", "lora_only"), ("bias", None), ("fan_in_fan_out", True),
    ("use_dora", True), ("use_dora", "no"), ("use_qalora", True), ("lora_bias", True), ("ensure_weight_tying", True),
    ("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1]), ("target_parameters", ["mlp.up_proj.weight"]),
    ("layer_replication", [[0, 2], [1, 3]]), ("alora_invocation_tokens", [1, 2]), ("megatron_config", {}),
    ("arrow_config", {}), ("kasa_config", {"beta": 1e-4}), ("velora_config", {}), ("monteclora_config", {}),
    ("use_bdlora", {}), ("use_bdlora", True), ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
    ("init_lora_weights", "lora_ga"), ("init_lora_weights", None), ("task_type", "SEQ_CLS"),
    ("enable_lora", [True, False]), ("a_variant_of_tomorrow", True), ("a_variant_of_tomorrow", {"scale": 2}),
)  # fmt: skip
"""A field of the config of an adapter with r 4 of all `q_proj`, and a value with which it is refused."""

_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "self_attn.q_proj",
          "mlp.up_proj", "layers.1.mlp.up_proj", "model.layers.2.self_attn.o_proj", "0.mlp.gate_proj")  # fmt: skip
_REGEXES = (r".*_proj", r".*\.[01]\..*(q|v)_proj", r"model\.layers\.\d+\.mlp\.(up|down)_proj", r".*self_attn\.\w_proj",
            "all-linear", "All-Linear", r".*(?<!o)_proj", r"model.layers.(0|2).*_proj")  # fmt: skip
_KEYS = ("q_proj", "self_attn.q_proj", r".*\.0\..*", r"layers\.[01]\.self_attn\.(q|k)_proj", "(q|k)_proj", "proj",
         "^model.layers.0.self_attn.k_proj", ".*proj", "down_proj|up_proj", "k_proj$", r"\w+",
         "model.layers.2.mlp.up_proj", r"layers\..*\.up_proj", "_proj", ".q_proj", "")  # fmt: skip


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Draw settings of `peft.LoraConfig`; a few name no module, or contradict each other."""
    settings: dict[str, Any] = {
        "r": draw.randint(1, 5),
        "lora_alpha": draw.choice([1, 8, 16, 0.5]),
        "use_rslora": draw.random() < 0.3,
        "lora_dropout": draw.choice([0.0, 0.1]),
        "init_lora_weights": draw.choice([True, False, "gaussian"]),
        "rank_pattern": {key: draw.randint(1, 5) for key in draw.sample(_KEYS, draw.choice([0, 1, 3]))},
        "alpha_pattern": {key: draw.choice([2, 3, 700]) for key in draw.sample(_KEYS, draw.choice([0, 1, 3]))},
        "exclude_modules": draw.choice([None, None, draw.sample(_NAMES, 2), draw.choice(_REGEXES[1:4])]),
    }
    if draw.random() < 0.3:
        return settings | {"target_modules": draw.choice(_REGEXES)}
    settings["target_modules"] = draw.sample(_NAMES, draw.randint(1, 5))
    if draw.random() < 0.4:
        settings["layers_to_transform"] = draw.choice([0, 2, [0, 1], [1], [], [7]])
        settings["layers_pattern"] = draw.choice([None, "layers", ["layers"], ["h", "layers"], "h", "", "lay.*|h"])
    return settings
