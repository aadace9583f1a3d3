"""Shapes and dtypes, before any value: what fits, and what is said where it does not."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.formats.recording import Replicated
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.cache_format import CacheFormat
from harness.judge.compare.shapes import cache_format, check_taps, engine_dtype, keeps_one_less, refuse_part

GRAPH = Graph((
    Operation(tap="k", kind=Kind.LINEAR), Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",)),
    Operation(tap="v_cache", kind=Kind.CACHE, inputs=("v",)), Operation(tap="choice", kind=Kind.CHOICE),
))  # fmt: skip


def recording(*taps, dtype="bfloat16", **manifest):
    entries = [SimpleNamespace(name=name, dtype=kind, shape=shape) for name, kind, shape in taps]
    return SimpleNamespace(path="folder", taps=entries, manifest=SimpleNamespace(dtype=dtype, **manifest))


def refused(function, *arguments):
    with pytest.raises(HarnessError) as caught:
        function(*arguments)
    return caught.value


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_of_an_engine(name):
    assert engine_dtype(recording(dtype=name)) is getattr(torch, name)


@pytest.mark.parametrize("name", ["int32", "nonsense", "Tensor", "bool"])
def test_what_no_engine_computes_in_is_refused(name):
    error = refused(engine_dtype, recording(dtype=name))
    assert error.code is Code.BAD_MANIFEST
    assert name in str(error)


def test_formats_of_a_cache():
    declared = recording(numerics=Numerics(cache="Q8_0", cache_values="float16"))
    assert cache_format(declared, "k") == CacheFormat(name="Q8_0")
    assert cache_format(declared, "v") == CacheFormat(name="float16")
    assert cache_format(recording(numerics=Numerics()), "k") is None
    assert cache_format(recording(numerics=None), "v") is None
    error = refused(cache_format, recording(numerics=Numerics(cache="Q3_K")), "k")
    assert error.code is Code.BAD_MANIFEST
    assert "Q3_K" in str(error)
    assert "int8" in str(refused(cache_format, recording(numerics=Numerics(cache="int8")), "v"))


@pytest.mark.parametrize(
    ("scales", "shape"), [((0.0,), (2, 8)), ((float("nan"),), (2, 8)), ((0.1, 0.2, 0.3), (2, 8)), ((0.1, 0.2), (16,))]
)
def test_scales_of_a_cache_that_nothing_can_be_divided_by(scales, shape):
    numerics = Numerics(cache="int8", cache_scales={"model.layers.1.k_cache": scales})
    declared = recording(("model.layers.1.k_cache", "F32", shape), numerics=numerics)
    error = refused(cache_format, declared, "k", "model.layers.1.")
    assert error.code is Code.BAD_MANIFEST
    assert "numerics, model.layers.1.k_cache" in str(error)
    assert "int8" in str(refused(cache_format, declared, "k", "model.layers.0.")), "no scale there"


@pytest.mark.parametrize(("shape", "is_whole"), [((2, 32), True), ((2, 24), False)])
def test_heads_of_a_cache_in_blocks_are_whole_blocks(shape, is_whole):
    declared = recording(("model.layers.1.k_cache", "F32", shape), numerics=Numerics(cache="mxfp4"))
    if is_whole:
        assert cache_format(declared, "k", "model.layers.1.") == CacheFormat(name="mxfp4", num_heads=2)
    else:
        error = refused(cache_format, declared, "k", "model.layers.1.")
        assert (error.code, "that 16 divides" in str(error)) == (Code.BAD_MANIFEST, True)


def test_one_rank_of_several_is_refused_but_where_it_has_everything():
    def part(world_size, *shards):
        taps = [SimpleNamespace(shard=shard) for shard in shards]
        return SimpleNamespace(path="folder", manifest=SimpleNamespace(world_size=world_size, rank=1, taps=taps))

    whole = Replicated()
    for fine in (part(1, None), part(2, whole, whole), part(2)):
        refuse_part(fine)
    error = refused(refuse_part, part(2, whole, None))
    assert error.code is Code.ONE_RANK_OF_SEVERAL
    assert "rank 1 of 2" in str(error)


def checked(*taps, expected=(("k", "BF16", (4, 8)), ("choice", "I64", (2,)), ("free", "BF16", (6,))), dtype="bfloat16"):
    findings, usable = check_taps(recording(*taps, dtype=dtype), recording(*expected), GRAPH)
    assert all(finding.code is Code.TAP_MISMATCH for finding in findings)
    return usable, {finding.tap: finding.message for finding in findings}


@pytest.mark.parametrize(
    "tap",
    [
        ("k", "BF16", (4, 8)), ("k", "BF16", (32,)), ("k", "F32", (4, 8)), ("k", "F16", (8, 4)),
        ("unknown", "BF16", (7,)),
        ("k_cache", "F8_E4M3", (4, 8)), ("k_cache", "BF16", (32,)), ("v_cache", "BF16", (5,)), ("choice", "I32", (2,)),
        ("choice", "U8", (1, 2)),
    ],
)  # fmt: skip
def test_what_fits(tap):
    assert checked(tap) == ({tap[0]}, {})


@pytest.mark.parametrize(
    ("tap", "message"),
    [
        (("k", "BF16", (4, 9)), "shape of k differs: expected [4, 8], actual [4, 9] per row"),
        (("k_cache", "BF16", (4, 9)), "shape of k_cache differs: expected [4, 8], actual [4, 9] per row"),
        (("k", "F8_E4M3", (4, 8)), "dtype of k is F8_E4M3, coarser than the engine's bfloat16"),
        (("unknown", "F8_E4M3", (3,)), "dtype of unknown is F8_E4M3, coarser than the engine's bfloat16"),
        (("k", "I64", (4, 8)), "dtype of k is I64, expected a floating-point dtype"),
        (("k_cache", "I64", (4, 8)), "dtype of k_cache is I64, expected a floating-point dtype"),
        (("choice", "F32", (2,)), "dtype of choice is F32, expected indices"),
        (("choice", "I64", (3,)), "shape of choice differs: expected [2], actual [3] per row"),
    ],
)
def test_what_does_not_fit(tap, message):
    assert checked(tap, ("free", "BF16", (6,))) == ({"free"}, {tap[0]: message})


@pytest.mark.parametrize(("engine", "is_fine"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_a_tap_may_not_be_coarser_than_the_engine(engine, is_fine):
    assert bool(checked(("k", "BF16", (32,)), dtype=engine)[0]) == is_fine


def test_a_cache_whose_writing_the_golden_does_not_have_may_have_any_shape():
    assert checked(("k_cache", "BF16", (9,)), expected=()) == ({"k_cache"}, {})


@pytest.mark.parametrize(
    ("site", "shape", "is_one_less"),
    [
        ("conv_state", [6, 3], True), ("conv_state.1", [6, 3], True), ("conv_state", [6, 4], False),
        ("conv_state", [6, 2], False), ("conv_state", [3, 6], False), ("conv_state", [18], False),
        ("recurrent_state", [6, 3], False), ("mixer", [6, 3], False), ("nowhere", [6, 3], False),
    ],
)  # fmt: skip
def test_a_convolutions_state_may_lack_its_oldest_column(site, shape, is_one_less):
    """The next token does not need it, and some engines do not keep it."""
    sites = {"conv_state": Kind.STATE, "conv_state.1": Kind.STATE, "recurrent_state": Kind.STATE, "mixer": Kind.OTHER}
    graph = Graph(tuple(Operation(tap=f"layers.0.{key}", kind=kind, shape=(6, 4)) for key, kind in sites.items()))
    entry = SimpleNamespace(name=f"layers.0.{site}", dtype="F32", shape=shape)
    assert keeps_one_less(graph, entry) == is_one_less
