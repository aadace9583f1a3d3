"""The granularity of a recording: the operations between the taps that are there."""

from harness.formats.taps import Graph, Operation


def unrecorded_before(graph: Graph, usable: set[str]) -> dict[str, tuple[str, ...] | None]:
    """Return, for each recorded tap whose inputs were not all recorded, the unrecorded taps that HF computes before it.

    They reach back to the nearest recorded taps. None if they reach back to the model's own tokens: then all of it so
    far would be judged as one operation, and propagation judges that better. Tokens that a layer looks ahead to are
    near.
    """
    found: dict[str, tuple[str, ...] | None] = {}
    for operation in graph:
        if operation.tap in usable and not operation.is_kept and not set(operation.inputs) <= usable:
            between = _unrecorded(graph, operation, usable)
            is_closed = all(graph[tap].inputs or graph[tap].tokens_ahead for tap in between)
            found[operation.tap] = tuple(op.tap for op in graph if op.tap in between) if is_closed else None
    return found


def _unrecorded(graph: Graph, operation: Operation, usable: set[str]) -> set[str]:
    found: set[str] = set()
    pending = [tap for tap in operation.inputs if tap not in usable]
    while pending:
        tap = pending.pop()
        if tap not in found:
            found.add(tap)
            pending += [item for item in graph[tap].inputs if item not in usable]
    return found
