"""Costs of quantisation for terminals, programs and eyes."""

import re
from dataclasses import replace

from harness.extensions.quant.report import quant_html, quant_text
from harness.extensions.quant.result import ENGINE_FIGURES, PartCost, QuantResult, QuantRow
from harness.report.document import document as result_document


def row(name, size, kl, **others):
    fields = {
        "name": name, "size_bytes": size, "bits_per_weight": 8.5, "note": "", "perplexity": 3.25, "kl_mean": kl,
        "tensor_types": {"Q8_0": 0.9, "F16": 0.096, "F32": 0.004}, "kl_median": kl / 2, "kl_p99": kl * 9,
        "kl_max": kl * 20, "same_top": 0.975, "kl_mean_format": kl * 0.75, "kl_mean_arithmetic": kl * 0.25,
    }  # fmt: skip
    return QuantRow(**{**fields, **others})


RESULT = QuantResult(
    model="stories", text="its own text, seed 0", num_rows=64, perplexity=3.0,
    types=(row("Q8_0", 2_000_000, 1e-3), row("<Q4>", 1_000_000, 0.1), row("F32", 8_000_000, 0.0)),
)  # fmt: skip


def test_a_table():
    text = quant_text(RESULT)
    assert "stories: 64 rows of its own text, seed 0, perplexity of HuggingFace's original 3.0000" in text
    assert "Q8_0    2,000,000  8.50           3.2500        1.00e-03" in text
    assert "97.50 %" in text
    assert "| Q8\\_0  |" in quant_text(RESULT, "github")
    assert "Q8_0 90 %, F16 10 %, F32 < 1 %" in text


def test_a_name_that_says_more_than_the_file_holds_has_a_note():
    held = row("Q4_K_M", 1_000_000, 1e-3, tensor_types={"Q5_0": 1.0}, note="12 of 15 matrices are not Q4_K: ...")
    assert "\n\nQ4_K_M: 12 of 15 matrices are not Q4_K: ..." in quant_text(replace(RESULT, types=(held,)))


def test_without_an_engine_the_format_is_what_is_shown():
    alone = replace(RESULT, types=(row("Q8_0", 2_000_000, 1e-3, **dict.fromkeys(ENGINE_FIGURES)),))
    text = quant_text(alone)
    assert "-: the engine of this type is not installed" in text
    assert "7.50e-04" in text
    assert "KL 7.50e-04" in quant_html(alone)
    assert result_document(alone)["types"][0]["kl_mean"] is None


def test_json_has_a_row_for_each_type():
    document = result_document(RESULT)
    assert document["schema_version"] == 1
    assert [item["name"] for item in document["types"]] == ["Q8_0", "<Q4>", "F32"]
    assert document["types"][0]["kl_mean_arithmetic"] == 0.00025


def test_smaller_files_are_further_left():
    page = quant_html(RESULT)
    dots = [float(at) for at in re.findall(r'class="dot [^>]*left:([\d.]+)%', page)]
    assert dots[1] < dots[0] < dots[2]
    assert "<Q4>" not in page


def part(split, name, layer, kl):
    return PartCost(split=split, name=name, layer=layer, num_weights=100, relative_error=0.05, kl_mean=kl)


PARTS = (
    part("layers", "model.layers.0", 0, 3e-4), part("layers", "model.layers.1", 1, 1e-4),
    part("layers", "lm_head", None, 1e-3), part("weights", "model.layers.0.mlp.up_proj", 0, 2e-4),
    part("weights", "model.layers.1.mlp.up_proj", 1, 5e-5),
)  # fmt: skip


def test_parts_have_a_line_each_with_their_share_and_the_sum():
    text = quant_text(replace(RESULT, types=(replace(RESULT.types[0], parts=PARTS), RESULT.types[1])))
    text = re.sub(" +", " ", text)
    assert "one layer at a time" in text
    assert "one kind" not in text
    assert "model.layers.0 3.00e-04 21 % 0.00e+00 0 %" in text
    assert "sum of all parts 1.40e-03" in text
    assert "all of it at once 7.50e-04 7.50e-02" in text
    assert text.index("model.layers.0.mlp.up_proj 2.00e-04") < text.index("model.layers.1.mlp.up_proj 5.00e-05")


def test_a_page_draws_layers_in_their_order_and_what_is_outside_behind_them():
    page = quant_html(replace(RESULT, types=(replace(RESULT.types[0], parts=PARTS),)))
    layers = page.partition("one layer at a time")[2].partition("</section>")[0]
    dots = dict(re.findall(r'left:([\d.]+)%;bottom:[\d.]+%" title="Q8_0 · ([\w.]+)', layers))
    assert [dots[at] for at in sorted(dots, key=float)] == ["model.layers.0", "model.layers.1", "lm_head"]
    heights = [float(at) for at in re.findall(r"left:[\d.]+%;bottom:([\d.]+)%\" title=\"Q8_0", layers)]
    assert heights[2] > heights[0] > heights[1]
    assert "Q8_0: one weight at a time" in page
