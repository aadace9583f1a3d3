"""SGLang's scheduler without its model worker, 0.5.23: pytest --pyargs harness.properties --scheduler scheduler:Adapter"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from pool import MODEL, Pool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

RESERVE = 2
"""Pages beyond those of the longest request that `PrefillAdder` wants to be free."""


class Adapter(Pool, Scheduler):
    block_sizes, budgets = (1, 2, 4), (4, 8, 12, 48)  # a chunk is whole pages
    budget_covers = "prompts"
    refuses_impossible = False  # the engine cuts or refuses them before they are queued
    reuses_prefixes = True
    enable_overlap = is_mixed_chunk = False

    def __init__(self, *, num_blocks, block_size, max_num_batched_tokens, max_num_seqs, max_model_len):
        if max_num_batched_tokens % block_size:
            raise NotImplementedError("SGLang's chunks are whole pages")
        self.make_pool(num_blocks + RESERVE, block_size, max_num_seqs, max_model_len)
        self.set_features()
        self.chunked_prefill_size, self.max_prefill_tokens = max_num_batched_tokens, 1 << 20
        self.page_size, self.max_running_requests = block_size, max_num_seqs
        self.req_to_token_pool, self.tree_cache, self.token_to_kv_pool_allocator = self.rows, self.tree, self.allocator
        self.waiting_queue, self.running_batch, self.last_batch = [], ScheduleBatch(reqs=[], batch_is_full=False), None
        self.policy = SchedulePolicy("fcfs", self.tree, False, False, False)
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        self.requests, self.steps = {}, []
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True, disaggregation_mode=DisaggregationMode.NULL, enable_overlap=self.enable_overlap,
            enable_overlap_mlx=False, model_config=MODEL, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree, hisparse_coordinator=None, req_to_token_pool=self.rows, decode_offload_manager=None,
            metrics_collector=None, metrics_reporter=self.metrics_reporter, draft_worker=None, model_worker=None,
            logprob_result_processor=None, output_streamer=MagicMock(), beam_coordinator=self.beam_coordinator,
            abort_request=self.abort_request,
        )  # fmt: skip

    def set_features(self):
        """Switch off what is not under test, as Scheduler's own constructor does where no option asks for it."""
        for name in (
            "dllm_config", "chunked_req", "_pending_chunked_abort_req", "prefill_delayer", "min_free_slots_delayer",
            "dynamic_chunk_sizer", "hisparse_coordinator", "lora_drainer", "mm_receiver", "decode_offload_manager",
            "scheduler_stage_metrics",
        ):  # fmt: skip
            setattr(self, name, None)
        for name in (
            "enable_hisparse", "enable_hierarchical_cache", "enable_hicache_storage", "enable_lmcache", "enable_lora",
            "enable_unified_cache_external_linker", "enable_priority_preemption", "enable_priority_scheduling",
            "is_hybrid_swa", "require_mlp_sync", "enable_continuous_input_polling",
        ):  # fmt: skip
            setattr(self, name, False)
        self.enable_skip_finishing_decode = self.enable_overlap
        for name in ("grammar_manager", "beam_coordinator", "metrics_reporter", "load_inquirer", "tp_worker"):
            setattr(self, name, MagicMock())
        self.grammar_manager.has_waiting_grammars.return_value = False
        self.beam_coordinator.pending_member_rows.return_value = 0
        self.load_inquirer._get_num_pending_tokens.return_value = 0
        self.metrics_reporter.num_generated_tokens = 0
        self.metrics_reporter.forward_ct_decode = 0
        self.tp_worker.model_runner = SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
        self.dp_attn_adapter = self.ngram_embedding_manager = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda batch: batch,
            prepare_for_forward=lambda batch, **_: batch,
        )  # fmt: skip
        self.model_config, self.spec_algorithm = MODEL, SpeculativeAlgorithm.NONE
        self.disaggregation_mode, self.max_prefill_bs = DisaggregationMode.NULL, 0
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.processed_tokens_counter = self.priority_scheduling_preemption_threshold = self.forward_ct = 0
        self.max_queued_requests = self.truncation_align_size = None
        self.device, self.result_queue = "cpu", []
        self.send_abort_output = lambda output, req: None

    def add(self, request_id, token_ids, max_new_tokens, salt=""):
        self.requests[request_id] = request = self.request(request_id, token_ids, salt, max_new_tokens)
        self._add_request_to_queue(request)

    def schedule(self):
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch, self.last_batch = plan.running_batch, plan.batch_to_run
        batch = plan.batch_to_run
        self.steps.append(batch.copy() if batch and self.enable_overlap else batch)
        self.result_queue = [(step, None) for step in self.steps if step]
        return [] if batch is None else list(self.rows_of(batch))

    @staticmethod
    def rows_of(batch):
        stops = batch.seq_lens_cpu.tolist()
        starts = batch.prefix_lens if batch.forward_mode.is_extend() else [stop - 1 for stop in stops]
        for request, start, stop in zip(batch.reqs, starts, stops, strict=True):
            yield int(request.rid), start, stop

    def update(self, sampled):
        batch = self.steps.pop(0)
        self.result_queue = [(step, None) for step in self.steps if step]
        if batch is None:
            return
        tokens = torch.tensor([sampled.get(int(request.rid), 0) for request in batch.reqs])
        result = GenerationBatchResult(next_token_ids=tokens)
        if batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)

    def running(self):
        return [key for key, request in self.requests.items() if request.kv.holds_kv]

    def block_table(self, request_id):
        return self.pages(self.requests[request_id])

    def num_free(self):
        return super().num_free() - RESERVE


class OverlapAdapter(Adapter):
    """As SGLang runs unless it is told otherwise: a step is planned while another is computed."""

    enable_overlap, max_steps_in_flight = True, 2


class MixedAdapter(Adapter):
    """Prompts and requests that generate share a step (`--enable-mixed-chunk`)."""

    is_mixed_chunk = True
