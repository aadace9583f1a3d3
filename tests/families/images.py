"""Requests with images through the decoders of vision-language models: sound runs, and faults around the images.

python -m tests.families.images [--dtypes float32,bfloat16] [--no-faults | --no-sound] [--only FAULT] [FAMILY ...]
python -m tests.families.images --text [FAMILY ...]                    # requests of text alone, more families

The engine is HF: its vision tower once for each request, then its decoder in pieces, through its own cache. A fault
changes what the decoder is handed (rows of images, positions of three axes, kinds of tokens), or its frequencies.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import harness
import harness.engines.hf as engine_room
import harness.engines.hf_batch as batch_room
from harness.api.arguments import requests_of
from harness.engines.hf import HFEngine
from harness.extensions.faults.zoo.lively import make_lively
from harness.extensions.faults.zoo.quiet import quiet
from harness.extensions.faults.zoo.sizes import EXCEPTIONS, ROPE, SIZES
from harness.extensions.faults.zoo.tiny_config import one_layer_of_each_type, parts_of, sizes_of
from harness.formats.recording import Recording, RequestInfo
from harness.formats.schedule import parse_schedules
from harness.judge.compare import compare_run
from harness.judge.compare.coverage import Requirements
from harness.judge.explain import explain_run
from harness.judge.jobs.opened import record_run, with_duplicate_requests
from harness.oracle.images import DecoderInputs, decoder_inputs, handing
from harness.oracle.make_golden import make_golden
from harness.oracle.model import HFModel, load_model
from harness.plan import plan_request
from harness.results.check import Outcome, RunResult

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava")
TEXT = (
    *FAMILIES, "qwen3_5", "qwen3_5_moe", "internvl", "mistral3", "llava_next", "llava_onevision", "smolvlm", "idefics3",
    "cohere2_vision", "aria", "lfm2_vl",
)  # fmt: skip
OF_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SCHEDULES = (
    "plain", "chunked:3", "chunked:7", "batched", "prefix-hit", "forked", "preempted", "rewound", "speculative",
)  # fmt: skip
IMAGE, BEGIN, END = 250, 252, 253
NUM_NEW = 5
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_heads": 4,
    "num_attention_heads": 4, "patch_size": 4, "image_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2, "fullatt_block_indexes": [1], "window_size": 16,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
}  # fmt: skip
_OWN_VISION = {"qwen2_vl": {"hidden_size": 64}}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_TOKENS_OF_FAMILY = {
    "gemma3": {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END, "mm_tokens_per_image": 4},
    "llava": {"image_token_id": IMAGE},
}
_SECTIONS = {**ROPE, "mrope_section": [2, 3, 3]}


def build(family: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny vision-language model in float32, in eval mode, with lively weights."""
    default = AutoConfig.for_model(family)
    text, vision = default.get_text_config(), default.vision_config
    fields = sizes_of(type(text), SIZES) | parts_of(text, SIZES) | one_layer_of_each_type(text)
    fields |= EXCEPTIONS.get(text.model_type, {}) | ({"rope_parameters": _SECTIONS} if "qwen" in family else {})
    sizes = {name: size for name, size in _VISION.items() if hasattr(vision, name)} | _OWN_VISION.get(family, {})
    config = type(default)(
        text_config=type(text)(**fields).to_dict(),
        vision_config={**sizes, "model_type": vision.model_type},
        **_TOKENS_OF_FAMILY.get(family, _TOKENS),
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        make_lively(model, seed)
    return model


def processed(config: Any, grids: Sequence[tuple[int, int]], *, seed: int, before: int = 5) -> dict[str, torch.Tensor]:
    """Return what a processor would of a request: text, then each image between two tokens, and text after it.

    Args:
        config: of the whole model.
        grids: patches of each image, high and wide; of families with images of one size only their number counts.
        seed: of tokens and pixels.
        before: tokens of text before the first image.
    """
    random, vision = torch.Generator().manual_seed(seed), config.vision_config
    sides, pixels = getattr(vision, "spatial_merge_size", 1), list[torch.Tensor]()
    ids, kinds = torch.randint(3, 240, (before,), generator=random).tolist(), [0] * before
    for height, width in grids:
        if "qwen" in config.model_type:
            size, num_parts = 3 * vision.temporal_patch_size * vision.patch_size**2, height * width // sides**2
            pixels.append(torch.randn(height * width, size, generator=random))
        else:
            size, whole = vision.image_size, (vision.image_size // vision.patch_size) ** 2
            num_parts = getattr(config, "mm_tokens_per_image", whole)
            pixels.append(torch.randn(1, 3, size, size, generator=random))
        text = torch.randint(3, 240, (4,), generator=random).tolist()
        ids += [BEGIN, *[IMAGE] * num_parts, END, *text]
        kinds += [0, *[1] * num_parts, 0, *[0] * len(text)]
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": torch.cat(pixels)}
    if "qwen" in config.model_type:
        grid = torch.tensor([[1, height, width] for height, width in grids])
        return {**inputs, "image_grid_thw": grid, "mm_token_type_ids": torch.tensor([kinds])}
    return {**inputs, "token_type_ids": torch.tensor([kinds])} if config.model_type == "gemma3" else inputs


def requests(config: Any) -> list[Any]:
    """Return three requests: of two images, of text, and of another image after the tokens of the first request."""
    first, last = (processed(config, [(4, 6), (6, 4)], seed=1) for _ in range(2))
    last["pixel_values"] = processed(config, [(4, 6), (6, 4)], seed=2)["pixel_values"]
    return [first, list(range(20, 36)), last]


Change = Callable[[DecoderInputs, RequestInfo], DecoderInputs]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing done wrongly."""

    name: str
    families: Sequence[str] = OF_AXES
    schedule: str = "plain"
    change: Change = lambda inputs, _request: inputs
    """What the decoder is handed for a request in place of the right thing."""
    cut: Callable[[Any], Any] | None = None
    """In place of `handing`: what a step hands."""
    model: Callable[[Any], None] = lambda _model: None
    """Changes the engine's copy of the model."""
    sites: Sequence[str] = ("q_rope", "k_rope")
    """Where it is to be found first."""
    says: Sequence[str] = field(default=())
    """Words of which a right name has one."""


def positions(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Change positions [3, T]; `change` is given the kinds of the tokens, too."""

    def changed(inputs: DecoderInputs, _request: RequestInfo) -> DecoderInputs:
        assert inputs.positions is not None
        return replace(inputs, positions=change(inputs.positions.clone(), inputs.types["mm_token_type_ids"]))

    return changed


def rows(change: Callable[[torch.Tensor, list[list[int]]], torch.Tensor]) -> Change:
    """Change the rows of the decoder's input [T, D]; `change` is given the places of each image, too."""

    def changed(inputs: DecoderInputs, request: RequestInfo) -> DecoderInputs:
        embeddings = inputs.by_token["inputs_embeds"]
        return replace(
            inputs, by_token={**inputs.by_token, "inputs_embeds": change(embeddings.clone(), images_of(request))}
        )

    return changed


def images_of(request: RequestInfo) -> list[list[int]]:
    """Return the places of each image of a request."""
    runs = groupby(range(len(request.token_ids)), lambda at: request.token_ids[at] == IMAGE)
    return [list(places) for is_image, places in runs if is_image]


def counted(positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(positions.shape[1]).expand_as(positions)


def starts(positions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """[3, T]: the position of the first part of each image; of text its own."""
    for at in range(1, positions.shape[1]):
        if kinds[at] and kinds[at - 1]:
            positions[:, at] = positions[:, at - 1]
    return positions


def shifted(by: int) -> Callable[[torch.Tensor, list[list[int]]], torch.Tensor]:
    def change(embeddings: torch.Tensor, images: list[list[int]]) -> torch.Tensor:
        right, table = embeddings.clone(), embeddings
        for places in images:
            for at in places:
                table[at] = right[places[0] - 1] if at - by not in places else table[at]  # some other row of text
            for at in places:
                if 0 <= at + by < len(embeddings):
                    table[at + by] = right[at]
        return table

    return change


def arranged(order: Callable[[list[list[int]]], list[int]]) -> Callable[[torch.Tensor, list[list[int]]], torch.Tensor]:
    """Give the parts of all images, in their order, the rows of others."""

    def change(embeddings: torch.Tensor, images: list[list[int]]) -> torch.Tensor:
        embeddings[[at for places in images for at in places]] = embeddings[order(images)]
        return embeddings

    return change


def scaled(embeddings: torch.Tensor, images: list[list[int]]) -> torch.Tensor:
    embeddings[[at for places in images for at in places]] *= embeddings.shape[1] ** 0.5
    return embeddings


def columns(images: list[list[int]], height: int) -> list[int]:
    return [at for image in images for at in torch.tensor(image).view(height, -1).T.flatten().tolist()]


def repositioned(change: Callable[[DecoderInputs, int, int], torch.Tensor]) -> Callable[[Any], Any]:
    """Change the positions of a step; `change` is given what is handed, the step's first token, and a token."""

    def cut(handing: Any) -> Any:
        def hand(hf: HFModel, cells: Any) -> Any:
            lines = []
            for line in cells:
                begin, changed = line[0][1], []
                for inputs, at in line:
                    if inputs is not None:
                        table = inputs.positions.clone()
                        table[:, at] = change(inputs, begin, at)
                        inputs = replace(inputs, positions=table)
                    changed.append((inputs, at))
                lines.append(changed)
            return handing(hf, lines)

        return hand

    return cut


def _counted_anew(inputs: DecoderInputs, begin: int, at: int) -> torch.Tensor:
    assert inputs.positions is not None
    kinds, first = inputs.types["mm_token_type_ids"], at
    while first and kinds[first] and kinds[first - 1]:
        first -= 1
    return inputs.positions[:, first + at - begin if kinds[at] and first < begin else at]


in_decode = repositioned(
    lambda inputs, begin, at: (
        inputs.positions[:, at] if begin < at or at + NUM_NEW < inputs.positions.shape[1] + 1 else torch.full((3,), at)
    )
)
in_chunk = repositioned(_counted_anew)
at_zero = repositioned(lambda inputs, begin, at: inputs.positions[:, at - begin])


class Keyless(dict):
    """Cached prefixes that are found by their tokens alone."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key[1:])

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key[1:])

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1:], value)


def rotary_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "mrope_section")]


def other_sections(model: Any) -> None:
    for module in rotary_modules(model):
        module.mrope_section = [3, 3, 2]


def layout_of(rotary_class: type) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for module in rotary_modules(model):
            module.recomposition_frequencies = partial(rotary_class.recomposition_frequencies, module)

    return change


def numbered(positions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """[3, T]: the parts of an image one after the other."""
    for at in range(1, positions.shape[1]):
        if kinds[at] and kinds[at - 1]:
            positions[:, at] = positions[:, at - 1] + 1
    return positions


def without_images(inputs: DecoderInputs, _request: RequestInfo) -> DecoderInputs:
    others = {name: item for name, item in inputs.by_token.items() if name != "inputs_embeds"}
    return replace(inputs, by_token=others)


def of_the_first(inputs: DecoderInputs, request: RequestInfo) -> DecoderInputs:
    """Hand the rows of the first request to all others."""
    if request.id == 0:
        _kept["first"] = inputs.by_token["inputs_embeds"]
    rows, places = inputs.by_token["inputs_embeds"].clone(), [at for item in images_of(request) for at in item]
    rows[places] = _kept["first"][places]
    return replace(inputs, by_token={**inputs.by_token, "inputs_embeds": rows})


_kept: dict[str, torch.Tensor] = {}
PARTS = {"sites": ("layers.0.input",)}
FAULTS = (
    Fault(name="height and width swapped", change=positions(lambda table, _: table[[0, 2, 1]]),
          says=("height and width are swapped",)),
    Fault(name="time and width swapped", change=positions(lambda table, _: table[[2, 1, 0]]),
          says=("time and width are swapped",)),
    Fault(name="one axis", change=positions(lambda table, _: counted(table)), says=("one axis",)),
    Fault(name="text does not restart", change=positions(lambda table, kinds: table.where(kinds > 0, counted(table))),
          says=("do not restart after an image",)),
    Fault(name="an image at one position", change=positions(starts), says=("position of its first",)),
    Fault(name="text after an image one too far",
          change=positions(lambda table, kinds: table + ((kinds == 0) & (kinds.cumsum(0) > 0))),
          says=("off by one (+1)",)),
    Fault(name="index in decode", cut=in_decode, says=("do not restart after an image",)),
    Fault(name="a chunk counts an image anew", schedule="chunked:3", cut=in_chunk, says=("begins inside of an image",)),
    Fault(name="a chunk begins at 0", schedule="chunked:7", cut=at_zero, says=("offset is forgotten",)),
    Fault(name="another request's image in the prefix cache", families=FAMILIES, schedule="prefix-hit",
          sites=("k_cache",), says=("what another request wrote",)),
    Fault(name="rows after the first layers dropped", families=("qwen3_vl", "qwen3_vl_moe"),
          change=lambda inputs, _: replace(inputs, deepstack=[0 * item for item in inputs.deepstack]),
          sites=("layers.1.input_layernorm",), says=()),
    Fault(name="attention inside of an image looks back only", families=("gemma3",),
          change=lambda inputs, _: replace(inputs, types={}), sites=("attention",),
          says=("does not see the parts after it",)),
    Fault(name="a chunk ends inside of an image", families=("gemma3",), schedule="chunked:3",
          change=lambda inputs, _: replace(inputs, is_seen_whole=False), sites=("attention",),
          says=("a step ends inside of an image",)),
    Fault(name="parts of an image in a row", change=positions(numbered), says=("numbered one after the other",)),
    Fault(name="sections 3, 3, 2", model=other_sections, families=("qwen2_vl", "qwen2_5_vl"), says=("3, 3, 2",)),
    Fault(name="sections in turn", model=layout_of(Qwen3VLTextRotaryEmbedding), families=("qwen2_5_vl",),
          says=("in turn",)),
    Fault(name="sections one after the other", model=layout_of(Qwen2_5_VLRotaryEmbedding), families=("qwen3_vl",),
          says=("one after the other",)),
    Fault(name="no image rows", families=FAMILIES, change=without_images, says=("no image is there",), **PARTS),
    Fault(name="the first request's images", families=FAMILIES, change=of_the_first, says=("images of request 0",),
          **PARTS),
    Fault(name="image rows one late", families=FAMILIES, change=rows(shifted(1)), says=("1 position late",), **PARTS),
    Fault(name="image rows one early", families=FAMILIES, change=rows(shifted(-1)), says=("1 position early",),
          **PARTS),
    Fault(name="two images swapped", families=FAMILIES, change=rows(arranged(lambda images: [*images[1], *images[0]])),
          says=("images in the order 1, 0",), **PARTS),
    Fault(name="image rows scaled", families=FAMILIES, change=rows(scaled), says=("gain of 8",), **PARTS),
    Fault(name="parts by columns", families=OF_AXES, change=rows(arranged(lambda images: columns(images, 2))),
          says=("by columns of 2",), **PARTS),
)  # fmt: skip


class Subject:
    """One family in one dtype: its requests, its golden, and HF as the engine."""

    def __init__(self, family: str, dtype: str, folder: Path) -> None:
        self.folder, self.dtype, self._num_runs = folder, getattr(torch, dtype), 0
        config = AutoConfig.from_pretrained(folder / family)
        self.plan = plan_request(
            model=str(folder / family), engine="hf", dtype=dtype, device="cpu", requests=requests_of(requests(config)),
            max_new_tokens=NUM_NEW, schedules=list(SCHEDULES), local_files_only=True,
        )  # fmt: skip
        self.oracle: HFModel = load_model(self.plan.folder, dtype=self.dtype, stays=True)
        self.golden = make_golden(self.oracle, self.plan.prompts, folder / f"golden-{dtype}")

    def check(self, schedule: str, fault: Fault | None = None) -> RunResult:
        """Run the engine under a schedule, with a fault in it if one is given, compare, and explain."""
        (parsed,) = parse_schedules([schedule])
        engine = HFEngine(load_model(self.plan.folder, dtype=self.dtype, stays=True), None)
        engine.match_taps(self.oracle.graph)
        self._num_runs += 1
        out = self.folder / f"run-{self.plan.case.dtype}-{self._num_runs}"
        with ExitStack() as stack:
            if fault is not None:
                fault.model(engine._hf.model)
                stack.enter_context(planted(fault))
            golden, copies = with_duplicate_requests(self.plan, self.golden, parsed, self.oracle)
            record_run(self.plan, engine, parsed, golden.requests[: len(self.plan.prompts)], out, copies=copies)
        with Recording.open(out, verify=False) as actual:
            required = Requirements(wanted=engine.capabilities.wanted(self.oracle.graph), require=parsed.requires)
            comparison = compare_run(actual, golden, hf=self.oracle, requirements=required)
            return explain_run(comparison, actual, golden, self.oracle)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Put a fault into the engine for the block."""

    def handed(hf: HFModel, request: RequestInfo) -> DecoderInputs:
        return fault.change(decoder_inputs(hf, request), request)

    with ExitStack() as stack:
        stack.enter_context(patch.object(engine_room, "decoder_inputs", handed))
        if "prefix cache" in fault.name:
            known, run_on_prefix = Keyless(), batch_room.Batch.run_on_prefix
            stack.enter_context(
                patch.object(batch_room.Batch, "run_on_prefix", lambda self, _known: run_on_prefix(self, known))
            )
        if fault.cut is not None:
            stack.enter_context(patch.object(batch_room, "handing", fault.cut(handing)))
        yield


@contextmanager
def subject(family: str, dtype: str) -> Iterator[Subject]:
    """Build a family, write it, and open it as a subject."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        build(family).save_pretrained(Path(folder) / family)
        yield Subject(family, dtype, Path(folder))


def sound_rows(family: str, dtype: str) -> Iterator[list[object]]:
    """Yield a row for each schedule of a sound run."""
    with subject(family, dtype) as opened:
        for schedule in SCHEDULES:
            run = opened.check(schedule)
            worst = max((tap.local_bound_share_max or 0.0 for tap in run.taps), default=0.0)
            first = "" if run.first_divergence is None else run.first_divergence.tap
            num_rows = sum(tap.num_rows for tap in run.taps)
            yield [family, dtype, schedule, str(run.outcome), num_rows, f"{worst:.2f}", first]


def text_row(family: str) -> list[object]:
    """Check requests of text alone in float32, under every schedule."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        build(family).save_pretrained(folder)
        report = harness.check(
            "hf", model=folder, prompts=[list(range(5, 30)), list(range(60, 71))], max_new_tokens=NUM_NEW,
            dtype="float32", schedules=SCHEDULES,
        )  # fmt: skip
    runs = [f"{run.schedule} {run.outcome}" for run in report.runs if run.outcome is not Outcome.PASS]
    first = [run.first_divergence.tap for run in report.runs if run.first_divergence is not None]
    worst = max(tap.local_bound_share_max or 0.0 for run in report.runs for tap in run.taps)
    return [
        family,
        str(report.outcome),
        sum(run.num_rows for run in report.runs),
        f"{worst:.2f}",
        *runs[:1],
        *first[:1],
    ]


def fault_row(opened: Subject, family: str, dtype: str, fault: Fault) -> list[object]:
    """Plant a fault and say what was found of it."""
    run = opened.check(fault.schedule, fault)
    first = run.first_divergence
    is_local = first is not None and any(first.tap.endswith(site) for site in fault.sites)
    explanation = None if first is None else first.explanation
    said = explanation.cause if explanation is not None and explanation.is_cause else ""
    is_right = any(word in said for word in fault.says)
    word = "named" if is_right else "wrong name" if said else "not named"
    is_found = run.outcome is Outcome.MISMATCH
    return [
        family,
        dtype,
        fault.name,
        "yes" if is_found else "no",
        first.tap if first else "",
        "yes" if is_local else "no",
        word,
        said,
    ]


def main(arguments: Sequence[str]) -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-sound", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args(arguments)
    families, dtypes = options.families or list(FAMILIES), options.dtypes.split(",")
    torch.set_num_threads(1)
    if options.text:
        heads = ["family", "result", "rows", "largest share of a bound", "not passed", "first wrong"]
        results = [shown(text_row(family)) for family in options.families or TEXT]
        sys.stdout.write(tabulate(results, heads, tablefmt="pipe", disable_numparse=True) + "\n")
        return
    if not options.no_sound:
        heads = ["family", "dtype", "schedule", "result", "rows", "largest share of a bound", "first wrong"]
        results = [shown(row) for family in families for dtype in dtypes for row in sound_rows(family, dtype)]
        sys.stdout.write(tabulate(results, heads, tablefmt="pipe", disable_numparse=True) + "\n\n")
    if not options.no_faults:
        heads = ["family", "dtype", "fault", "detected", "first at", "there", "first cause", "said"]
        wanted = [fault for fault in FAULTS if options.only in fault.name]
        results = []
        for family in families:
            for dtype in dtypes:
                with subject(family, dtype) as opened:
                    applicable = [fault for fault in wanted if family in fault.families]
                    results += [shown(fault_row(opened, family, dtype, fault)) for fault in applicable]
        sys.stdout.write(tabulate(results, heads, tablefmt="pipe", disable_numparse=True) + "\n\n")


def shown(row: list[object]) -> list[object]:
    sys.stderr.write(f"  {' | '.join(map(str, row))}\n")
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
