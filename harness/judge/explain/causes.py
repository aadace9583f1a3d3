"""All explanations by kind of operation, the most likely first.

If two explanations fit equally well, the earlier one is reported.
"""

from collections.abc import Mapping, Sequence

from harness.base import plugins
from harness.formats.taps import Kind
from harness.judge.explain import norms
from harness.judge.explain.any_kind import generic
from harness.judge.explain.attention import biases, masks, misread, reads, slots, softmax, unrecorded
from harness.judge.explain.cache import entries, formats
from harness.judge.explain.core.wrong_operation import Explain
from harness.judge.explain.edits import other_code
from harness.judge.explain.experts import experts, router
from harness.judge.explain.layer import activation, embedding, wiring
from harness.judge.explain.products import linear, logits, lora, rows
from harness.judge.explain.rotary import ROTATED_WRONGLY, positions
from harness.judge.explain.states import kept, recurrence

_EMBEDDING = (embedding.not_scaled, embedding.scaled, embedding.another_token)
_ELEMENTWISE = (activation.clamped, activation.soft_capped)
OF_MASK_AND_SCALE: Sequence[Explain] = (
    masks.causal_mask_off,
    masks.mask_misaligned,
    masks.wrong_window,
    masks.padding_attended,
    softmax.wrong_scale,
    softmax.bias_added,
    biases.other_biases,
    softmax.coarse_softmax,
)
OF_ATTENTION_PARAMETERS: Sequence[Explain] = (
    unrecorded.rotated_otherwise,
    unrecorded.rotated_though_none,
    *OF_MASK_AND_SCALE,
)
"""Explanations of attention by what it is told: rotation, mask, scale."""
EXPLANATIONS: Mapping[Kind, Sequence[Explain]] = {
    Kind.EMBEDDING: _EMBEDDING,
    Kind.COPY: (wiring.other_order,),
    Kind.NORM: (
        norms.wrong_eps,
        norms.wrong_divisor,
        norms.over_other_elements,
        norms.statistic_overflows,
        norms.coarse_statistic,
        norms.changed_weights,
    ),
    Kind.LINEAR: (
        logits.sampled,
        linear.outputs_in_another_order,
        linear.weight_in_another_order,
        linear.coarse_product,
        linear.sums_in_16_bits,
        linear.part_of_the_inputs,
        linear.one_weight,
        linear.low_rank_update,
        linear.nobodys_weights,
        rows.rows_of_the_weight,
        rows.scales_of_blocks,
        *_ELEMENTWISE,
    ),
    Kind.ROTARY: (
        positions.along_axes,
        *ROTATED_WRONGLY,
        positions.other_positions,
        formats.in_few_bits,
    ),
    Kind.ADD: (
        wiring.other_addition,
        *_ELEMENTWISE,
    ),
    Kind.ACTIVATION: (activation.gate_for_up, *_ELEMENTWISE),
    Kind.ATTENTION: (
        slots.cache_played_back,
        slots.rejected_drafts,
        slots.nothing_forgotten,
        slots.other_block_table,
        reads.other_tensors,
        reads.coarse_cache,
        formats.declared_format,
        slots.past_the_context,
        reads.read_back,
        reads.cleared_pages,
        reads.another_order,
        misread.other_rows,
        *OF_ATTENTION_PARAMETERS,
        masks.mask_otherwise,
        softmax.scaled_after,
        softmax.over_the_heads,
        softmax.splits_merged_wrongly,
        reads.other_kv_heads,
        reads.other_layout,
        softmax.left_out,
        softmax.other_cap,
        softmax.other_sinks,
    ),
    Kind.CACHE: (
        entries.replayed_reads,
        entries.never_written,
        entries.other_tensor,
        entries.rotated_once_more,
        entries.other_row,
        formats.declared_format,
        formats.in_few_bits,
        entries.coarser_dtype,
        entries.grid,
        entries.gain,
        generic.heads_in_another_order,
        entries.single_bits,
        entries.unknown_content,
    ),
    Kind.STATE: (kept.other_rows,),
    Kind.CHOICE: (
        router.other_tokens,
        router.other_choice,
    ),
    # For example: a linear layer with an adapter, the experts of a layer, a scan.
    Kind.OTHER: (
        lora.wrong_adapter,
        *_EMBEDDING,
        embedding.misplaced,
        experts.wrong_experts,
        recurrence.wrong_state,
        *_ELEMENTWISE,
    ),
}
_WIRING: Sequence[Explain] = (generic.another_input,)
_EDITS: Sequence[Explain] = (other_code,)
_ORDERS: Sequence[Explain] = (generic.row_of_another, generic.heads_in_another_order)
_GENERIC: Sequence[Explain] = (
    generic.zero_output,
    generic.gain_of_a_setting,
    generic.constant_gain,
    generic.another_output,
    generic.rounded_output,
    generic.offset_per_channel,
)
_OF_ANY_ROWS = (generic.zero_output, generic.gain_of_a_setting)
"""Generic explanations that say in full what was done."""
LATER_STAGES: Mapping[Kind, Sequence[Sequence[Explain]]] = {
    Kind.EMBEDDING: (_GENERIC,),
    Kind.COPY: (_GENERIC,),
    Kind.NORM: (_WIRING, _ORDERS, _EDITS, _GENERIC),
    Kind.LINEAR: (_WIRING, _ORDERS, _EDITS, _GENERIC),
    Kind.ROTARY: (_WIRING, _ORDERS, _EDITS, _GENERIC),
    Kind.ADD: (_ORDERS, _EDITS, _GENERIC),
    Kind.ACTIVATION: (_ORDERS, _EDITS, _GENERIC),
    Kind.ATTENTION: (_ORDERS, _EDITS, _GENERIC),
    Kind.CHOICE: (_EDITS,),
    Kind.OTHER: (_WIRING, _ORDERS, _EDITS, _GENERIC),
}
"""Stages of explanations. Each is tried only if no earlier one fits every row; the most general stage is last."""


def stages_of(kind: Kind) -> list[Sequence[Explain]]:
    """Return the stages of a kind: what the harness and the extensions know of it, then what says less.

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    known = list(EXPLANATIONS[kind])
    for table in plugins.load_all(plugins.EXPLANATIONS, _table).values():
        known += table.get(kind, ())
    return [known, *LATER_STAGES.get(kind, ())]


def _table(module: object) -> Mapping[Kind, Sequence[Explain]]:
    table = getattr(module, "EXPLANATIONS", None)
    if not isinstance(table, Mapping) or not all(map(_is_row, table.items())):
        raise TypeError("has no EXPLANATIONS: a mapping from Kind to a list or tuple of functions")
    return table


def _is_row(row: tuple[object, object]) -> bool:
    kind, explanations = row
    return isinstance(kind, Kind) and isinstance(explanations, list | tuple) and all(map(callable, explanations))


def known_mistakes(kind: Kind) -> list[Explain]:
    """Return the explanations of a kind that name a mistake, without those that only say how values differ."""
    stages = [stage for stage in stages_of(kind) if stage not in (_ORDERS, _EDITS)]
    return [explain for stage in stages for explain in stage if stage is not _GENERIC or explain in _OF_ANY_ROWS]


def causes_of(kind: Kind) -> list[Explain]:
    """Return everything that is tried for a kind, the likelier first."""
    return [explain for stage in stages_of(kind) for explain in stage]
