"""A case: one TOML file that says what to check (checkpoint, requests, schedules, dtype, device, engine)."""

import reprlib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.base.files import exists, read_text
from harness.errors import Code, HarnessError
from harness.formats.schedule import Trigger, parse_schedules, schedules_help

DTYPES = ("float32", "bfloat16", "float16")

_Model = TypeVar("_Model", bound=BaseModel)
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Path = Annotated[Path, Field(strict=False)]
"""A path, also given as a string: a suite sends its cases as JSON."""


Truth = Literal["auto", "float64", "float32"]
"""Precision of the HuggingFace reference; `auto`: as the dtype of the engine requires."""
TapPreset = Literal["all", "cache", "logits", "tokens"]
"""Taps that the recording must hold; all: every tap that the engine supports."""
TAP_PRESETS: tuple[str, ...] = get_args(TapPreset)


class Option:
    """The option of the command line that sets a field of a case."""

    def __init__(self, names: str, help: str, *, kind: Any = str, is_in_files: bool = True) -> None:
        """Declare the option.

        Args:
            names: names of the option and its value, `--hf FOLDER`; only of the option for a choice or a flag.
            help: one sentence, with the default.
            kind: type of the value; a list for a repeatable option.
            is_in_files: whether case files may set the field. A case file may come from anywhere, so it must not be
                able to start another program.
        """
        self.name, _, metavar = names.partition(" ")
        self.metavar, self.help, self.kind, self.is_in_files = metavar or None, help, kind, is_in_files


class RequestSpec(BaseModel):
    """One request of a case: text, a conversation, or token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """A conversation, which the chat template of the checkpoint turns into a prompt."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of functions, for the chat template."""
    token_ids: list[int] | None = None
    inputs: _Path | None = None
    """Safetensors file with the model inputs besides the tokens, as the HF processor returns them for this
    request: `pixel_values`, `image_grid_thw`, `mm_token_type_ids`, ..."""
    max_new_tokens: _Count | None = None
    continuation: Annotated[list[int], Field(min_length=1)] | None = None
    """Token ids that follow the prompt in place of HF's greedy ones; max_new_tokens is then ignored."""

    @model_validator(mode="after")
    def _one_of_three(self) -> "RequestSpec":
        if [self.prompt, self.messages, self.token_ids].count(None) != 2:
            raise ValueError("a request needs one of prompt, messages and token_ids, and no two of them")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools are for messages: a chat template takes both")
        return self


