"""Two folders of tensors: which are one quantity, where they begin to differ, and what is no pass."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from harness.errors import Code, HarnessError
from harness.judge.dumps import compare_dumps
from harness.report.document import document
from harness.report.dumps import dumps_text
from harness.results.check import Outcome
from harness.results.dumps import Likeness, PairEvidence

TOKENS, WIDTH, HEADS = 12, 24, 3


def run(num_layers=4, *, seed=0, wrong=(), noise=0.0):
    """Return tensors of a toy run by name: each is computed from the one before, `wrong` ones by other weights."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(1, TOKENS, WIDTH, generator=generator)
    tensors = {"embed": state}
    for layer in range(num_layers):
        for site in ("input_layernorm", "attn", "mlp"):
            name = f"layers.{layer}.{site}"
            weights = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
            state = torch.tanh(state @ (weights.t() if name in wrong else weights)) * 2
            state = state * (1 + noise * torch.randn(state.shape, generator=generator))
            tensors[name] = state
    tensors["lm_head"] = state @ torch.randn(WIDTH, 40, generator=generator)
    return tensors


@pytest.fixture
def compare(tmp_path):
    def compared(first, second, **options):
        for name, tensors in (("a", first), ("b", second)):
            (tmp_path / name).mkdir()
            torch.save(tensors, tmp_path / name / "all.pt")
        return compare_dumps(tmp_path / "a", tmp_path / "b", **options)

    return compared


def inner(pair):
    return tuple(name.removeprefix("all.pt: ") for name in pair.names)


def likenesses(result):
    return {inner(pair)[0]: pair.likeness for pair in result.pairs}


LAYOUTS = {
    "as it is": lambda x: x,
    "flat": lambda x: x[0],
    "of heads": lambda x: x.reshape(1, TOKENS, HEADS, -1),
    "heads first": lambda x: x.reshape(TOKENS, HEADS, -1).transpose(0, 1).contiguous(),
    "transposed": lambda x: x[0].t().contiguous(),
    "padded tokens": lambda x: torch.cat([x, torch.randn(1, 5, x.shape[-1])], dim=1),
    "padded batch": lambda x: torch.cat([x, torch.zeros(3, *x.shape[1:])]),
    "behind padding": lambda x: torch.cat([torch.full_like(x[:, :4], 0.5), x], dim=1),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 1000), is_hashed=st.booleans())
