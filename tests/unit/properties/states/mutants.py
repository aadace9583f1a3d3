"""Small changes to a sound state cache: bugs of hybrid models' caches, of drafts, and of connectors."""

from ..mutation import mutant
from .checkpointed import CheckpointedStates as States
from .checkpointed import Pool

NOT_COMPARED = ("snapshot is not None and snapshot.token_ids == tuple(token_ids[:length])", "snapshot is not None")
AT_BOUNDARY = "if len(request.token_ids) % self.block_size == 0:"
STATE_WRITTEN = "self.pool.memory[request.slot] = state"

POOL_MUTANTS = [
    mutant("evicted snapshot is still found", Pool.evict, ("del self.snapshots[oldest.key]", "pass"),
           killed_by=(1, 4, 29, 31)),
    mutant("slot lost on eviction", Pool.evict, ("self.unused.append(oldest.slot)", "pass"), killed_by=(1, 6, 12)),
    mutant("all snapshots evicted for one slot", Pool.take,
           ("self.evict()", "[self.evict() for _ in list(self.snapshots)]"), killed_by=11),
    mutant("nothing is ever evicted", Pool.take, ("self.evict()", "pass"), killed_by=(1, 6, 12)),
    mutant("slot handed out twice", Pool.take, ("self.unused.pop()", "self.unused[-1]"), killed_by=(1, 4, 28, 31)),
    mutant("collision taken as a hit", Pool.find, NOT_COMPARED, killed_by=(14, 29, 30, 32)),
    mutant("hash of the last two tokens only", Pool.key, ("hash(tuple(token_ids))", "hash(tuple(token_ids[-2:]))"),
           killed_by=(14, 17, 29, 30, 32), also=((Pool.find, (NOT_COMPARED,)),)),
    mutant("salt ignored", Pool.key, ("return salt, number", 'return "", number'), killed_by=(29, 31, 32, 17, 30)),
    mutant("hit leaves no token to compute", Pool.find,
           ("range(len(token_ids) - 1, 0, -1)", "range(len(token_ids), 0, -1)"), killed_by=(14, 30)),
    mutant("snapshots in use listed as free", Pool.free_list, (" if not entry.num_readers", ""), killed_by=1),
]  # fmt: skip

