"""Costs of quantisation for terminals, programs and eyes."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from harness.report.document import document as result_document
from harness.report.quant import quant_svg, quant_text
from harness.results.quant import ENGINE_FIGURES, QuantResult, QuantRow


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
    assert "KL 7.50e-04" in quant_svg(alone)
    assert result_document(alone)["types"][0]["kl_mean"] is None


def test_json_has_a_row_for_each_type():
    document = result_document(RESULT)
    assert document["schema_version"] == 1
    assert [each["name"] for each in document["types"]] == ["Q8_0", "<Q4>", "F32"]
    assert document["types"][0]["kl_mean_arithmetic"] == 0.00025


def test_a_plot_is_well_formed_and_smaller_files_are_further_left():
    root = ElementTree.fromstring(quant_svg(RESULT))
    dots = [float(dot.attrib["cx"]) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert dots[1] < dots[0] < dots[2]