def test_content_decides_whatever_names_order_layouts_and_dtypes_are(data, seed, is_hashed):
    tensors = {name: tensor[..., :WIDTH] for name, tensor in run(2, seed=seed).items()}
    names = list(tensors)
    renamed = data.draw(st.permutations(names))
    if is_hashed:
        renamed = [str(hash(name) % 10**9) for name in renamed]
    order = data.draw(st.permutations(range(len(names))))
    layouts = data.draw(st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=len(names), max_size=len(names)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    partners = dict(zip(names, renamed, strict=True))
    second = {partners[names[at]]: LAYOUTS[layouts[at]](tensors[names[at]]).to(dtype) for at in order}
    with tempfile.TemporaryDirectory() as folder:
        for side, values in (("a", tensors), ("b", second)):
            (Path(folder) / side).mkdir()
            torch.save(values, Path(folder) / side / "all.pt")
        result = compare_dumps(Path(folder) / "a", Path(folder) / "b")
    assert dict(map(inner, result.pairs)) == partners
    assert {pair.evidence for pair in result.pairs} == {PairEvidence.CONTENT}
    assert {pair.likeness for pair in result.pairs} == {Likeness.SAME}, "rounded to the coarser dtype, all are equal"
    assert result.outcome is Outcome.PASS
    assert result.folders[0].share == 1


@pytest.mark.parametrize("wrong", ["layers.0.input_layernorm", "layers.2.attn", "layers.3.mlp"])
@pytest.mark.parametrize("names", ["the same", "another engine's", "numbers"])
def test_a_wrong_operation_is_the_first_difference(compare, wrong, names):
    rename = {
        "the same": lambda _at, name: name,
        "another engine's": lambda _at, name: name.replace("layers", "blk").replace("attn", "att_out") + ".out",
        "numbers": lambda at, _name: f"{at}",
    }[names]
    wrongly = run(wrong=[wrong])
    result = compare(run(noise=1e-7), {rename(*item): wrongly[item[1]] for item in enumerate(wrongly)})
    assert result.outcome is Outcome.MISMATCH
    assert inner(result.first_difference) == (wrong, rename(list(wrongly).index(wrong), wrong))
    assert result.first_difference.is_jump
    assert result.first_difference.evidence in (PairEvidence.NAME, PairEvidence.PLACE)
    kinds = list(likenesses(result).values())
    at = kinds.index(Likeness.DIFFERENT)
    assert set(kinds[:at]) <= {Likeness.SAME, Likeness.CLOSE}
    assert set(kinds[at:]) == {Likeness.DIFFERENT}
    assert not result.unproven


def test_the_worst_row_and_its_element(compare):
    tensors = run()
    wrong = {name: tensor.clone() for name, tensor in tensors.items()}
    wrong["layers.1.attn"][0, 7, 5] += 0.5
    result = compare(tensors, wrong)
    pair = result.first_difference
    value = tensors["layers.1.attn"][0, 7]
    assert (inner(pair)[0], pair.row, pair.column, pair.num_different) == ("layers.1.attn", 7, 5, 1)
    assert pair.values == pytest.approx((float(value[5]), float(value[5]) + 0.5))
    assert pair.roundings == pytest.approx(0.5 / float(value.norm()) / 2.54e-8, rel=0.01)
    assert pair.roundings_median == 0
    assert pair.relative_l2 == pytest.approx(0.5 / float(tensors["layers.1.attn"].norm()))
    text = dumps_text(result)
    assert "MISMATCH  " in text.splitlines()[0]
    assert "100 % of the elements" in text.splitlines()[0]
    assert "first difference  H088: all.pt: layers.1.attn" in text
    assert "the next 7 are the same" not in text


def test_a_difference_without_consequences_is_said(compare):
    tensors = run(5)
    result = compare(tensors, tensors | {"layers.0.input_layernorm": tensors["layers.0.input_layernorm"] * 3 + 1})
    assert result.outcome is Outcome.MISMATCH
    assert "the next 15 are the same or close" in " ".join(dumps_text(result).split())


def test_what_is_close_grows_with_what_comes_before(compare):
    result = compare(run(8), run(8, noise=3e-6))
    assert result.outcome is Outcome.MISMATCH, "118 roundings at once are too many"
    assert inner(result.first_difference) == ("layers.0.input_layernorm",) * 2


def test_close_is_a_factor_of_the_user(compare, tmp_path):
    assert compare(run(), run(noise=1e-7)).outcome is Outcome.PASS
    strict = compare_dumps(tmp_path / "a", tmp_path / "b", close=0)
    assert strict.outcome is Outcome.MISMATCH
    assert inner(strict.first_difference)[0] == "layers.0.input_layernorm"
    assert compare_dumps(tmp_path / "b", tmp_path / "a", close=1e9).outcome is Outcome.PASS


def test_a_file_of_float32_may_hold_bfloat16(compare):
    """numpy has no bfloat16: two runs in bfloat16 are compared in roundings of it."""
    first, second = ({n: t.bfloat16().float() for n, t in run(noise=noise).items()} for noise in (0, 2e-3))
    result = compare(first, second)
    assert result.outcome is Outcome.PASS
    assert {pair.precisions for pair in result.pairs} == {("bfloat16", "bfloat16")}
    assert {pair.dtypes for pair in result.pairs} == {("float32", "float32")}


def test_weights_in_bfloat16_do_not_make_a_run_in_float32_coarse(compare):
    first = run()
    embedding = first["embed"].bfloat16().float()
    result = compare(first | {"embed": embedding}, first | {"embed": embedding * (1 + 1e-3)})
    assert {pair.precisions for pair in result.pairs} == {("float32", "float32")}
    assert inner(result.first_difference)[0] == "embed"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(compare, tmp_path, value):
    first, second = run(), run()
    first["layers.1.attn"][0, 3, 2] = value
    first["layers.2.mlp"][0, 1, 1] = second["layers.2.mlp"][0, 1, 1] = value
    result = compare(first, second)
    pair = result.first_difference
    assert (inner(pair)[0], pair.num_not_finite, pair.same_not_finite) == ("layers.1.attn", (1, 0), False)
    assert (pair.row, pair.column, pair.num_different) == (3, 2, 1)
    assert likenesses(result)["layers.2.mlp"] is Likeness.SAME
    text = " ".join(dumps_text(result).split())
    assert "H042: all.pt: layers.1.attn" in text
    assert "not finite: 1 and 0 elements, not the same ones" in text
    assert "1 tensor with NaN or infinities, the same ones in both folders" in text
    assert document(result)["first_difference"]["values"][0] == str(value)


def test_infinities_of_other_signs_differ(compare):
    first, second = run(), run()
    first["layers.1.attn"][0, 3, 2], second["layers.1.attn"][0, 3, 2] = float("inf"), -float("inf")
    assert not compare(first, second).first_difference.same_not_finite


def test_copies_are_one_quantity_and_a_stale_copy_is_a_difference(compare):
    tensors = run()
    first = tensors | {"layers.0.attn.output": tensors["layers.0.attn"].clone()}
    result = compare(first, tensors | {"layers.2.attn": tensors["layers.1.attn"]})
    assert result.folders[0].share == 1, "the copy was compared as the tensor it is a copy of"
    assert inner(result.first_difference) == ("layers.2.attn", "layers.2.attn")
    assert likenesses(result)["layers.1.attn"] is Likeness.SAME


def nearly(tensor, number):
    return tensor * (1 + 4e-7 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))


