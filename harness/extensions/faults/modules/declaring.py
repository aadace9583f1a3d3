"""The tables of faults and sound variants of model objects of transformers, and of a step engine.

Each says where it is first wrong (a pattern of the operation, the position of its first wrong row in request 0 or None
if the tokens decide that), and which words make a statement about the cause true (None: no known cause is).
`way` applies a sound way of computing to families in a dtype under a schedule: "family dtype schedule", with f for
float32, b for bfloat16, h for float16. HF itself loses states in chunks of Mamba, Jamba and RecurrentGemma.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.extensions.faults.fault import NOTHING, Category, EngineKind, Fault, FaultConfig, Variant

F16, BF16 = "float16", "bfloat16"
PROMPT = 40
"""Tokens of request 0: the first row of decode is at this position. Windows are of 16, of experts 2 in 8."""
PROMPT_LENGTHS = (PROMPT, 23)
NUM_NEW_TOKENS = 8

ATTENTION = r"attention|context|o_proj|out_proj|dense|c_proj|q_rope|query"
HEADS = r"head"
WINDOW = r"window"
SCALE = r"scale|scaling"
MASK = r"mask|causal|future|later|own token|own position|newest|history|sees|hidden|not seen|key"
POSITION = r"position"
ROTARY = r"rotat|rotary|rope|cos|sin"
ORDER = r"order|row|permut|interleav|exchang|swap|transpos|other output|of output"
FACTOR = r"factor|gain|scal|multipl|times"
CHUNK = r"chunk|step|history|earlier|forgot|state|lost|block|cache"
STATE = r"state|forgot|history|zero|step|earlier"
ROUND = r"round|bits|quanti|bfloat16|float8|int8|precision|e4m3|dtype"
EXPERT = r"expert"


def module_prompts(seed: int) -> tuple[tuple[int, ...], ...]:
    """Return token ids of `PROMPT_LENGTHS`."""
    generator = torch.Generator().manual_seed(20261123 + seed)
    return tuple(tuple(torch.randint(3, 250, (size,), generator=generator).tolist()) for size in PROMPT_LENGTHS)


def declaring(faults: list[Fault], category: Category, engine: EngineKind = EngineKind.MODULE) -> Callable[..., None]:
    """Return what adds a fault to a table: `fault(model_type, id, summary, tap, position, words, change, ...)`."""

    def fault(
        model_type: str, id: str, summary: str, tap: str, position: int | None, words: str | None, change: Any, *,
        dtype: str = "float32", schedule: str = "plain", settings: Mapping[str, Any] | None = None,
        request: int | None = 0
    ) -> None:  # fmt: skip
        faults.append(
            Fault(
                id=f"{model_type}/{id}",
                category=category,
                summary=f"{summary[0].upper()}{summary[1:]}.",
                inject=change,
                tap=tap,
                row=(request, position),
                cause=words or NOTHING,
                engine=engine,
                setting=FaultConfig(
                    model=model_type,
                    dtype=dtype,
                    schedule=schedule,
                    config=settings or {},
                    max_new_tokens=NUM_NEW_TOKENS,
                ),
            )
        )

    return fault


DTYPES = {"f": "float32", "b": "bfloat16", "h": "float16"}
SOUND: list[Variant] = []


def way(name: str, change: Any, *cases: str, threads: int = 1, engine: EngineKind = EngineKind.MODULE) -> None:
    for case in cases:
        family, dtype, schedule = case.split()
        setting = FaultConfig(
            model=family, dtype=DTYPES[dtype], schedule=schedule, threads=threads, max_new_tokens=NUM_NEW_TOKENS
        )
        id = f"{family}/{name} {DTYPES[dtype]} {schedule}"
        SOUND.append(Variant(id=id, summary=name, setting=setting, engine=engine, inject=change))
