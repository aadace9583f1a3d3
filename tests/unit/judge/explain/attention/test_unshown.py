"""Attention that HF computes without its interface: what it reads is named, though no key and no value is shown."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import harness
from harness.extensions.faults.modules.changes import cache
from harness.extensions.faults.zoo.models import build
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.explain.attention.unshown import _Products, unshown_attention

PROMPTS = [list(range(5, 27)), list(range(60, 74))]


def reading(change):
    """Attention reads what `change` makes of keys and values [B, K, S, H] in decode; the cache keeps them."""

    def update(inner, k, v, *rest, **named):
        key, value = (x.clone() for x in inner(k, v, *rest, **named))
        if k.shape[2] == 1:
            change(key, value)
        return key, value

    return cache(update=update)


def one_block(key, value):
    for x in (key, value):
        x[:, :, 8:12] = x[:, :, 4:8].clone()


def one_slot_low(key, value):
    key[:, :, -2] = key[:, :, -1]
    key[:, :, -1] = 0


def every_fourth(_key, value):
    value[:, :, 3::4] = 0


def pages_in_reverse(key, value):
    length = key.shape[2]
    for x in (key, value):
        pages = torch.nn.functional.pad(x, (0, 0, 0, -length % 4)).unflatten(2, (-1, 4))
        x[:] = pages.flip(2).flatten(2, 3)[:, :, :length]


def full_pages_in_reverse(key, value):
    length = key.shape[2] // 4 * 4
    for x in (key, value):
        x[:, :, :length] = x[:, :, :length].unflatten(2, (-1, 4)).flip(2).flatten(2, 3).clone()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "change", "cause"),
    [
        ("bloom", one_block, "reads one block of its history from a wrong place"),
        ("falcon", one_block, "reads one block of its history from a wrong place"),
        ("bloom", one_slot_low, "keys are written 1 slot low"),
        ("bloom", pages_in_reverse, "reads its pages in the reverse order"),
        ("mpt", full_pages_in_reverse, "reads its pages in the reverse order"),
        ("mpt", one_slot_low, "keys are written 1 slot low"),
        ("xglm", every_fourth, "reads the values of one slot of every 4 of its history as zeros"),
    ],
)
def test_what_decode_reads_is_named(tmp_path, family, change, cause):
    explanation = explanation_of(family, reading(change), tmp_path)
    assert explanation.is_cause
    assert explanation.cause.startswith(cause)
    assert explanation.scope == "decode rows"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["keys", "values", "keys and values"])
@pytest.mark.parametrize("family", ["xglm", "bloom"])
def test_rows_that_are_written_one_off_in_each_step(tmp_path, family, what):
    def update(inner, k, v, *rest, **named):
        return inner(k.roll(1, 2) if "keys" in what else k, v.roll(1, 2) if "values" in what else v, *rest, **named)

    explanation = explanation_of(family, cache(update=update), tmp_path)
    assert (explanation.cause, explanation.is_cause) == (
        f"{what} of each step are one slot high, around the step",
        True,
    )


def explanation_of(family, plant, folder):
    model = build(family, seed=7)
    model.save_pretrained(folder)
    plant(model)
    report = harness.check(model, model=folder, prompts=PROMPTS, max_new_tokens=5, schedules=["plain"])
    return report.first_divergence.explanation


def test_arguments_by_their_places_are_not_a_scale():
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    with _Products(5) as seen:
        scaled_dot_product_attention(query, key, value, None, 0.0, True)
    torch.testing.assert_close(
        seen.scores.softmax(-1) @ value, scaled_dot_product_attention(query, key, value, is_causal=True)
    )


def test_vectors_are_no_queries():
    with _Products(5) as seen:
        torch.matmul(torch.ones(5), torch.ones(5))
    assert seen.query is None


def test_a_product_is_no_attention_and_nothing_is_run_to_see_it():
    operation = Operation(tap="mlp", kind=Kind.LINEAR, source="mlp")
    graph = Graph((operation,), {})
    wrong = SimpleNamespace(rerun=object(), views=(), graph=graph, operation=operation, unrecorded=("mlp",))
    assert unshown_attention(wrong) is None