STATE_MUTANTS = [
    # Requests come
    mutant("state of the request before not cleared", States.allocate,
           ("self.pool.memory[slot] = state", "self.pool.memory[slot] = state or self.pool.memory[slot]"),
           killed_by=29),
    mutant("state not restored on a hit", States.allocate,
           ("state = 0 if snapshot is None else self.pool.memory[snapshot.slot]", "state = 0"), killed_by=29),
    mutant("restored into the slot of the snapshot", States.allocate,
           ("slot = self.pool.take()", "slot = self.pool.take() if snapshot is None else snapshot.slot"),
           killed_by=(1, 4, 31)),
    mutant("crash where there is no room", States.allocate, ("self.pool.take()", "self.pool.unused.pop()"),
           killed_by=12),
    mutant("a token too many counted as restored", States.allocate,
           ("return len(request.token_ids)", "return len(request.token_ids) + (snapshot is not None)"),
           killed_by=(14, 29)),
    mutant("look-up without salt", States.lookup, ("(token_ids, salt)", '(token_ids, "")'), killed_by=(13, 17)),
    # Snapshots
    mutant("snapshot one token after the boundary", States.write, (AT_BOUNDARY, AT_BOUNDARY.replace("== 0", "== 1")),
           killed_by=17),
    mutant("snapshot one token before the boundary", States.write,
           (AT_BOUNDARY, AT_BOUNDARY.replace("== 0", "== self.block_size - 1")), killed_by=17),
    mutant("state of the chunk's end kept for its boundaries", States.write,
           (STATE_WRITTEN, "self.pool.memory[request.slot] = states[-1]"), killed_by=31),
    mutant("snapshot taken before the token is in the state", States.write, (STATE_WRITTEN, "pass"),
           ("self.keep(request)", f"self.keep(request)\n        {STATE_WRITTEN}"), killed_by=31),
    mutant("no snapshot at all", States.write, ("self.keep(request)", "pass"), killed_by=17),
    mutant("no snapshot within a chunk", States.write,
           (AT_BOUNDARY, AT_BOUNDARY.replace(":", " and state == states[-1]:")), killed_by=17),
    mutant("snapshot is the slot that the request goes on writing", States.keep,
           ("slot = self.pool.take()", "slot = request.slot"), killed_by=(1, 4, 31)),
    mutant("snapshot not copied", States.keep, ("self.pool.memory[slot] = self.pool.memory[request.slot]", "pass"),
           killed_by=31),
    mutant("slot lost where the snapshot is there already", States.keep, ("return", "pass"), killed_by=(1, 6)),
    mutant("snapshot of another request's tokens replaced", States.keep,
           ("        self.pool.keep(request", "        self.pool.evict()\n        self.pool.keep(request"),
           killed_by=(11, 17)),
    mutant("reset leaves the snapshots", States.reset, ("(self.pool, self.host)", "(self.host,)"), killed_by=(29, 31)),
    mutant("reset leaves the host", States.reset, ("(self.pool, self.host)", "(self.pool,)"), killed_by=32),
    # Requests fork, go back and go
    mutant("fork shares the slot", States.fork, ("slot=slot", "slot=parent.slot"), killed_by=(1, 28)),
    mutant("fork without the state", States.fork, ("self.pool.memory[slot] = self.pool.memory[parent.slot]", "pass"),
           killed_by=28),
    mutant("fork shares the list of tokens", States.fork, ("list(parent.token_ids)", "parent.token_ids"),
           killed_by=(17, 31)),
    mutant("going back leaves the state", States.rewind, ("self.pool.memory[request.slot] = 0 if", "_ = 0 if"),
           killed_by=30),
    mutant("going back says what was asked for", States.rewind, ("return len(request.token_ids)", "return num_tokens"),
           killed_by=30),
    mutant("going back leaves the tokens", States.rewind,
           ("request.token_ids = [] if snapshot is None else list", "kept = [] if snapshot is None else list"),
           ("return len(request.token_ids)", "return len(kept)"), killed_by=(17, 30, 31)),
    mutant(
        "going back takes the slot of the snapshot", States.rewind,
        ("self.pool.memory[request.slot] = 0", "request.slot = request.slot if snapshot is None else snapshot.slot\n"
         "    self.pool.memory[request.slot] = 0"), killed_by=(1, 4, 30, 31),
    ),
    mutant("rejected drafts kept", States.accept, ("[:num_tokens]", ""), killed_by=30),
    mutant("an accepted draft lost", States.accept, ("[:num_tokens]", "[: num_tokens - 1]"), killed_by=30),
    mutant("state of the last draft kept", States.accept,
           ("for _, state in accepted", "for _, state in self.requests[request_id].drafts[-num_tokens:]"),
           killed_by=30),
    mutant(
        "snapshot of drafts that may be rejected", States.draft,
        ("self.requests[request_id].drafts =",
         "request = self.requests[request_id]\n"
         "    num_tokens, state = len(request.token_ids), self.pool.memory[request.slot]\n"
         "    self.write(request_id, token_ids, states)\n"
         "    del request.token_ids[num_tokens:]\n"
         "    self.pool.memory[request.slot] = state\n"
         "    request.drafts ="), killed_by=31,
    ),
    mutant("slot never free again", States.free, ("self.pool.unused.append(request.slot)", "pass"), killed_by=(1, 6)),
    mutant("double free accepted", States.free,
           ("self.requests.pop(request_id, None)", "self.requests.get(request_id)"), killed_by=(1, 4)),
    mutant("count of free slots forgets transfers", States.num_free, (" - num_read", ""), killed_by=1),
]  # fmt: skip

