"""Small changes to the Triton kernels and to the functions that launch them: bugs that kernels have had."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness.properties.attention.cache import check_store
from harness.properties.attention.suite import check_definition

from .kernel_attention import KernelAttention

PACKAGE = "reference_engine.fast.kernels"
Suite = Callable[[Any], None]
"""Takes Hypothesis settings, and raises what it finds."""


def attention(focus: str) -> Suite:
    return lambda settings: check_definition(KernelAttention, settings, focus)


def store(settings: Any) -> None:
    check_store(KernelAttention, settings)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    module: str
    """Of `reference_engine.fast.kernels`."""
    old: str
    new: str
    suite: Suite
    killed_by: str = "attention equals its definition"
    """Beginning of the property that is to be named."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the kernels imported from a changed copy of their sources, and put the others back.

        Triton reads a kernel's source from its file, and kernels hold one another by name: all of them come from the
        copy, the changed ones and their callers alike.
        """
        package = importlib.import_module(PACKAGE)
        folder = Path(str(package.__file__)).parent
        names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        for name in names:  # all of them, or the changed ones would stay in place of those not yet imported
            importlib.import_module(f"{PACKAGE}.{name}")
        with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
            copied = Path(shutil.copytree(folder, Path(scratch, "kernels"), ignore=lambda *_: ["__pycache__"]))
            file = copied / f"{self.module}.py"
            source = file.read_text(encoding="utf-8")
            assert source.count(self.old) == 1, f"{self.module} has {source.count(self.old)} times: {self.old}"
            file.write_text(source.replace(self.old, self.new), encoding="utf-8")
            patch.setattr(package, "__path__", [str(copied)])
            for name in names:
                patch.delitem(sys.modules, f"{PACKAGE}.{name}")
                patch.delattr(package, name)
            yield


CHUNK, WHOLE, DECODE, WINDOW, SPLIT, GROUPED_QUERY = (
    attention(focus) for focus in ("chunk", "whole", "decode", "window", "split", "grouped-query")
)
STORED = "what is stored lies in its slot bit for bit"

MUTANTS = [
    # Prefill
    Mutant("mask aligned at the top left", "paged_prefill", "<= positions_Q[:, None]\n", "<= rows_Q[:, None]\n", CHUNK),
    Mutant("a row sees the next key", "paged_prefill", "<= positions_Q[:, None]\n", "<= positions_Q[:, None] + 1\n",
           CHUNK),
    Mutant("keys read past the chunk's end", "paged_prefill", "(keys_C >= first) & (keys_C < stop)", "keys_C >= first",
           CHUNK),
    Mutant("last tile of keys left out", "paged_prefill", "* TILE_KEYS, stop, TILE_KEYS",
           "* TILE_KEYS, tl.maximum(stop - TILE_KEYS, 1), TILE_KEYS", WHOLE),
    Mutant("every tile at its chunk's first position", "paged_prefill", "position + start)", "position)", WHOLE),
    Mutant("window one token longer (transformers#39408)", "paged_prefill", "> positions_Q[:, None] - WINDOW",
           ">= positions_Q[:, None] - WINDOW", WINDOW),
    Mutant("window begins with a whole tile", "paged_prefill", "first // TILE_KEYS * TILE_KEYS",
           "(first + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS", WINDOW),
    Mutant("KV heads tiled in prefill (jax-js#180)", "paged_prefill", "(head // GROUP)",
           "(head % (tl.num_programs(1) // GROUP))", GROUPED_QUERY),
    Mutant("block table of the first request", "paged_prefill", "request.to(tl.int64) * table_stride",
           "0 * table_stride", CHUNK),
    Mutant("scale of the padded head", "paged_prefill", "head_dim**-0.5", "tiling.padded_head_dim**-0.5", CHUNK),
    Mutant("rows of a fused projection taken as packed", "paged_prefill", "q_TNH.stride(0), out_TNH.stride(0)",
           "out_TNH.stride(0), out_TNH.stride(0)", CHUNK),
    # A tile
    Mutant("block off by one at a boundary", "attend_tile", "keys_C // BLOCK_SIZE",
           "tl.maximum(keys_C - 1, 0) // BLOCK_SIZE", WHOLE),
    Mutant("what is not read is not 0", "attend_tile", "is_read_C[:, None] & (dims_H < HEAD_DIM)[None, :]",
           "(keys_C >= 0)[:, None] & (dims_H < HEAD_DIM)[None, :]", DECODE),
    Mutant("product not scaled down", "attend_tile", "product_MH * shrink_M[:, None]", "product_MH", WHOLE),
    Mutant("sum not scaled down", "attend_tile", "sum_M * shrink_M", "sum_M", WHOLE),
    Mutant("first tile without a visible key", "attend_tile",
           'tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)', "new_largest_M", WINDOW),
    Mutant("scores in base e", "attend_tile", "LOG2_E = 1.4426950408889634", "LOG2_E = 1.0", attention("any")),
    # Decode
    Mutant("scale missing", "paged_decode", "head_dim**-0.5 * LOG2_E", "LOG2_E", DECODE),
    Mutant("padding of the last tile attended to", "paged_decode", "is_key_C[None, :]", "(keys_C >= 0)[None, :]",
           DECODE),
    Mutant("one key past the end", "paged_decode", "first + split_keys, context_len)",
           "first + split_keys, context_len + 1)", DECODE),
    Mutant("query heads tiled in decode (jax-js#180)", "paged_decode", "kv_head * GROUP + heads_G",
           "heads_G * tl.num_programs(1) + kv_head", GROUPED_QUERY),
    Mutant("window of the first keys, not the latest", "paged_decode", "context_len - num_keys + split * split_keys",
           "split * split_keys", WINDOW),
    Mutant("window one token longer in decode", "paged_decode", "tl.minimum(num_keys, WINDOW)",
           "tl.minimum(num_keys, WINDOW + 1)", WINDOW),
    Mutant("a request without keys divided by 0", "attend_tile", "tl.where(sum_M == 0.0, 1.0, sum_M)", "sum_M",
           attention("masked rows")),
    # Splits and their merge
    Mutant("last split, if shorter, left out", "paged_decode", "splits_P * split_keys < num_keys",
           "(splits_P + 1) * split_keys <= num_keys", SPLIT),
    Mutant("keys beyond the last split", "paged_decode", "(num_keys + MAX_SPLITS * TILE_KEYS - 1)", "num_keys", SPLIT),
    Mutant("a key in two splits", "paged_decode", "tl.minimum(first + split_keys,",
           "tl.minimum(first + split_keys + 1,", SPLIT),
    Mutant("log of the sum in base e", "attend_tile", "largest_M + tl.log2(sum_M)", "largest_M + tl.log(sum_M)", SPLIT),
    Mutant("merged in base e", "paged_decode", "tl.exp2(log_sum_P - base)", "tl.exp(log_sum_P - base)", SPLIT),
    Mutant("splits merged without their weights", "paged_decode", "context_PH * weight_P[:, None]", "context_PH",
           SPLIT),
    Mutant("merged, but not divided", "paged_decode", ", tl.sum(weight_P, 0))", ", tl.sum(weight_P, 0) * 0.0 + 1.0)",
           SPLIT),
    Mutant("parts of the first request merged for all", "paged_decode", "(request * tl.num_programs(1) + head)", "head",
           SPLIT),
    Mutant("a full single split left to the merge, which leaves it alone", "paged_decode", "if num_keys > split_keys:",
           "if num_keys >= split_keys:", SPLIT),
    Mutant("the second split taken for empty", "paged_decode", "(split * split_keys >= num_keys)",
           "((split + 1) * split_keys >= num_keys)", SPLIT),
    # The store
    Mutant("K stored in place of V", "store_kv", "columns_W, v_W", "columns_W, k_W", store, STORED),
    Mutant("stored in the order of rows", "store_kv", "k_cache_ptr + slot", "k_cache_ptr + row", store, STORED),
    Mutant("padding stored in slot 0", "store_kv", "tl.load(slots_ptr + row).to(tl.int64)",
           "tl.maximum(tl.load(slots_ptr + row).to(tl.int64), 0)", store, STORED),
    Mutant("last column not stored", "store_kv", "(columns_W < WIDTH)", "(columns_W < WIDTH - 1)", store, STORED),
    Mutant("fused rows stored as if packed", "store_kv", "row * v_stride", "row * WIDTH", store, STORED),
]  # fmt: skip

SURVIVORS = [
    # The request's own keys lie there, and are finite: only a NaN outside the window, which tests of this kernel write
    # there, shows that they are read.
    Mutant("keys in front of the window read", "paged_prefill", "(keys_C >= first) & (keys_C < stop)", "keys_C < stop",
           WINDOW, ""),
    # Not a bug: only more programs are started, which find no keys.
    Mutant("splits as if there were no window", "paged_decode", "min(max_keys, window)", "max_keys", WINDOW, ""),
    # The interpreter multiplies float32 in float32 whatever is asked for: only a GPU would round.
    Mutant("scores in TF32", "attend_tile", 'tl.trans(k_CH), input_precision="ieee"',
           'tl.trans(k_CH), input_precision="tf32"', attention("any"), ""),
    # Caches of these sizes are far below 2^31 elements.
    Mutant("slots in 32 bits", "store_kv", "tl.load(slots_ptr + row).to(tl.int64)",
           "tl.load(slots_ptr + row).to(tl.int32)", store, ""),
]  # fmt: skip
"""Mutants that no property kills, and why."""
