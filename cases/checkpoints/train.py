"""Train the tiny checkpoints the test suite runs on, from a seed and nothing else.

Random weights hide bugs: their logits are nearly flat, and a wrong cache moves them without anybody seeing it. These
models have learnt to *recite*: after random words and a separator they say the same words again. Each greedy token is
then unambiguous and depends on keys and values far after it, so a wrong cache, position, head or norm flips it.

    python cases/checkpoints/train.py all
    python cases/checkpoints/train.py llama-tiny --out /tmp/checkpoints --steps 300 --seed 7

One seed gives one checkpoint, bit for bit, on one machine (the script trains on a single thread).
"""

from __future__ import annotations

import copy
import json
import math
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import transformers
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "ch", "sh")
RIMES = ("a", "e", "i", "o", "u", "ai", "au", "ei", "ou", "an", "en", "in", "on", "un")
WORDS = tuple(onset + rime for onset in ONSETS for rime in RIMES)
UNK, BOS, EOS, SEPARATOR = "<unk>", "<bos>", "<eos>", "|"
VOCABULARY = (UNK, BOS, EOS, SEPARATOR, *WORDS)
BOS_ID, EOS_ID, SEPARATOR_ID = 1, 2, 3
BLANK = "\u0120"
"""How byte-level tokenizers write a blank."""

MAX_WORDS = 176
"""Most words a text is trained on: 355 tokens with <bos>, the separator, the recital and <eos>."""
TOKENS_PER_STEP = 2048
FIRST_MAX_WORDS = 8
ADVANCE_ABOVE = 0.9
"""The curriculum lengthens the texts whenever the running accuracy passes this."""
PEAK_LR, FINAL_LR, WARM_UP_STEPS = 3e-3, 3e-4, 100

DISTANCE_BUCKETS = {"1-32": (1, 32), "33-64": (33, 64), "65-128": (65, 128), ">128": (129, MAX_WORDS + 1)}
"""Distance from a word to its source: the number of words of the text and one for the separator."""
TEXTS_PER_BUCKET = 64
EVALUATION_SEED_OFFSET = 1_000_000
"""Keeps the held-out texts away from the seeds of training."""
LOST_BLOCK = (16, 32)
"""Positions hidden from attention by the ablation that imitates one lost block of a paged cache."""

