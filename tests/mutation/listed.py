"""Changes that were once made by hand and not noticed; each must be noticed for good."""

from __future__ import annotations

from tests.mutation.mutants import Mutant, replaced

_COMPARE, _ENGINE = "harness/judge/compare", "reference_engine"

LISTED: tuple[Mutant, ...] = (
    # the propagated bound tripled
    replaced(f"{_COMPARE}/propagated.py", "RATIO_BOUND = 10.0", "RATIO_BOUND = 30.0"),
    # attention's score term changed tenfold
    replaced(f"{_COMPARE}/bounds.py", "model.scores * scores * fine", "10 * model.scores * scores * fine"),
    replaced(f"{_COMPARE}/bounds.py", "+ model.scores * scores * fine", ""),
    # the underflow term dropped
    replaced(f"{_COMPARE}/bounds.py", "    if model.roundings:\n", "    if False:\n"),
    # a convention always preferred
    replaced(f"{_COMPARE}/row_judge.py", "best is None or best.num_bad >= errors.num_bad", "best is None"),
    # `preempted` reached by an engine without a cache
    replaced(f"{_COMPARE}/triggers.py", "elif has_lost and not computed", "elif not computed"),
    # the variance over channels, or rows, dropped
    replaced(f"{_COMPARE}/systematic.py", "_variances(rows) + _variances(channels)", "_variances(rows)"),
    replaced(f"{_COMPARE}/systematic.py", "_variances(rows) + _variances(channels)", "_variances(channels)"),
    # the cache's read-back check switched off
    replaced(
        f"{_COMPARE}/cache.py",
        "bad = writes.differs(read, written, operation)",
        "bad = torch.zeros(len(read), dtype=torch.bool)",
    ),
    # the clamps at the typical row's error off (the composite's clamp has gone with it)
    replaced(f"{_COMPARE}/bounds.py", ".clamp(min=typical)", ""),
    replaced(f"{_COMPARE}/propagated.py", ".clamp(min=self.floors[tap])", ""),
    # near-ties halved
    replaced(f"{_COMPARE}/tokens.py", "2 * float(logit_noise.max())", "float(logit_noise.max())"),
    # digests not verified
    replaced(
        "harness/formats/recording/check.py",
        "    if actual != expected:\n        raise",
        "    if False:\n        raise",
    ),
    replaced("harness/oracle/golden.py", "    if info.digest() != info.sha256:", "    if False:"),
    # the limit of what a control may lose times 100 (it stands where the self-check's stood)
    replaced(f"{_COMPARE}/bounds.py", "CONTROL_FACTOR = 4.0", "CONTROL_FACTOR = 400.0"),
    # the bias added on every rank
    replaced(f"{_ENGINE}/parallel/ranks.py", "product if self.rank == 0 else replace(product, bias_O=None)", "product"),
    # an all-reduce not in float32
    replaced(f"{_ENGINE}/parallel/ranks.py", "total = x.to(torch.float32)", "total = x.clone()"),
    # padding of graphs not zeroed
    replaced(f"{_ENGINE}/fast/graphs.py", "self.rows_4R[:, num_rows:].zero_()", "pass"),
)