def test_the_place_in_the_run_chooses_among_tensors_that_are_as_near(compare):
    base = run()
    near = [nearly(base["embed"], at) for at in range(4)]
    result = compare(base | {"x0": near[0], "x1": near[1]}, base | {"y0": near[2], "y1": near[3]})
    assert dict(map(inner, result.pairs)) == {name: name for name in base} | {"x0": "y0", "x1": "y1"}


def test_tensors_that_are_as_near_to_several_are_ambiguous(compare):
    base = run()
    near = [nearly(base["embed"], at) for at in range(5)]
    result = compare(base | {"x0": near[0], "x1": near[1]}, base | {f"y{at}": near[at] for at in (2, 3, 4)})
    assert {name.removeprefix("all.pt: ") for name in result.ambiguous} == {"x0", "x1", "y2", "y3", "y4"}
    assert "x0" not in likenesses(result)
    assert result.outcome is Outcome.MISMATCH, "nothing after them was compared"
    assert "ambiguous" in dumps_text(result)


def test_a_wrong_tensor_at_the_end_that_nothing_names_is_no_pass(compare):
    tensors = run()
    logits = tensors.pop("lm_head")
    rest = {"mystery": logits * 2 + 1, "other": logits * 3 - 1}
    result = compare({"lm_head": logits} | tensors | {"logits": logits}, tensors | rest)
    assert result.outcome is Outcome.MISMATCH
    assert len(result.unproven) == 3
    assert "unproven" in dumps_text(result)


def test_little_in_common_is_nothing_checked(compare):
    tensors = run(1)
    result = compare(tensors | {"more": torch.randn(500, 30)}, tensors | {"others": torch.randn(400, 31)})
    assert result.outcome is Outcome.NOTHING
    assert "H051" in dumps_text(result)


def refusal(compare, first, second):
    with pytest.raises(HarnessError) as caught:
        compare(first, second)
    return caught.value


def positions():
    return {"cos": torch.outer(torch.arange(TOKENS), 10.0 ** -torch.arange(8)).cos()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (run() | positions(), run(seed=1) | positions()),
        (run(), {"weights": torch.randn(30, 50)}),
        ({"zeros": torch.zeros(20, 30)}, {"zeros": torch.zeros(20, 30)}),
        ({"ones": torch.eye(30) + 1}, {"ones": torch.eye(30) + 1}),
        ({"few": torch.arange(5.0)}, {"few": torch.arange(5.0)}),
        ({"nan": torch.full((20, 30), torch.nan)}, {"nan": torch.full((20, 30), torch.nan)}),
    ],
)
def test_folders_without_a_value_in_common_are_refused(compare, first, second):
    error = refusal(compare, first, second)
    assert error.code is Code.TENSORS_OF_OTHER_TOKENS
    assert error.what == "no tensor of one folder is near to a tensor of the other"


def test_a_folder_is_not_compared_with_itself(compare, tmp_path):
    compare(run(), run())
    (tmp_path / "c").symlink_to(tmp_path / "a")
    with pytest.raises(HarnessError, match="both are the same folder"):
        compare_dumps(tmp_path / "a", tmp_path / "c")


