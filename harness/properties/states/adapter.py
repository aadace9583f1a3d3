"""The interface of a state cache under test, which is a class that is called with `num_slots` and `block_size`.

A recurrent or convolutional layer keeps one state of a fixed size for each request, with all tokens so far in it. The
suite makes the states: integers, another one for each prefix and salt, and 0 for no tokens. The adapter puts them where
its engine has states: where that is a pool of tensors, it fills a slot with the integer and reads it from there.

Keywords switch more on. The class: `hash_bits` (hashes are cut to so many bits, or None), `num_host_slots` (room for
the states that `offload` copies). `allocate`, `lookup`, `offload` and `load`: `salt`; different salts share nothing.

Any exception that leaves a method is a finding, but not from `free` of a request that is gone.
"""

from dataclasses import dataclass, field

from harness.properties.blocks.adapter import PoolCapabilities

REQUIRED = {
    "allocate": "allocate(request_id, token_ids) -> int: a state for a new request; how many of its tokens are in it "
    "already, from a snapshot. None: there is no room, and nothing has changed",
    "write": "write(request_id, token_ids, states): the next tokens, and the state after each; the last is now the "
    "request's. False: there is no room, and nothing has changed",
    "read": "read(request_id) -> int: the state that the request's next token would be computed from",
    "free": "free(request_id): the request ends, also one that waits for `load`",
}
"""By method: its signature."""

OPTIONAL = {
    "fork": ("fork(parent_id, child_id) -> bool: a second request with the same tokens and state", (28,)),
    "rewind": ("rewind(request_id, num_tokens) -> int: go back; how many tokens are in the state then", (30,)),
    "draft": ("draft(request_id, token_ids, states): like write; all but the first token are drafts", (30, 31)),
    "accept": ("accept(request_id, num_tokens): so many tokens of `draft` are kept, the others are not", (30, 31)),
    "preempt": ("preempt(request_id): like free, and the request comes back; free is used without it", (23,)),
    "abort": ("abort(request_id): like free, at any time; free is used without it", (23,)),
    "lookup": ("lookup(token_ids) -> int: tokens that allocate would find", (13, 14)),
    "cached_states": ("cached_states() -> [(all tokens, state)]: what look-ups find, each once", (11, 17, 31)),
    "num_free": ("num_free() -> int: slots that no request holds, those of snapshots among them", (1, 12)),
    "free_list": ("free_list() -> [slot]: the same slots, walked", (1, 12)),
    "slots": ("slots(request_id) -> [slot]: those that a request holds", (1,)),
    "evict": ("evict(num_slots): drop the snapshots in so many slots", (11,)),
    "reset": ("reset(): drop all snapshots, on the host too; requests go on", (29,)),
    "offload": ("offload(token_ids) -> transfer or None: begin to copy a snapshot of a prefix to the host", (32,)),
    "load": ("load(request_id, token_ids) -> transfer or None: like allocate, from a state on the host", (32,)),
    "complete": ("complete(transfer): the transport copies the state now, and tells the cache", (32,)),
    "fail": ("fail(transfer): the transport copies nothing, and tells the cache", (32,)),
    "poll": ("poll() -> {transfer: num_tokens}: those that ended, once; the tokens in the request's state", (32,)),
    "num_free_host": ("num_free_host() -> int: slots of the host that no transfer uses", (1,)),
}
"""By method: its signature, and the invariants that are checked, or checked harder if it is offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCapabilities(PoolCapabilities):
    """An adapter's declaration of its cache, by attributes of the same names."""

    pool_sizes: tuple[int, ...] = (1, 2, 3, 5, 8, 16, 32, 64)
    """Numbers of slots, from those where each snapshot goes soon to those where all stay."""
    snapshots: str = field(default="any", metadata={"choices": ("any", "blocks", "none")})
    """`"blocks"`: the state after each full block is kept, as long as there is room (17). `"none"`: no request finds
    what another has computed. `"any"`: the cache chooses."""
    slots_per_request: int = 1
    """The most slots that a request holds, drafts included."""
    max_draft_tokens: int = 3
    """The most drafts after a token that is certain."""