class ProfileSection(BaseModel):
    """The profile that follows the check."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_tokens: _Count = 128
    max_new_tokens: _Count = 32
    batch_size: _Count = 1
    phases: list[Literal["prefill", "decode", "mixed"]] = []
    """Empty: all phases of the engine."""
    baseline: str | None = None
    """Baseline file with the limits of the profile, relative to the case file; None for no limits."""


class Case(BaseModel):
    """A check, described by a file, the command line or Python. Paths are relative to the case file.

    All options of a check are declared here. A field is a key of case files unless its `Option` says otherwise. A field
    with an `Option` is an option of the command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1]
    description: str = ""
    model: Annotated[
        str,
        Field(min_length=1),
        Option(
            "--model PATH_OR_HUB_ID",
            "Checkpoint: a folder, a .gguf file, the name of an embedded one, or a hub id. "
            "[default: qwen3-tiny, embedded]",
        ),
    ]
    hf: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Option(
            "--hf FOLDER",
            "Original HuggingFace checkpoint of a .gguf model, or of an ONNX Runtime or OpenVINO export. The harness "
            "uses its configuration and tokenizer, and compares every tensor of a .gguf file with it.",
        ),
    ] = None
    engine: Annotated[str, Field(min_length=1), Option("--engine NAME", "Engine under test. [default: reference]")] = (
        "reference"
    )
    tensors: Annotated[
        _Path | None,
        Option(
            "--tensors DIR",
            "Folder of tensors (.npy, .safetensors, .pt) that an engine dumped during one prefill; replaces --engine. "
            "Tensors are identified by their values, not by their names.",
            kind=Path,
            is_in_files=False,
        ),
    ] = None
    names: Annotated[
        _Path | None,
        Option(
            "--names FILE",
            "JSON object that maps names of tensors in --tensors to the taps that they hold, where you know them.",
            kind=Path,
            is_in_files=False,
        ),
    ] = None
    engine_options: Annotated[
        dict[str, str | int],
        Option(
            "--engine-option NAME=VALUE",
            "Option of the engine: block_size=32, attention_backend=contiguous; for hf attention=eager. Repeatable.",
            kind=list[str],
        ),
    ] = {}
    isolate: Annotated[
        bool | None,
        Option(
            "--engine-timeout 0",  # the command line has one option for this and the time limit
            "Run the engine in a separate process; a crash of that process is reported as an error. "
            "[default: for engines of other packages, and with a time limit]",
            kind=bool,
        ),
    ] = None
    engine_timeout_s: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Option(
            "--engine-timeout SECONDS",
            "Time limit for opening the engine and for each schedule, in a separate process; 0: no separate process. "
            "[default: 3600 for engines of other packages]",
            kind=float,
        ),
    ] = None
    engine_python: Annotated[
        _Path | None,
        Option(
            "--engine-python PATH",
            "Python interpreter of the environment in which the engine is installed. It needs numpy, but not the "
            "harness. [default: this interpreter]",
            kind=Path,
            is_in_files=False,
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("--dtype DTYPE", "float32, bfloat16, float16, or auto: the dtype of the checkpoint. [default: auto]"),
    ] = "auto"
    device: Annotated[str, Option("--device DEVICE", "cpu, cuda, cuda:1, ... [default: cpu]")] = "cpu"
    truth: Annotated[
        Truth,
        Option(
            "--truth",
            "Precision of the HuggingFace reference; auto: float64 for float32 engines, float32 for 16-bit engines. "
            "[default: auto]",
            kind=Truth,
        ),
    ] = "auto"
    requests: Annotated[list[RequestSpec], Field(min_length=1)]
    max_new_tokens: Annotated[
        _Count,
        Option("--max-new-tokens N", "Maximum number of tokens to generate per request. [default: 24]", kind=int),
    ] = 24
    schedules: Annotated[
        list[str],
        Option(
            "--schedule NAME",
            f"{schedules_help()}, where N is a number of tokens or ranks; comma-separated. Repeatable. "
            "[default: plain, chunked and batched, as far as the prompts can reach them]",
            kind=list[str],
        ),
    ] = []
    require: list[Trigger] = []
    """Triggers that the case must reach."""
    only: Annotated[
        TapPreset | None,
        Option(
            "--taps",
            "Taps that the recording must hold: all that the engine supports, its cache and logits, its logits, or "
            "none (compare tokens only). [default: all]",
            kind=TapPreset,
        ),
    ] = None
    profile: ProfileSection | None = None
    """None: the engine is not profiled."""
    lora: Annotated[
        _Path | None,
        Option(
            "--lora FOLDER",
            "LoRA adapter in PEFT format.",
            kind=Path,
            is_in_files=False,
        ),
    ] = None
    other_loras: Annotated[
        list[_Path],
        Option(
            "--other-lora FOLDER",
            "LoRA adapter that the engine serves to other requests; the report names rows that got it by mistake. "
            "Repeatable.",
            kind=list[Path],
            is_in_files=False,
        ),
    ] = []
    mtp: Annotated[
        bool,
        Option(
            "--mtp",
            "Also judge the multi-token prediction (MTP) layers of the checkpoint. The engine must show them.",
            kind=bool,
        ),
    ] = False
    budget_s: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Option(
            "--budget SECONDS",
            "Time limit: start no further schedule after it. The first schedule always runs. Skipped schedules are "
            "listed, and the check does not pass. [default: no limit]",
            kind=float,
            is_in_files=False,
        ),
    ] = None
    explain_s: Annotated[
        Annotated[float, Field(ge=0, allow_inf_nan=False)],
        Option(
            "--explain-seconds SECONDS",
            "Time for trying changes of HuggingFace's code as causes of what is wrong. 0: stop at the first wrong "
            "operation, without looking for its cause. [default: 5]",
            kind=float,
            is_in_files=False,
        ),
    ] = 5.0
    rows: Annotated[
        _Count | None,
        Option(
            "--rows N",
            "For long prompts: judge products and attention only at N sampled positions of each request, at the first "
            "and last row of each step, and at outliers. Attention still sees its whole history. [default: all]",
            kind=int,
        ),
    ] = None
    rows_seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)],
        Option("--rows-seed N", "Random seed of the positions for --rows. [default: 0]", kind=int),
    ] = 0

    @property
    def stops_early(self) -> bool:
        """Whether the check ends at the first wrong operation, whose cause nobody asks for."""
        return self.explain_s == 0

    @field_validator("schedules")
    @classmethod
    def _known(cls, schedules: list[str]) -> list[str]:
        parse_schedules(schedules, where="schedules")
        return schedules

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the command-line options by the fields that they set."""
        declared = ((name, option) for name, field in cls.model_fields.items() for option in field.metadata)
        return {name: option for name, option in declared if isinstance(option, Option)}

    def replaced(self, **changes: Any) -> "Case":
        """Return the case with some fields replaced.

        None or an empty sequence keeps the value of the case. Another engine drops the engine options. The required
        triggers are dropped if a change may affect which triggers are reached; dtype, device, truth and isolation
        cannot.

        Raises:
            TypeError: there is no such field.
        """
        if unknown := changes.keys() - Case.model_fields.keys():
            raise TypeError(f"a case has no field {min(unknown)!r}")
        replacements = {name: value for name, value in changes.items() if value is not None}
        engine = replacements.get("engine", self.engine)
        own_options = self.engine_options if engine == self.engine else {}
        requests, num_new = replacements.get("requests") or self.requests, replacements.get("max_new_tokens")
        decisive: dict[str, Any] = {
            "model": replacements.get("model", self.model),
            "hf": replacements.get("hf", None if "model" in replacements else self.hf),
            "engine": engine,
            "engine_options": {**own_options, **replacements.get("engine_options", {})},
            "requests": [_with_length(request, num_new) for request in requests],
            "max_new_tokens": self.max_new_tokens if num_new is None else num_new,
            "schedules": list(replacements.get("schedules") or self.schedules),
        }
        is_same = all(getattr(self, name) == value for name, value in decisive.items())
        return self.model_copy(update={**replacements, **decisive, "require": self.require if is_same else []})


def _with_length(request: RequestSpec, max_new_tokens: int | None) -> RequestSpec:
    """Drop the number of new tokens of the request if one was set for all requests."""
    return request if max_new_tokens is None else request.model_copy(update={"max_new_tokens": None})


def load_case(path: Path) -> Case:
    """Read a case file.

    Raises:
        HarnessError: BAD_CASE: the file is missing, is not TOML, or violates the schema; the message names the field.
    """
    case = read_case_file(Case, path, "case")
    for name, option in Case.options().items():
        if name in case.model_fields_set and not option.is_in_files:
            what = f"{name}: case files must not set this field"
            raise HarnessError(Code.BAD_CASE, what, where=path, hint=f"leave it out, and use {option.name}")
    model = path.parent / case.model
    requests = [
        request if request.inputs is None else request.model_copy(update={"inputs": path.parent / request.inputs})
        for request in case.requests
    ]
    return case.model_copy(update={"model": str(model) if exists(model) else case.model, "requests": requests})


def read_case_file(kind: type[_Model], path: Path, name: str, *, code: Code = Code.BAD_CASE) -> _Model:
    """Read a TOML file that says what to run.

    Raises:
        HarnessError: of `code`: as `load_case`.
    """
    try:
        return kind.model_validate(tomllib.loads(read_text(path)))
    except FileNotFoundError:
        raise HarnessError(code, f"there is no such {name} file", where=path) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or f"the {name}"
        raise HarnessError(code, f"{field}: {first['msg']}", where=path, actual=_shown(first["input"])) from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, no TOML, a number of too many digits
        raise HarnessError(code, f"the {name} cannot be read: {error}", where=path) from error
    except HarnessError as error:
        what = f"{error.where}: {error.what}"
        raise HarnessError(code, what, where=path, expected=error.expected, actual=error.actual) from error


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # TOML's hexadecimal numbers may have more digits than Python prints
        return "a number of too many digits"