def test_a_file_that_changes_meanwhile_is_refused(compare, tmp_path):
    compare(run(), run(noise=1e-7))

    def touch(what, _done, _total):
        if what == "comparing":
            os.utime(tmp_path / "b" / "all.pt", ns=(1, 1))

    with pytest.raises(HarnessError) as caught:
        compare_dumps(tmp_path / "a", tmp_path / "b", progress=touch)
    assert (caught.value.code, caught.value.where) == (Code.BAD_TENSOR_FILE, tmp_path / "b" / "all.pt")
    assert caught.value.what == "the file was changed while it was read"


def orders(tmp_path, write):
    """Return how the order of the run is told, and the names in it, of a folder that a function writes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "a", run(11))
    write(tmp_path / "b", run(11))
    result = compare_dumps(tmp_path / "a", tmp_path / "b")
    return result.order, [pair.names[0] for pair in result.pairs]


def test_the_order_of_a_file_of_torch_or_of_numpy(tmp_path):
    order, names = orders(tmp_path, lambda folder, tensors: np.savez(folder / "x.npz", **tensors))
    assert order == "the order in which the tensors stand in the files"
    assert names == [f"x.npz: {name}" for name in run(11)]


def test_the_order_of_numbers_in_names(tmp_path):
    def write(folder, tensors):
        for at, (name, tensor) in enumerate(tensors.items()):
            torch.save(tensor, folder / f"step=0___index={at + 7}___name={name}.pt")

    order, names = orders(tmp_path, write)
    assert order == "the numbers in the names"
    assert [name.split("name=")[1] for name in names] == [f"{name}.pt" for name in run(11)]


def test_the_order_of_layers(tmp_path):
    """A file of safetensors forgets the order of calls."""
    order, names = orders(tmp_path, lambda folder, tensors: save_file(tensors, folder / "x.safetensors"))
    assert order.startswith("the numbers of layers in the names")
    assert names == [f"x.safetensors: {name}" for name in run(11)]


def test_names_that_say_nothing(tmp_path):
    def write(folder, tensors):
        for name, tensor in tensors.items():
            np.save(folder / f"{name[::-1].replace('.', '')}.npy", tensor.numpy())

    order, names = orders(tmp_path, write)
    assert order == "the names of the files, which may not be the order of the run"
    assert len(names) == 35


def test_numbers_without_a_transposition_are_no_flattening(compare):
    """An engine that joins heads without exchanging them with the tokens has the right numbers in the wrong order."""
    context = torch.randn(1, HEADS, TOKENS, 8, generator=torch.Generator().manual_seed(1))
    joined = context.transpose(1, 2).reshape(1, TOKENS, WIDTH)
    result = compare(
        {"embed": run()["embed"], "context": context, "joined": joined},
        {"embed": run()["embed"], "joined": context.reshape(1, TOKENS, WIDTH)},
    )
    assert inner(result.first_difference) == ("joined", "joined")


def test_weights_that_outweigh_wrong_values_are_no_pass(compare):
    weights = {f"w{at}": torch.randn(200, 300) for at in range(5)}
    tensors = run()
    result = compare(tensors | weights, {f"z{at}": 3 * tensors[name] + 1 for at, name in enumerate(tensors)} | weights)
    assert (result.outcome, len(result.pairs)) == (Outcome.NOTHING, 5)


def test_one_wrong_element_of_many_is_a_difference(compare):
    large = torch.randn(1, 300, 200, generator=torch.Generator().manual_seed(1))
    wrong = large.clone()
    wrong[0, 299, 199] += 100
    result = compare(run() | {"large": large}, run() | {"large": wrong})
    assert (inner(result.first_difference), result.first_difference.num_different) == (("large", "large"), 1)


def test_a_row_more_is_said(compare):
    """Padding and one more token look alike."""
    tensors = run()
    longer = {name: torch.cat([x, torch.randn(1, 1, x.shape[-1])], dim=1) for name, x in tensors.items()}
    result = compare(tensors, longer)
    assert result.outcome is Outcome.PASS
    assert result.folders[1].num_elements_compared / result.folders[1].num_elements == pytest.approx(TOKENS / 13)
    assert "14 tensors: the rest of the larger one, padding or more tokens, was not compared" in " ".join(
        dumps_text(result).split()
    )


def test_differences_that_grow_tenfold_from_tensor_to_tensor_are_found(compare):
    tensors = run(5)
    ramp = [
        x * (1 + min(0.4, 1e-7 * 8**at) * torch.randn(x.shape, generator=torch.Generator().manual_seed(at)))
        for at, x in enumerate(tensors.values())
    ]
    result = compare(tensors, dict(zip(tensors, ramp, strict=True)))
    assert result.outcome is Outcome.MISMATCH
    assert result.first_difference.relative_l2 < 1e-2


HOSTILE = {
    "no dimension, and dimensions of one": {"s": torch.tensor(3.0), "o": torch.ones(1, 1, 1), "c": torch.randn(12, 1)},
    "numbers of many digits": {f"layers.{'9' * 6000}.x": torch.randn(12, 24)},
    "control characters": {"x\x1b[2J\n": torch.randn(12, 24)},
    "many dimensions": {"d": torch.randn(2, 3, 2, 2, 2, 3, 2)},
    "a stride of zero": {"e": torch.randn(1, 1, 24).expand(1, 500, 24)},
    "the largest numbers": {"h": torch.randn(12, 24).double() * 1e300},
    "subnormal numbers": {"h": (torch.randn(12, 24) * 1e-7).half()},
    "copies": {f"c{at}": run()["embed"] for at in range(60)},
}


@pytest.mark.parametrize("added", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_tensors(compare, added, tmp_path):
    assert compare(run() | added, run() | added).outcome is Outcome.PASS
    torch.save(run() | {name: tensor * 2 + 1 for name, tensor in added.items()}, tmp_path / "b" / "all.pt")
    result = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert result.outcome is Outcome.MISMATCH
    assert inner(result.first_difference)[0] in added
    text = dumps_text(result)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_exchanged_dimensions_of_one_shape_are_a_difference(compare):
    """As many heads as tokens: the shape does not tell a layout from a mistake."""
    heads = torch.randn(1, TOKENS, TOKENS, 8, generator=torch.Generator().manual_seed(1))
    result = compare(run() | {"heads": heads}, run() | {"heads": heads.transpose(1, 2).contiguous()})
    assert inner(result.first_difference) == ("heads", "heads")


def test_exchanged_dimensions_are_said(compare):
    heads = torch.randn(1, TOKENS, HEADS, 8, generator=torch.Generator().manual_seed(1))
    result = compare(run() | {"heads": heads}, run() | {"heads": heads.transpose(1, 2).contiguous()})
    assert result.outcome is Outcome.PASS
    assert "1 tensor compared with two dimensions exchanged" in dumps_text(result)


def test_a_difference_of_all_rows_is_not_hidden_by_one_noisy_row_before(compare):
    tensors = run()
    noise = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)) * 2.54e-8
    noisy = tensors["layers.0.attn"].clone()
    noisy[0, 3] *= 1 + 18 * noise[0, 3]
    wrong = tensors["layers.2.attn"] * (1 + 30 * noise)
    result = compare(tensors, tensors | {"layers.0.attn": noisy, "layers.2.attn": wrong})
    pair = result.first_difference
    assert inner(pair)[0] == "layers.2.attn"
    assert pair.roundings < pair.bound
    assert pair.roundings_median > pair.bound_median


def test_two_dtypes_are_compared_in_roundings_of_the_coarser(compare):
    first = run()
    result = compare(first, {name: tensor.bfloat16() for name, tensor in run(noise=2e-3).items()})
    assert result.outcome is Outcome.PASS
    assert "14 tensors of float32 and bfloat16" in " ".join(dumps_text(result).split())


def test_a_folder_in_another_order_gives_no_places(compare):
    """A wrong tensor is before all others in one folder and after most in the other: what is it computed from?"""
    tensors = run()
    wrong = tensors | {"layers.2.attn": 2 * tensors["layers.2.attn"] + 1}
    backwards = {str(at): wrong[name] for at, name in enumerate(reversed(wrong))}
    result = compare(tensors, backwards)
    assert {pair.evidence for pair in result.pairs} == {PairEvidence.CONTENT}
    assert len(result.pairs) == len(tensors) - 1
    assert result.outcome is Outcome.MISMATCH
    assert set(result.unproven) == {"all.pt: layers.2.attn", f"all.pt: {list(reversed(wrong)).index('layers.2.attn')}"}


def test_a_fused_projection_is_not_taken_apart(compare):
    tensors = run()
    query = tensors["layers.1.attn"]
    fused = torch.cat([query, torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))], dim=-1)
    result = compare(
        tensors, {name: tensor for name, tensor in tensors.items() if tensor is not query} | {"qkv": fused}
    )
    assert result.folders[0].without_partner == ("all.pt: layers.1.attn",)
    assert result.folders[1].without_partner == ("all.pt: qkv",)