CONNECTOR_MUTANTS = [
    mutant("on the host before it is copied", States.offload,
           ("return self.begin(", "self.host.keep(snapshot.token_ids, salt, target)\n    return self.begin("),
           killed_by=(1, 32)),
    mutant("one number for all transfers", States.begin, ("self.num_transfers += 1", "self.num_transfers = 1"),
           killed_by=(1, 32)),
    mutant("loaded from a slot of the same number", States.complete,
           ("source.memory[transfer.snapshot.slot]", "source.memory[transfer.target % len(source.memory)]"),
           killed_by=32),
    mutant("load is not copied", States.complete,
           ("target.memory[transfer.target] =", "({} if transfer.is_load else target.memory)[transfer.target] ="),
           killed_by=32),
    mutant("offload that is complete is not reported", States.complete, ("self.ended[number] = 0", "pass"),
           killed_by=32),
    mutant("second copy of a state on the host keeps its slot", States.complete,
           ("self.host.unused.append(transfer.target)", "pass"), killed_by=1),
    mutant(
        "failed load counts as loaded", States.fail,
        ("self.end_load(number, transfer, [])", "self.end_load(number, transfer, list(transfer.snapshot.token_ids))"),
        killed_by=32,
    ),
    mutant("failed load leaves what was in the slot", States.fail, ("self.pool.memory[transfer.target] = 0", "pass"),
           killed_by=32),
    mutant(
        "failed offload is found on the host", States.fail,
        ("self.host.unused.append(transfer.target)",
         "self.host.keep(transfer.snapshot.token_ids, transfer.snapshot.key[0], transfer.target)"), killed_by=(1, 32),
    ),
    mutant("slot of the host lost on failure", States.fail, ("self.host.unused.append(transfer.target)", "pass"),
           killed_by=1),
    mutant("snapshot never evicted after a failure", States.fail, ("transfer.snapshot.num_readers -= 1", "pass"),
           killed_by=1),
    mutant("transfer reported twice", States.poll, ("self.ended, {}", "self.ended, self.ended"), killed_by=32),
    mutant("one transfer reported of several", States.poll,
           ("ended, self.ended = self.ended, {}", "ended = dict([self.ended.popitem()]) if self.ended else {}"),
           killed_by=32),
]  # fmt: skip

RARE_MUTANTS = [
    mutant("snapshot evicted while a transfer reads it", Pool.evict, ("if not entry.num_readers", "if True"),
           killed_by=(1, 32)),
    mutant("one snapshot too many evicted", States.evict, ("range(num_slots)", "range(num_slots + 1)"), killed_by=11),
    mutant("fork loses the salt", States.fork, ("salt=parent.salt", 'salt=""'), killed_by=(17, 29, 32)),
    mutant("going back a token too few", States.rewind, ("num_tokens + 1", "num_tokens + 2"), killed_by=30),
    mutant("slot of a dropped load given away before the transport ends", States.free,
           ("transfer.request_id = None", "transfer.request_id = None; self.pool.unused.append(transfer.target)"),
           killed_by=(1, 4, 28, 31)),
    mutant("dropped load comes back", States.free, ("transfer.request_id = None", "pass"), killed_by=(1, 6, 12)),
    mutant(
        "what a transfer reads is not held", States.begin, ("transfer.snapshot.num_readers += 1", "pass"),
        killed_by=(1, 32),
        also=(
            (States.complete, (("transfer.snapshot.num_readers -= 1", "pass"),)),
            (States.fail, (("transfer.snapshot.num_readers -= 1", "pass"),)),
        ),
    ),
    mutant("readable while it is loaded", States.load,
           ("request = Request", "self.pool.keep(snapshot.token_ids, salt, target)\n    request = Request"),
           killed_by=(1, 4, 29, 31)),
    mutant("slot of a dropped load lost", States.end_load, ("self.pool.unused.append(transfer.target)", "pass"),
           killed_by=(1, 6)),
]  # fmt: skip
"""Those that take hundreds of examples."""

COMMON_MUTANTS = [*POOL_MUTANTS, *STATE_MUTANTS, *CONNECTOR_MUTANTS]
