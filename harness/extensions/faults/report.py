"""The score as a table for people and as JSON."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from harness.extensions.faults.fault import Category
from harness.extensions.faults.peers import RULES, TOKENS
from harness.extensions.faults.run import FaultScore, Score


def as_json(score: Score) -> dict[str, Any]:
    """Return the score under the keys of docs/faults.md."""
    return {
        "schema_version": 1,
        "num_faults": len(score.faults),
        "detected": score.detected,
        "localised": score.localised,
        "named": score.named,
        "named_wrongly": score.named_wrongly,
        "num_variants": len(score.variants),
        "false_alarms": score.false_alarms,
        "equivalent": [{"id": fault.id, "proof": fault.equivalent} for fault in score.equivalent],
        "faults": [_fault_json(item) for item in score.faults],
        "alarms": [
            {"id": variant.variant.id, "seed": variant.seed, "message": variant.message}
            for variant in score.variants
            if variant.is_alarm
        ],
        "peers": {name: _peer_json(name, score) for name in (*RULES, TOKENS)},
        "seconds": score.seconds,
    }


def _fault_json(score: FaultScore) -> dict[str, Any]:
    first = score.first
    return {
        "id": score.fault.id,
        "category": str(score.fault.category),
        "detected": score.detected,
        "localised": score.localised,
        "named": score.named,
        "named_wrongly": score.named_wrongly,
        "first_divergence": None
        if first is None
        else {"tap": first.tap, "request": first.request, "position": first.position},
        "explanation": score.error if score.explanation is None else score.explanation.cause,
    }


def _peer_json(name: str, score: Score) -> dict[str, int]:
    return {
        "detected": sum(fault.peers[name][0] for fault in score.faults),
        "right_layer": sum(all(fault.peers[name]) for fault in score.faults),
        "false_alarms": sum(variant.peers.get(name, False) for variant in score.variants),
    }


def as_text(score: Score, *, tablefmt: str = "simple") -> str:
    """Return the score as tables: by category, by fault, and beside other people's rules."""
    parts = [_categories(score, tablefmt), _faults(score.faults, tablefmt)]
    if score.equivalent:
        proofs = "\n".join(f"- {fault.id}: {fault.equivalent}" for fault in score.equivalent)
        parts.append(f"Not counted, because nothing can show them:\n\n{proofs}")
    if score.variants:
        alarms = [
            f"- {variant.variant.id}, seed {variant.seed}: {variant.message}"
            for variant in score.variants
            if variant.is_alarm
        ]
        parts.append(
            f"{len(score.variants)} benign runs, {score.false_alarms} false alarms."
            + "".join(f"\n{alarm}" for alarm in alarms)
        )
    parts.append("The same recordings judged by other people's rules:\n\n" + _peers(score, tablefmt))
    return "\n\n".join(parts) + "\n"


def _categories(score: Score, tablefmt: str) -> str:
    rows = []
    for name, faults in [*((str(c), [s for s in score.faults if s.fault.category is c]) for c in Category)]:
        if faults:
            rows.append(_counts(name, faults))
    rows.append(_counts("all", score.faults))
    headers = ["category", "faults", "detected", "localised", "named", "named wrongly"]
    return tabulate(rows, headers=headers, tablefmt=tablefmt)


def _counts(name: str, faults: Sequence[FaultScore]) -> list[object]:
    return [
        name,
        len(faults),
        sum(fault.detected for fault in faults),
        sum(fault.localised for fault in faults),
        sum(fault.named for fault in faults),
        sum(fault.named_wrongly for fault in faults),
    ]


def _faults(faults: Sequence[FaultScore], tablefmt: str) -> str:
    rows = [
        [
            fault.fault.id,
            *("yes" if flag else "NO" for flag in (fault.detected, fault.localised)),
            "yes" if fault.named else "WRONGLY" if fault.named_wrongly else "no",
            _place(fault),
            fault.error if fault.explanation is None else fault.explanation.cause,
        ]
        for fault in faults
    ]
    headers = ["fault", "detected", "localised", "named", "found first", "what was said"]
    widths = [None] * 5 + [None if tablefmt == "github" else 70]
    return tabulate(rows, headers=headers, tablefmt=tablefmt, maxcolwidths=widths)


def _place(score: FaultScore) -> str:
    first = score.first
    if first is None:
        who = "the engine" if score.fault.suite is None else "a property suite"
        return f"{who} raised" if score.error else "-"
    return f"{(first.tap or '').removeprefix('model.')} ({first.request}, {first.position})"


def _peers(score: Score, tablefmt: str) -> str:
    rows: list[list[object]] = [
        ["this harness", score.detected, f"{score.localised} at the operation and row", score.false_alarms]
    ]
    for name in (*RULES, TOKENS):
        counts = _peer_json(name, score)
        rows.append([name, counts["detected"], f"{counts['right_layer']} in the layer", counts["false_alarms"]])
    num_faults, num_variants = len(score.faults), len(score.variants)
    headers = ["rule", f"detected of {num_faults}", "localised", f"false alarms of {num_variants}"]
    return tabulate(rows, headers=headers, tablefmt=tablefmt)
