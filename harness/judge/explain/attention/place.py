"""One position of the history that is read from where another row was written, is zero, or is left out.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Iterator, Sequence

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import single_rows
from harness.judge.explain.cache.content_index import KEY, VALUE, ContentIndex
from harness.judge.explain.cache.replay import contents_of, provenance_of
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_MAX_PRODUCT = 1 << 31
"""Multiplications spent on the search for one replaced position."""
_ZERO, _OMITTED = -1, -2


def wrong_place(failure: Failure) -> Iterator[Hypothesis]:
    """One position of the history is read from where another row was written, or is zero, or is left out.

    The row's sums are linear in every position's share: with e the exponentials, Z their sum, o what should be and a
    what is, replacing position j by row m gives a where Z (a - o) + e_j (v_j - a) = e_m (v_m - a). The nearest pair of
    both sides, over all j and m, is found by one product of matrices.
    """
    contents = contents_of(failure)
    if KEY not in contents.tensors or VALUE not in contents.tensors:
        return
    outputs, found = [], []
    for query, actual in zip(single_rows(failure), failure.actual, strict=True):
        if len(query.key) * len(contents.tensors[KEY]) * query.query.numel() > _MAX_PRODUCT:
            return
        output, place = _best_replacement(query, actual.unflatten(0, (query.query.shape[1], -1)), contents)
        outputs.append(output)
        found.append((query, *place))
    kinds = {_kind_of(query, position, source, contents) for query, position, source in found}
    is_one = len(kinds) == 1 and _is_one_place(found)
    query, position, source = found[0]
    request, step = int(query.rows.request), int(query.rows.step)
    yield Hypothesis(
        cause=kinds.pop() if is_one else "one position of its history, in each row another, would explain each row",
        output=torch.stack(outputs),
        detail="; ".join(_place_text(*item, contents) for item in found[:3]),
        freedom=2 * (len(failure.views) if is_one else len(found)),
        is_cause=is_one,
        provenance=lambda: provenance_of(failure, step, request, position, _content_of(contents, source)),
    )


def _is_one_place(found: Sequence[tuple[AttentionContext, int, int]]) -> bool:
    """Whether all rows of a request read the same position from the same place, or all of them their own."""
    if all(position == int(query.rows.position) for query, position, _ in found):
        return True
    places = {(int(query.rows.request), position, source) for query, position, source in found}
    return len(places) == len({request for request, _, _ in places})


def _best_replacement(
    row: AttentionContext, actual_NH: torch.Tensor, contents: ContentIndex
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the row [N*H] under the best replacement, and (position replaced, known row in its place)."""
    heads, value_size = actual_NH.shape
    position = int(row.rows.position)
    scores = row.scores().masked_fill(~row.visible(), -torch.inf)[:, 0, : position + 1]
    top = scores.amax(dim=1, keepdim=True)
    e_NS = (scores - top).exp()
    k_MKH = contents.tensors[KEY].unflatten(1, row.key.shape[1:])
    v_MKH = contents.tensors[VALUE].unflatten(1, row.value.shape[1:])
    count = min(len(k_MKH), len(v_MKH))
    k_MKH, v_MKH = k_MKH[:count], v_MKH[:count]
    e_NM = (row.scores(key=k_MKH)[:, 0] - top).clamp(max=50).exp()
    v_NSH, v_NMH = row.spread(row.value[: position + 1]), row.spread(v_MKH)
    total = e_NS.sum(dim=1)[:, None]
    expected_NH = (e_NS[:, None] @ v_NSH)[:, 0] / total
    a = actual_NH[:, None]
    left = total[..., None] * (actual_NH - expected_NH)[:, None] + e_NS[..., None] * (v_NSH - a)
    zero_N = (-top[:, 0]).clamp(max=50).exp()
    right = torch.cat(
        (
            e_NM[..., None] * (v_NMH - a),
            -(zero_N[:, None] * actual_NH)[:, None],
            torch.zeros(heads, 1, value_size, dtype=torch.float64),
        ),
        dim=1,
    )
    left_SW, right_MW = ((x / total[..., None]).transpose(0, 1).flatten(1) for x in (left, right))
    distance = torch.cdist(left_SW, right_MW)
    visible = row.visible()[0, : position + 1]
    distance[~visible] = torch.inf
    j, m = divmod(int(distance.argmin()), distance.shape[1])
    e_m = torch.cat((e_NM, zero_N[:, None], torch.zeros(heads, 1, dtype=torch.float64)), dim=1)[:, m]
    v_m = torch.cat((v_NMH, torch.zeros(heads, 2, value_size, dtype=torch.float64)), dim=1)[:, m]
    numerator = total * expected_NH - e_NS[:, j, None] * v_NSH[:, j] + e_m[:, None] * v_m
    output = numerator / (total - e_NS[:, j, None] + e_m[:, None])
    return output.flatten(), (j, m if m < count else _ZERO if m == count else _OMITTED)


def _kind_of(query: AttentionContext, position: int, source: int, contents: ContentIndex) -> str:
    newest = "the newest token" if position == int(query.rows.position) else "one position of its history"
    if source == _OMITTED:
        return f"does not see {newest}"
    if source == _ZERO:
        return f"reads {newest} as zeros: not written, or from a slot nobody wrote"
    if int(contents.rows[KEY].request[source]) != int(query.rows.request):
        return f"reads {newest} from a slot that another request wrote"
    return f"reads {newest} from a slot that holds another position of the same request"


def _place_text(query: AttentionContext, position: int, source: int, contents: ContentIndex) -> str:
    where = f"request {int(query.rows.request)}, position {int(query.rows.position)} reads"
    if source < 0:
        return f"{where} position {position} as {'zeros' if source == _ZERO else 'absent'}"
    rows = contents.rows[KEY]
    return f"{where} position {position} as request {int(rows.request[source])}, position {int(rows.position[source])}"


def _content_of(contents: ContentIndex, source: int) -> torch.Tensor:
    key = contents.tensors[KEY]
    return torch.zeros_like(key[0]) if source < 0 else key[source]
