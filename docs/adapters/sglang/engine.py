"""SGLang 0.5.23 on a CPU, operation by operation, without its kernels: see cpu.py.

`Runner` runs its model step by step, from which the taps are learned; `Engine` then runs its own scheduler.
"""

from array import array
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import cpu  # noqa: F401  # before SGLang
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardBatch as SGLangBatch
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.engines import Capabilities
from harness.engines.adapter import engine_refusals
from harness.engines.by_content.scheduled import ForwardBatch, StepWatcher, learn_taps
from harness.engines.paged_cache import PagedCache

RESERVE = 4
"""Slots beyond those of the longest request that its scheduler wants to be free."""


class Watcher(StepWatcher):
    step = None

    def read_batch(self, inputs):
        step, table = self.step, self.step.req_to_token_pool.req_to_token
        lengths = step.extend_lens if step.forward_mode.is_extend() else [1] * len(step.reqs)
        requests = [int(request.rid) for request in step.reqs]
        rows = zip(requests, step.req_pool_indices.tolist(), step.seq_lens_cpu.tolist(), strict=True)
        return ForwardBatch(
            requests=requests,
            starts=torch.tensor([0, *lengths]).cumsum(0).tolist(),
            positions=inputs["positions"].tolist(),
            slot_mapping=step.out_cache_loc,
            block_tables={"": {request: table[row, :length].tolist() for request, row, length in rows}},
        )

    def logits(self, arguments, named):
        return arguments[0].next_token_logits

    def sampled_tokens(self, output):
        return output


class Runner:
    """Its model runner and its pools; requests are put together here and not by its scheduler."""

    def __init__(self, scheduler):
        self.runner, self.tree, self.requests = scheduler.tp_worker.model_runner, scheduler.tree_cache, {}
        self.model, self.allocator = self.runner.model, self.runner.token_to_kv_pool_allocator
        self.rows = self.runner.req_to_token_pool

    @torch.inference_mode()
    def step(self, work):
        for number, tokens, first in work:
            request = self.requests.setdefault(number, new_request(number))
            request.full_untruncated_fill_ids.extend(tokens)
            request.prefix_len, request.extend_end = first, first + len(tokens)
        batch = ScheduleBatch.init_new(
            reqs=[self.requests[number] for number, _, _ in work], req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree, model_config=self.runner.model_config,
            enable_overlap=False, spec_algorithm=SpeculativeAlgorithm.NONE,
        )  # fmt: skip
        if all(first and len(tokens) == 1 for _, tokens, first in work):
            batch.req_pool_indices_cpu = batch.req_pool_indices = torch.tensor([r.kv.req_pool_idx for r in batch.reqs])
            batch.seq_lens_cpu = batch.seq_lens = batch.orig_seq_lens = torch.tensor([first for _, _, first in work])
            batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, self.runner.model_config.vocab_size)
            batch.prepare_for_decode()
        else:
            batch.prepare_for_extend()
        batch.input_ids = torch.tensor([token for _, tokens, _ in work for token in tokens])
        forward = SGLangBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        return self.runner.forward(forward).logits_output.next_token_logits

    def slots(self, request):
        return self.rows.req_to_token[request.kv.req_pool_idx, : request.extend_end].long()

    def finish(self, number):
        request = self.requests.pop(number)
        self.allocator.free(self.slots(request))
        self.rows.free(request)


def new_request(number):
    params = SamplingParams(max_new_tokens=1 << 20, temperature=0.0)
    params.normalize(None)
    request = Req(str(number), "", array("q"), params, vocab_size=1 << 30)
    request.full_untruncated_fill_ids = array("q")
    return request


class LoneScheduler(Scheduler):
    def init_output_streamer(self):
        self.output_streamer = MagicMock()  # there is no detokenizer


class Engine:
    name = "sglang"
    capabilities = Capabilities(schedules=("plain", "chunked", "batched", "mixed", "prefix-hit", "preempted"))

    def __init__(self, folder, dtype, **arguments):
        self.folder, self.dtype = folder, dtype
        arguments = ServerArgs(
            model_path=str(folder), dtype=dtype, device="cpu", attention_backend="torch_native", page_size=1,
            sampling_backend="pytorch", skip_tokenizer_init=True, disable_overlap_schedule=True, max_total_tokens=4096,
            max_running_requests=64, mem_fraction_static=0.1, log_level="error", **arguments,
        )  # fmt: skip
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        with engine_refusals("SGLang", folder):
            self.scheduler = LoneScheduler(arguments, PortArgs.init_new(arguments))
        self.runner = self.scheduler.tp_worker.model_runner

    def match_taps(self, graph):
        runner = Runner(self.scheduler)
        self.graph, self.taps = graph, learn_taps(runner, self.folder, graph, self.dtype)
        for number in [*runner.requests]:
            runner.finish(number)

    def run(self, workload, writer):
        scheduler, schedule, allocator = self.scheduler, workload.schedule, self.scheduler.token_to_kv_pool_allocator
        scheduler.flush_cache()
        scheduler.chunked_prefill_size = schedule.chunk_size
        scheduler.is_mixed_chunk = schedule.is_batched and schedule.chunk_size is not None
        scheduler.new_token_ratio_tracker.current = 0.0  # it admits what fits now, and preempts later
        others = allocator.alloc(allocator.available_size() - workload.num_blocks(1) - RESERVE)
        requests, caches = workload.all_requests, list(self.caches())
        model, sampler = self.runner.model, self.runner.sampler
        watcher = Watcher(
            model, sampler, self.taps, self.graph, requests, writer, caches=caches, begins=model.model
        )  # fmt: skip
        self.capabilities = replace(self.capabilities, unsupported_taps=watcher.unsupported_taps())
        with watcher:
            for batch in workload.batches:
                for request in batch:
                    scheduler._add_request_to_queue(greedy(request, shares=schedule.trigger == "prefix_hit"))
                self.run_to_the_end(watcher)
        allocator.free(others)

    @torch.inference_mode()
    def run_to_the_end(self, watcher):
        """Do what `Scheduler.event_loop_normal` does until nothing is left."""
        scheduler = self.scheduler
        while True:
            plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
            scheduler.running_batch, scheduler.last_batch = plan.running_batch, plan.batch_to_run
            if plan.batch_to_run is None:
                return
            watcher.step = plan.batch_to_run
            scheduler.process_batch_result(plan.batch_to_run, scheduler.run_batch(plan.batch_to_run))

    def caches(self):
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        for at, layer in enumerate(self.runner.model.model.layers):
            both = pool.k_buffer[at], pool.v_buffer[at]
            for part, name in enumerate(("k_cache", "v_cache")):
                yield PagedCache(
                    tap=f"model.layers.{at}.{name}", tensor=both[part],
                    write=partial(store, pool, layer.self_attn.attn, both, part),
                    num_slots=len(both[part]), block_size=1, row_shape=tuple(both[part].shape[1:]),
                )  # fmt: skip


def store(pool, attention, both, part, rows, slots):
    """Write rows as keys, or as values, through the pool's own writer; the other part stays as it is."""
    parts = [buffer[slots] for buffer in both]
    parts[part] = rows
    pool.set_kv_buffer(attention, slots, *parts)


def greedy(request, *, shares):
    num_new = len(request.token_ids) - request.prompt_length + 1
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0)  # and no token that ends it
    params.normalize(None)
    prompt = array("q", request.token_ids[: request.prompt_length])
    return Req(str(request.id), "", prompt, params, vocab_size=1 << 30, cache_salt=None if shares else str(request.id))


def open_engine(folder, *, dtype, device, options):
    return Engine(folder, dtype)
