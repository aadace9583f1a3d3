"""HuggingFace as a peer: `generate` on one padded batch, and `generate_batch` with a length for each request."""

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from harness.errors import Code, HarnessError
from harness.extensions.bench.peer import BenchConfig, BenchWorkload, Generation, PeerMissingError

PAD_TOKEN = 0


def load_hf_model(setting: BenchConfig, dtype: str | None = None) -> Any:
    """Return HuggingFace's model of the checkpoint, with sdpa attention."""
    model = AutoModelForCausalLM.from_pretrained(
        setting.folder,
        dtype=getattr(torch, dtype or setting.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    model.generation_config = GenerationConfig()  # nothing of the checkpoint's own: no end of text, no penalty
    return model.to(setting.device).eval()


class HfGeneratePeer:
    """`model.generate`, padded on the left."""

    name = "hf-generate"
    shows_steps = True
    cache: str | None = None
    """The implementation of the cache; None: HuggingFace's choice, one that grows."""

    def __init__(self, setting: BenchConfig) -> None:
        self._model = load_hf_model(setting)
        self._device = setting.device

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        generation = Generation()
        width = max(map(len, workload.prompts))
        rows = [[PAD_TOKEN] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        with torch.no_grad():
            tokens = self._model.generate(
                input_ids=torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max(workload.output_lens),
                do_sample=False,
                pad_token_id=PAD_TOKEN,
                cache_implementation=self.cache,
                stopping_criteria=StoppingCriteriaList([_Clock(generation)]),
            )
        continued = tokens[:, width:].tolist()
        generation.token_ids = [row[:length] for row, length in zip(continued, workload.output_lens, strict=True)]
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        del self._model


class HfStaticPeer(HfGeneratePeer):
    """The same with a cache of fixed size, for which `generate` compiles the step of decode on a GPU."""

    name = "hf-static"
    cache = "static"


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing, but is asked after every step."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self._generation.end_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


PAGE_SIZE = 256
TIMEOUT_SECONDS = 600


def _page_size_field(config: type) -> str:
    """Return what a page's size is called; transformers 5.17 calls a page a block."""
    return "page_size" if "page_size" in inspect.signature(config).parameters else "block_size"


class HfContinuousPeer:
    """A manager that is made and warmed up before the clock starts.

    Raises:
        PeerMissingError: transformers 5.17 on a CPU, without psutil: it takes the machine's memory for nothing.
    """

    name = "hf-continuous"
    shows_steps = False

    def __init__(self, setting: BenchConfig) -> None:
        page_size = _page_size_field(ContinuousBatchingConfig)
        if page_size == "block_size" and setting.device == "cpu" and find_spec("psutil") is None:
            raise PeerMissingError("this transformers needs psutil on a CPU", package="psutil")
        self._model = load_hf_model(setting)
        self._config = ContinuousBatchingConfig(
            **{page_size: PAGE_SIZE},
            num_blocks=1 + setting.max_requests + setting.max_total_len // PAGE_SIZE,
            max_batch_tokens=max(2048, setting.max_request_len),
            allow_block_sharing=False,
        )

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        greedy = GenerationConfig(do_sample=False, max_new_tokens=max(workload.output_lens), eos_token_id=-1)
        with (
            torch.no_grad(),
            self._model.continuous_batching_context_manager(
                generation_config=greedy, continuous_batching_config=self._config
            ) as manager,
        ):
            generation = Generation()
            names = [
                manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
                for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
            ]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=TIMEOUT_SECONDS)
                if result is None:
                    what = "HuggingFace's continuous batching ended without an answer"
                    raise HarnessError(Code.ENGINE_FAILED, what, where=self.name, actual=f"{len(results)} results")
                if result.is_finished():
                    results[result.request_id] = result
            generation.end_step()
        generation.token_ids = [list(results[name].generated_tokens) for name in names]
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        del self._model
