from types import SimpleNamespace

import torch
from minisgl import core, distributed
from minisgl.message import AbortBackendMsg, UserMsg
from minisgl.scheduler import Scheduler, cache, decode, prefill, table

distributed.set_tp_info(0, 1)


class Adapter(Scheduler):
    """mini-sglang's scheduler without its engine: pytest --pyargs harness.properties --scheduler scheduler:Adapter"""

    budget_covers, reuses_prefixes = "prompts", True
    max_steps_in_flight = 2  # `overlap_loop`
    refuses_impossible = False  # such requests are cut, or dropped with a warning

    def __init__(self, *, num_blocks, block_size, max_num_batched_tokens, max_num_seqs, max_model_len):
        core._GLOBAL_CTX = core.Context(page_size=block_size)
        self.page_table = torch.zeros((max_num_seqs + 1, max_model_len + block_size), dtype=torch.int32)
        self.table_manager = table.TableManager(max_num_seqs, self.page_table)
        self.cache_manager = cache.CacheManager(num_blocks, block_size, self.page_table, "radix")
        self.decode_manager = decode.DecodeManager(block_size)
        self.prefill_manager = prefill.PrefillManager(self.cache_manager, self.table_manager, self.decode_manager)
        self.engine, self.finished_reqs, self.eos_token_id = SimpleNamespace(max_seq_len=max_model_len), set(), 2
        self.budget, self.size, self.held, self.steps = max_num_batched_tokens, block_size, {}, []
        self.send_result = lambda reply: None

    def add(self, request_id, token_ids, limit):
        self._process_one_msg(UserMsg(request_id, torch.tensor(token_ids).int(), core.SamplingParams(max_tokens=limit)))

    def abort(self, request_id):
        self._process_one_msg(AbortBackendMsg(request_id))

    def schedule(self):
        prompts = self.prefill_manager.schedule_next_batch(self.budget)
        batch = prompts or self.decode_manager.schedule_next_batch() or core.Batch([], "decode")
        self.cache_manager.allocate_paged(batch.reqs)
        chunks = [(req.uid, req.cached_len, req.device_len) for req in batch.reqs]
        for req in batch.reqs:
            self.held[req.uid] = req
            req.complete_one()
        self.decode_manager.filter_reqs(batch.reqs)
        self.steps.append(batch)
        return chunks

    def update(self, sampled):
        step = SimpleNamespace(batch=self.steps.pop(0))
        tokens = torch.tensor([sampled.get(req.uid, 0) for req in step.batch.reqs]).int()
        self._process_last_data((step, (None, tokens, SimpleNamespace(synchronize=int))))

    def running(self):
        return list(self.held)

    def _free_req_resources(self, req):
        super()._free_req_resources(self.held.pop(req.uid, req))

    def block_table(self, request_id):
        slots = self.page_table[self.held[request_id].table_idx, : self.held[request_id].cached_len]
        return (slots[:: self.size] // self.size).tolist()
