"""The reference engine, timed."""

from harness.bench.peer import OURS, Generation, Setting
from harness.bench.workload import Workload
from harness.engines.reference_errors import reference_errors
from harness.engines.reference_options import parse_reference_options
from reference_engine import EngineConfig, LLMEngine, SamplingParams


class ReferencePeer:
    """`LLMEngine`, step by step."""

    name = OURS
    shows_steps = True

    def __init__(self, setting: Setting) -> None:
        given = parse_reference_options(setting.engine_options)
        block_size = given.get("block_size", EngineConfig().block_size)
        sizes = {
            "max_num_seqs": setting.max_requests,
            "max_model_len": setting.max_request_len,
            # One block a request is filled in part only, and block 0 is nobody's.
            "num_blocks": 1 + setting.max_requests + setting.max_total_len // block_size,
        }
        with reference_errors("EngineConfig"):
            config = EngineConfig(dtype=setting.dtype, device=setting.device, **{**sizes, **given})
            self._engine = LLMEngine(setting.folder, config)

    def generate(self, workload: Workload) -> Generation:
        """See `Peer.generate`."""
        engine, generation = self._engine, Generation()
        tokens: dict[int, list[int]] = {}
        for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True):
            params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)
            tokens[engine.add_request(prompt, params)] = []
        while engine.has_unfinished():
            outputs = engine.step()
            for output in outputs:
                tokens[output.request_id].append(output.token_id)
            if outputs:
                generation.end_step()
        generation.token_ids = list(tokens.values())
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        self._engine.close()