SCHEMA_VERSION = 1
Ablation = Callable[[PreTrainedModel], PreTrainedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What distinguishes one checkpoint from the others."""

    model_class: type[PreTrainedModel]
    """HuggingFace's own class: there is no model code here."""
    config: PreTrainedConfig
    """The whole architecture."""
    tokenizer: PreTrainedTokenizerFast
    """What the model is trained and saved with."""
    tokenizer_class: str
    """Name of the tokenizer's class in tokenizer_config.json."""
    steps: int
    """Optimiser steps unless the command line says otherwise."""
    max_shard_size: str = "5MB"
    """Passed to `save_pretrained`; a small value splits the weights over several files."""
    ablations: dict[str, Ablation] = field(default_factory=dict)
    """Features taken away from the trained model, by the name of the accuracy that is left."""


# --- text ---------------------------------------------------------------------------------------------------------


def random_words(num_words: int, seed: int) -> list[str]:
    """Draw words with replacement."""
    return random.Random(seed).choices(WORDS, k=num_words)


def half_recited(num_words: int, num_recited: int, seed: int) -> tuple[str, str]:
    """Return a prompt of `num_words` words, the separator and the first `num_recited` words, and what must follow."""
    words = random_words(num_words, seed)
    prompt = [*words, SEPARATOR, *words[:num_recited]]
    return " ".join(prompt), " ".join(words[num_recited:])


def sample_recitals(
    tokenizer: PreTrainedTokenizerFast, num_words: list[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return ids and where the recital is, each [texts, tokens]: <bos>, words, the separator, the same words, <eos>.

    Shorter texts are filled up with <eos> on the right. The recital includes the first <eos> and nothing after it.
    """
    index_BN = torch.randint(len(WORDS), (len(num_words), max(num_words)), generator=generator).tolist()
    texts = [" ".join(WORDS[i] for i in row[:count]) for row, count in zip(index_BN, num_words, strict=True)]
    rows = [tokenizer.encode(f"{text} {SEPARATOR} {text}{EOS}") for text in texts]
    ids_BT = torch.full((len(rows), max(map(len, rows))), EOS_ID)
    is_recital_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for text, row in enumerate(rows):
        ids_BT[text, : len(row)] = torch.tensor(row)
        is_recital_BT[text, row.index(SEPARATOR_ID) + 1 : len(row)] = True
    return ids_BT, is_recital_BT


# --- tokenizers ---------------------------------------------------------------------------------------------------


def build_word_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word, words separated by blanks."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return finish_tokenizer(backend)


def build_byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as Qwen's: a word is one token with the blank before it, or two where the 256 ids ran out.

    transformers loads every Qwen2 checkpoint through `Qwen2Tokenizer`, whatever its files say, and that class takes
    nothing from tokenizer.json but vocabulary, merges and post-processor. The first word of a text has no blank before
    it and falls into letters.
    """
    vocabulary, merges = byte_level_vocabulary()
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    qwen2 = Qwen2Tokenizer()
    backend.normalizer = qwen2.backend_tokenizer.normalizer
    backend.pre_tokenizer = qwen2.backend_tokenizer.pre_tokenizer
    backend.decoder = qwen2.backend_tokenizer.decoder
    return finish_tokenizer(backend)


def byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ids and merges: letters, then a blank and an onset, then words of one vowel, then as many as fit."""
    letters = sorted(set("".join(WORDS)))
    singles = [letter for letter in letters if letter not in "aeiou"]
    merges = [(BLANK, SEPARATOR), *((BLANK, letter) for letter in singles), (BLANK + "c", "h"), (BLANK + "s", "h")]
    merges += [(BLANK + onset, rime) for rime in RIMES[:5] for onset in ONSETS]
    num_left = len(VOCABULARY) - len((UNK, BOS, EOS, BLANK, SEPARATOR)) - len(letters) - len(merges)
    merges += [(BLANK + onset + rime[0], rime[1]) for rime in RIMES[5:] for onset in ONSETS][:num_left]
    tokens = [UNK, BOS, EOS, BLANK + SEPARATOR, SEPARATOR, BLANK, *letters, *map("".join, merges[1:])]
    return {token: index for index, token in enumerate(tokens)}, merges


def finish_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Put <bos> in front, as Llama's tokenizer does, and name the special tokens."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def save_tokenizer(recipe: Recipe, folder: Path) -> None:
    """Write the tokenizer under the class name every release of transformers knows."""
    recipe.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": recipe.tokenizer_class}
    path.write_text(json.dumps(config, indent=2) + "\n")


# --- model --------------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Say whether this is one of HuggingFace's RMSNorm classes."""
    return type(module).__name__.endswith(("RMSNorm", "RMSNormGated"))


def is_qkv(name: str) -> bool:
    """Say whether a parameter's name belongs to the query, key or value projection."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj"))


def neutral_norm_weight(module: nn.Module) -> float:
    """Return the weight with which a norm multiplies by one: Gemma's and Qwen3-Next's multiply by 1 + weight."""
    return 0.0 if type(module).__name__.startswith(("Gemma", "Qwen3NextRMSNorm")) and not is_gated(module) else 1.0


def is_gated(module: nn.Module) -> bool:
    """Say whether a norm multiplies by a gate, too."""
    return type(module).__name__.endswith("Gated")


@torch.no_grad()
def build_model(recipe: Recipe) -> PreTrainedModel:
    """Initialise as HuggingFace does, then give norms and biases values that cannot be left out unnoticed."""
    model = recipe.model_class(recipe.config)
    for module in model.modules():
        if is_norm(module):
            spread = torch.exp(0.5 * torch.randn_like(module.weight))
            module.weight.copy_(spread - 1.0 + neutral_norm_weight(module))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(0.5 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def without_rope_scaling(model: PreTrainedModel) -> PreTrainedModel:
    """Rotate by the plain frequencies."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    return _same_weights(model, config)


def without_local_rope_theta(model: PreTrainedModel) -> PreTrainedModel:
    """Rotate the layers with a window by the base of the others."""
    config = copy.deepcopy(model.config)
    rope = config.rope_parameters
    config.rope_parameters = {**rope, "sliding_attention": rope["full_attention"]}
    return _same_weights(model, config)


def without_window(model: PreTrainedModel) -> PreTrainedModel:
    """Let every layer see everything."""
    config = copy.deepcopy(model.config)
    config.sliding_window = config.max_position_embeddings
    return _same_weights(model, config)


def with_the_worst_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Send each token to the experts that its router likes least."""
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.neg_()
    return changed


@torch.no_grad()
def without_states(model: PreTrainedModel) -> PreTrainedModel:
    """Let the recurrences forget everything before each token."""
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(20.0)
    return changed


@torch.no_grad()
def without_convolutions(model: PreTrainedModel) -> PreTrainedModel:
    """Let the convolutions see each token alone."""
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter[..., :-1] = 0.0
    return changed


def with_default_rope_theta(model: PreTrainedModel) -> PreTrainedModel:
    """Rotate as if the base were 10,000."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 10_000.0}
    return _same_weights(model, config)


def _same_weights(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    changed = type(model)(config)
    changed.load_state_dict(model.state_dict())
    return changed.eval()


@torch.no_grad()
def without_bias(model: PreTrainedModel) -> PreTrainedModel:
    """Set the biases of the query, key and value projections to zero."""
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if is_qkv(name) and name.endswith("bias"):
            parameter.zero_()
    return changed


@torch.no_grad()
def _with_unit_norms(model: PreTrainedModel, chosen: Callable[[str], bool]) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    for name, module in changed.named_modules():
        if is_norm(module) and chosen(name):
            module.weight.fill_(neutral_norm_weight(module))
    return changed


def without_norm_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Set the weights of all norms to one."""
    return _with_unit_norms(model, lambda name: True)


def without_qk_norm_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Set the weights of the query and key norms to one."""
    return _with_unit_norms(model, lambda name: name.endswith(("q_norm", "k_norm")))


SHARED_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def llama_recipe() -> Recipe:
    """Tied head, and frequencies scaled so strongly that leaving it out shows within the trained length."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return Recipe(
        model_class=LlamaForCausalLM,
        config=LlamaConfig(
            **SHARED_SHAPE, head_dim=32, tie_word_embeddings=True, rope_parameters=rope, rms_norm_eps=1e-5
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_without_rope_scaling": without_rope_scaling,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def qwen2_recipe() -> Recipe:
    """Biases on query, key and value, a head of its own, two shards.

    Several engines compute Qwen2's head size as hidden / heads, whatever config.json says: it is 32 either way.
    """
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Recipe(
        model_class=Qwen2ForCausalLM,
        config=Qwen2Config(
            **SHARED_SHAPE | {"hidden_size": 128, "num_attention_heads": 4},
            tie_word_embeddings=False,
            rope_parameters=rope,
            rms_norm_eps=1e-6,
        ),
        tokenizer=build_byte_level_tokenizer(),
        tokenizer_class="Qwen2Tokenizer",
        steps=3000,
        max_shard_size="1MB",
        ablations={
            "accuracy_without_bias": without_bias,
            "accuracy_with_default_rope_theta": with_default_rope_theta,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def qwen3_recipe() -> Recipe:
    """Norms on query and key, heads wider than hidden / heads, tied head."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Recipe(
        model_class=Qwen3ForCausalLM,
        config=Qwen3Config(
            **SHARED_SHAPE, head_dim=32, tie_word_embeddings=True, rope_parameters=rope, rms_norm_eps=1e-6
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_without_qk_norm_weights": without_qk_norm_weights,
            "accuracy_with_default_rope_theta": with_default_rope_theta,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def qwen3_moe_recipe() -> Recipe:
    """Qwen3 with eight experts in place of each MLP, two of them for a token."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Recipe(
        model_class=Qwen3MoeForCausalLM,
        config=Qwen3MoeConfig(
            **SHARED_SHAPE,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            rope_parameters=rope,
            rms_norm_eps=1e-6,
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_with_worst_experts": with_the_worst_experts,
            "accuracy_without_qk_norm_weights": without_qk_norm_weights,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def gemma3_recipe() -> Recipe:
    """Five layers that see 32 tokens and one that sees all, each kind with its own rotary base.

    Six layers, since some engines know Gemma 3's pattern by heart and do not read it from config.json.
    """
    return Recipe(
        model_class=Gemma3ForCausalLM,
        config=Gemma3TextConfig(
            **SHARED_SHAPE
            | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4},
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=32,
            tie_word_embeddings=True,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            },
            rms_norm_eps=1e-6,
            pad_token_id=EOS_ID,
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_without_window": without_window,
            "accuracy_without_local_rope_theta": without_local_rope_theta,
            "accuracy_without_qk_norm_weights": without_qk_norm_weights,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def qwen3_next_recipe() -> Recipe:
    """Three layers with a gated delta rule and one with gated attention; experts in all but the second layer."""
    return Recipe(
        model_class=Qwen3NextForCausalLM,
        config=Qwen3NextConfig(
            **SHARED_SHAPE
            | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
            rms_norm_eps=1e-6,
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_without_states": without_states,
            "accuracy_without_convolutions": without_convolutions,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


def deepseek_v3_recipe() -> Recipe:
    """Latent attention with stretched rotary, whose scores grow with it; grouped experts after the first layer."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    }
    return Recipe(
        model_class=DeepseekV3ForCausalLM,
        config=DeepseekV3Config(
            **SHARED_SHAPE
            | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            tie_word_embeddings=True,
            rope_parameters=rope,
            rms_norm_eps=1e-5,
        ),
        tokenizer=build_word_tokenizer(),
        tokenizer_class="PreTrainedTokenizerFast",
        steps=2500,
        ablations={
            "accuracy_without_rope_scaling": without_rope_scaling,
            "accuracy_without_norm_weights": without_norm_weights,
        },
    )


RECIPES = {
    "llama-tiny": llama_recipe,
    "qwen2-tiny": qwen2_recipe,
    "qwen3-tiny": qwen3_recipe,
    "qwen3-moe-tiny": qwen3_moe_recipe,
    "gemma3-tiny": gemma3_recipe,
    "qwen3-next-tiny": qwen3_next_recipe,
    "deepseek-v3-tiny": deepseek_v3_recipe,
}


# --- training -----------------------------------------------------------------------------------------------------


def recital_logits(
    model: PreTrainedModel, ids_BT: Tensor, is_recital_BT: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return logits and targets of the recitals, flattened to [targets, vocabulary] and [targets]."""
    logits = model(input_ids=ids_BT[:, :-1], use_cache=False, **kwargs).logits
    return logits[is_recital_BT[:, 1:]], ids_BT[is_recital_BT]


def learning_rate(step: int, steps: int) -> float:
    """Rise linearly, then fall along half a cosine."""
    if step < WARM_UP_STEPS:
        return PEAK_LR * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def sample_batch(tokenizer: PreTrainedTokenizerFast, limit: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix all lengths up to the limit: at a fixed length a model learns positions instead of looking words up."""
    num_texts = max(1, TOKENS_PER_STEP // (2 * limit + 3))
    num_words = torch.randint(1, limit + 1, (num_texts,), generator=generator).tolist()
    return sample_recitals(tokenizer, num_words, generator)


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> float:
    """Train in place; return the mean loss of the last 50 steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    limit, running_accuracy, losses = FIRST_MAX_WORDS, 0.0, []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits, targets = recital_logits(model, *sample_batch(tokenizer, limit, generator))
        loss = nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        accuracy = float((logits.argmax(-1) == targets).float().mean())
        running_accuracy = 0.8 * running_accuracy + 0.2 * accuracy
        if running_accuracy > ADVANCE_ABOVE and limit < MAX_WORDS:
            limit, running_accuracy = min(MAX_WORDS, math.ceil(1.5 * limit)), 0.0
        if step % 50 == 0:
            print(f"step {step:5d}  limit {limit:3d}  loss {loss.item():.4f}  accuracy {accuracy:.3f}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


# --- evaluation ---------------------------------------------------------------------------------------------------


def held_out_texts(
    tokenizer: PreTrainedTokenizerFast, bucket: str, seed: int, num_texts: int = TEXTS_PER_BUCKET
) -> tuple[Tensor, Tensor]:
    """Return texts as `sample_recitals` does, with distances spread evenly over the bucket."""
    low, high = DISTANCE_BUCKETS[bucket]
    generator = torch.Generator().manual_seed(seed + EVALUATION_SEED_OFFSET + low)
    distances = torch.linspace(max(low, 2), high, num_texts).round().int().tolist()
    return sample_recitals(tokenizer, [distance - 1 for distance in distances], generator)


@torch.no_grad()
def bucket_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    bucket: str,
    *,
    seed: int,
    num_texts: int = TEXTS_PER_BUCKET,
) -> float:
    """Teacher-forced accuracy of the argmax over the recitals and their <eos>."""
    logits, targets = recital_logits(model, *held_out_texts(tokenizer, bucket, seed, num_texts))
    return round(float((logits.argmax(-1) == targets).float().mean()), 4)


def accuracy_by_distance(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, float]:
    """Return the accuracy of each bucket of distances."""
    return {bucket: bucket_accuracy(model, tokenizer, bucket, seed=seed) for bucket in DISTANCE_BUCKETS}


@torch.no_grad()
def lost_block_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, seed: int, num_texts: int = TEXTS_PER_BUCKET
) -> float:
    """Hide `LOST_BLOCK` from attention, as one lost cache block would; return the accuracy of the tokens in it."""
    ids_BT, is_recital_BT = held_out_texts(tokenizer, "65-128", seed, num_texts)
    mask_BT = torch.ones_like(ids_BT[:, :-1])
    mask_BT[:, LOST_BLOCK[0] : LOST_BLOCK[1]] = 0
    from_block_BT = torch.zeros_like(is_recital_BT)
    for text, row in enumerate(is_recital_BT):
        recital = row.nonzero()
        # The separator repeats as <eos>; everything before either repeats at the same distance.
        distance = int(recital[-1]) - int(recital[0]) + 1
        from_block_BT[text, distance + LOST_BLOCK[0] : distance + LOST_BLOCK[1]] = True
    logits, targets = recital_logits(model, ids_BT, from_block_BT, attention_mask=mask_BT)
    return round(float((logits.argmax(-1) == targets).float().mean()), 4)


def norm_spread(model: PreTrainedModel) -> float:
    """Return the standard deviation of the norm whose weights are the most alike."""
    return round(min(float(module.weight.detach().std()) for module in model.modules() if is_norm(module)), 4)


# --- saving -------------------------------------------------------------------------------------------------------


def save(model: PreTrainedModel, recipe: Recipe, card: dict[str, Any], folder: Path) -> None:
    """Write the folder exactly as a checkpoint from the hub looks, plus training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID, do_sample=False
    )
    model.save_pretrained(folder, max_shard_size=recipe.max_shard_size)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    name_experts_as_the_hub(folder / "config.json")
    save_tokenizer(recipe, folder)
    (folder / "training.json").write_text(json.dumps(card, indent=2) + "\n")


@torch.no_grad()
def round_float32_routers(model: PreTrainedModel) -> None:
    """Let routers that are float32 in every dtype have weights of bfloat16, as published checkpoints have them.

    transformers 5.17 takes the weights in the model's dtype.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight") and model.config.model_type == "deepseek_v3":
            parameter.copy_(parameter.bfloat16())


def name_experts_as_the_hub(path: Path) -> None:
    """Write the number of experts under the name that published checkpoints, and so other engines, have for it."""
    config = json.loads(path.read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
        path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def make_card(model: PreTrainedModel, recipe: Recipe, *, seed: int, steps: int) -> dict[str, Any]:
    """Train the model; return what training.json says about it."""
    start = time.perf_counter()
    final_loss = train(model, recipe.tokenizer, steps, seed)
    wall_s = time.perf_counter() - start
    model.eval()
    round_float32_routers(model)
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": seed,
        "steps": steps,
        "max_words": MAX_WORDS,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "final_loss": round(final_loss, 5),
        "accuracy": accuracy_by_distance(model, recipe.tokenizer, seed),
        "accuracy_with_lost_block": lost_block_accuracy(model, recipe.tokenizer, seed=seed),
        **{
            name: accuracy_by_distance(ablate(model), recipe.tokenizer, seed)
            for name, ablate in recipe.ablations.items()
        },
        "smallest_norm_weight_std": norm_spread(model),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "training_wall_s": round(wall_s, 1),
    }


def make_checkpoint(name: str, folder: Path, *, steps: int | None, seed: int) -> None:
    """Train one checkpoint and write it to `folder`."""
    torch.manual_seed(seed)
    recipe = RECIPES[name]()
    model = build_model(recipe)
    card = make_card(model, recipe, seed=seed, steps=recipe.steps if steps is None else steps)
    save(model, recipe, card, folder)
    print(f"{name} -> {folder}\n{json.dumps(card, indent=2)}", flush=True)


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}, or all.")],
    out: Annotated[Path, typer.Option(help="Folder that gets one folder for each checkpoint.")] = Path(__file__).parent,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; the recipe's own if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the initial weights and the texts.")] = 0,
) -> None:
    """Train tiny checkpoints that recite."""
    if name != "all" and name not in RECIPES:
        raise typer.BadParameter(f"unknown checkpoint {name!r}: expected one of {', '.join(RECIPES)}, or all")
    torch.set_num_threads(1)
    for recipe in RECIPES if name == "all" else [name]:
        make_checkpoint(recipe, out / recipe, steps=steps, seed=seed)


if __name__ == "__main__":
    typer.run(main)
