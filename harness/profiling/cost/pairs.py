"""The number of pairs of a query and a key in attention: its cost is proportional to it."""


def causal_pairs(num_queries: int, context_len: int) -> int:
    """Return the pairs of the last `num_queries` of `context_len` positions, each with itself and all before it.

    The keys that were there before the first query make a rectangle, the queries among themselves a triangle:
    T (C - T) + T (T + 1) / 2.
    """
    num_before = context_len - num_queries
    return num_queries * num_before + num_queries * (num_queries + 1) // 2


def visible_pairs(num_queries: int, context_len: int, window: int | None) -> int:
    """Return the same where each position sees no more than its latest `window` ones, itself included.

    Position i sees min(i + 1, window) keys, so with a window the pairs beyond it fall away: for each query as many as
    its causal keys exceed the window by.
    """
    pairs = causal_pairs(num_queries, context_len)
    if window is None or context_len <= window:
        return pairs
    longest = context_len - window
    """Keys that the last query does not see; one fewer for each query before it, down to none."""
    shortest = max(0, longest - num_queries + 1)
    return pairs - (shortest + longest) * (longest - shortest + 1) // 2
