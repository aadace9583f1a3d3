"""Every way the harness can fail, each with a stable code, an exit status and a page under docs/errors/.

An *error* (`HarnessError`) ends a command: its input could not be used. A *finding* (`compare`) is a result: the
numbers are wrong, or something was not checked. Both carry one of the codes below.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum


class ExitStatus(IntEnum):
    """Exit statuses of the command line, and what a script may conclude from each."""

    PASS = 0
    MISMATCH = 1
    BAD_INPUT = 2
    INTERNAL = 3
    REGRESSION = 4
    NOTHING_CHECKED = 5


class Code(StrEnum):
    """Stable codes. A code is never reused for another meaning (H008 and H139 were two); `docs/errors/` explains it."""

    # Checkpoints
    NOT_A_CHECKPOINT = "H001"
    BAD_CONFIG = "H002"
    UNSUPPORTED_ARCHITECTURE = "H003"
    DAMAGED_SAFETENSORS = "H004"
    MISSING_SHARD = "H005"
    TENSORS_CONTRADICT_CONFIG = "H006"
    NO_TOKENIZER = "H007"
    CHECKPOINT_CHANGED = "H145"
    ORACLE_PATCHED = "H009"
    # Requests and options
    TOKEN_OUTSIDE_VOCABULARY = "H010"
    EMPTY_PROMPT = "H011"
    PROMPT_TOO_LONG = "H012"
    BAD_OPTION = "H013"
    UNKNOWN_ENGINE = "H014"
    ENGINE_CANNOT_SERVE = "H015"
    NO_DEVICE = "H016"
    ENGINE_FAILED = "H017"
    BAD_CASE = "H018"
    ENGINE_TIMED_OUT = "H019"
    # Recordings
    NOT_A_RECORDING = "H020"
    BAD_MANIFEST = "H021"
    UNKNOWN_SCHEMA = "H022"
    STEP_MISSING = "H023"
    STEP_TRUNCATED = "H024"
    STEP_ALTERED = "H025"
    STEP_MALFORMED = "H026"
    DIFFERENT_PROMPTS = "H027"
    BAD_RECORDER_CALL = "H028"
    ONE_RANK_OF_SEVERAL = "H029"
    DIFFERENT_DTYPES = "H158"
    # Output and goldens
    OUTPUT_EXISTS = "H030"
    CANNOT_WRITE = "H031"
    SKETCH_MISSING = "H032"
    SKETCH_DIFFERS = "H033"
    UPDATE_REFUSED = "H034"
    HF_FAILED = "H035"
    SYSTEM_REFUSED = "H154"
    # Findings: the numbers, or what was not checked
    LOCAL_ERROR = "H040"
    PROPAGATED_ERROR = "H041"
    NOT_FINITE = "H042"
    ORACLE_NOT_FINITE = "H043"
    TAP_MISSING = "H044"
    ROWS_MISSING = "H045"
    TAP_MISMATCH = "H046"
    CACHE_DIFFERS = "H047"
    STATE_DIFFERS = "H250"
    TOKENS_DIFFER = "H048"
    NO_DECODE = "H049"
    TRIGGER_NOT_REACHED = "H050"
    NOTHING_CHECKED = "H051"
    CACHE_NOT_JUDGED = "H052"
    SLOT_WRITTEN_TWICE = "H053"
    SETTING_DIFFERS = "H054"
    OBSERVED_NOT_SERVED = "H056"
    # Adapters
    BAD_CACHE_LAYOUT = "H055"
    ENGINE_NOT_INSTALLED = "H120"
    ENGINE_VERSION = "H121"
    BAD_ENGINE_PYTHON = "H122"
    RANKS_DIFFER = "H123"
    EXTENSION_FAILED = "H124"
    ENGINE_LACKS_METHOD = "H140"
    # Profiles
    ENGINE_HAS_NO_STEPS = "H060"
    PHASE_WITHOUT_STEP = "H061"
    RECORDER_RUNNING = "H062"
    STEPS_DIFFER = "H063"
    PROFILER_FAILED = "H064"
    SAME_VERSION = "H065"
    SNAPSHOT_UNREADABLE = "H066"
    MODEL_NOT_SIZED = "H067"
    # Traces and gates
    TRACE_UNREADABLE = "H070"
    TRACE_DAMAGED = "H071"
    TRACE_NOT_JSON = "H072"
    TRACE_NOT_GZIP = "H073"
    NO_TRACE_EVENTS = "H074"
    BASELINE_MISSING = "H075"
    BAD_BASELINE = "H076"
    OTHER_BASELINE = "H077"
    PERFORMANCE_REGRESSION = "H078"
    BAD_PROFILE = "H079"
    # Generation and its speed
    NO_CHAT_TEMPLATE = "H080"
    PEER_TOKENS_DIFFER = "H081"
    # Folders of tensors
    BAD_TENSOR_FILE = "H084"
    BAD_TENSOR_FOLDER = "H085"
    TENSORS_OF_OTHER_TOKENS = "H086"
    TENSORS_DIFFER = "H088"
    NAMES_CONTRADICT_CONTENT = "H089"
    # Findings below one rounding
    SYSTEMATIC_ERROR = "H087"
    # Properties
    NO_HYPOTHESIS = "H090"
    BAD_ADAPTER = "H091"
    PROPERTY_VIOLATED = "H092"
    # GGUF files and optional packages
    DAMAGED_GGUF = "H100"
    UNSUPPORTED_GGUF = "H101"
    GGUF_DIFFERS = "H102"
    PACKAGE_MISSING = "H103"
    # Servers
    ENDPOINT_UNREACHABLE = "H110"
    ENDPOINT_REFUSED = "H111"
    ENDPOINT_UNREADABLE = "H112"
    ENDPOINT_TIMED_OUT = "H113"
    ENDPOINT_HUNG_UP = "H114"
    ENDPOINT_CANNOT = "H115"
    ENDPOINT_TOKENS = "H116"
    ENDPOINT_LOGPROBS = "H117"
    SAMPLER_DIFFERS = "H210"
    SEED_DIFFERS = "H211"
    CONVERSATION_DIFFERS = "H212"
    BAD_TEMPLATE = "H213"
    TEXT_DIFFERS = "H214"
    NO_TOOL_TEMPLATE = "H255"
    TOOL_CALL_DIFFERS = "H256"
    MASK_DIFFERS = "H257"
    BAD_SCHEMA = "H258"
    BAD_INPUTS = "H259"
    # LoRA
    BAD_LORA = "H119"
    # Suites
    BAD_SUITE = "H130"
    STORE_FAILED = "H131"
    NO_CLUSTER = "H132"
    RESOURCES_LACKING = "H133"
    NODES_DIFFER = "H134"
    CASE_TIMED_OUT = "H135"
    CASE_CRASHED = "H136"
    CASE_LOST = "H137"
    BAD_SUITE_RESULT = "H138"
    # Rollouts and weights
    BAD_ROLLOUT_FILE = "H230"
    ROLLOUT_WITHOUT_TOKENS = "H231"
    ROLLOUT_MISALIGNED = "H232"
    BAD_ROLLOUT_LOGPROB = "H233"
    ROLLOUT_VERSIONS_DIFFER = "H234"
    ROLLOUT_GAP = "H235"
    WEIGHTS_DIFFER = "H236"
    # Poison
    POISON_LET_IN = "H240"
    RUNS_DIFFER = "H241"
    # Quantised forms
    QUANTISER_REFUSED = "H170"
    UNKNOWN_QUANTISATION = "H220"
    QUANTISED_MISFIT = "H221"
    QUANTISED_PART_MISSING = "H222"
    BAD_SCALE = "H223"
    TOO_LARGE_TO_DEQUANTISE = "H224"
    # Ourselves
    NO_VERDICT = "H146"
    INTERNAL = "H099"


_MISMATCHES = {
    Code.SKETCH_DIFFERS, Code.LOCAL_ERROR, Code.PROPAGATED_ERROR, Code.NOT_FINITE, Code.ORACLE_NOT_FINITE,
    Code.TAP_MISSING, Code.ROWS_MISSING, Code.TAP_MISMATCH, Code.CACHE_DIFFERS, Code.TOKENS_DIFFER, Code.NO_DECODE,
    Code.TRIGGER_NOT_REACHED, Code.PEER_TOKENS_DIFFER, Code.SYSTEMATIC_ERROR, Code.SETTING_DIFFERS,
    Code.PROPERTY_VIOLATED, Code.CACHE_NOT_JUDGED, Code.SLOT_WRITTEN_TWICE, Code.RANKS_DIFFER, Code.GGUF_DIFFERS,
    Code.ENDPOINT_TOKENS, Code.ENDPOINT_LOGPROBS, Code.SAMPLER_DIFFERS, Code.SEED_DIFFERS,
    Code.CONVERSATION_DIFFERS, Code.TEXT_DIFFERS, Code.ROLLOUT_GAP, Code.WEIGHTS_DIFFER,
    Code.OBSERVED_NOT_SERVED, Code.POISON_LET_IN, Code.STATE_DIFFERS, Code.TOOL_CALL_DIFFERS, Code.MASK_DIFFERS,
    Code.TENSORS_DIFFER,
}  # fmt: skip


def exit_status(code: Code) -> ExitStatus:
    """Return the exit status of a command that ends with `code`."""
    if code in _MISMATCHES:
        return ExitStatus.MISMATCH
    if code in (Code.NOTHING_CHECKED, Code.RUNS_DIFFER):
        return ExitStatus.NOTHING_CHECKED
    if code is Code.PERFORMANCE_REGRESSION:
        return ExitStatus.REGRESSION
    return ExitStatus.INTERNAL if code is Code.INTERNAL else ExitStatus.BAD_INPUT


class HarnessError(Exception):
    """A failure that its reader can act on: what happened, where, what was expected, and what to do next.

    Attributes:
        code: stable code, documented in docs/errors/.
        what: one sentence without the final full stop.
        where: the file, tensor, request or option concerned.
        expected, actual: the two values that disagree.
        hint: the next thing to try.
    """

    def __init__(
        self,
        code: Code,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        actual: object = None,
        hint: str | None = None,
    ) -> None:
        self.code = code
        self.what = what
        self.where = where
        self.expected = expected
        self.actual = actual
        self.hint = hint
        super().__init__(str(self))

    @property
    def exit_status(self) -> ExitStatus:
        """Exit status of a command that ends with this error."""
        return exit_status(self.code)

    @property
    def summary(self) -> str:
        """The error in one line, without the code and the hint."""
        details = {"where": self.where, "expected": self.expected, "actual": self.actual}
        told = "; ".join(f"{name}: {value}" for name, value in details.items() if value is not None)
        return printable(" ".join((f"{self.what} ({told})" if told else self.what).split()))

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.what}"]
        details = {"where": self.where, "expected": self.expected, "actual": self.actual, "try": self.hint}
        lines += [f"  {name + ':':10}{value}" for name, value in details.items() if value is not None]
        return printable("\n".join(lines), keeps_lines=True)


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str, *, keeps_lines: bool = False) -> str:
    """Return `text` without what a terminal would obey: names in files may be hostile. Line ends and tabs may stay."""
    kept = "\n\t" if keeps_lines else ""
    return "".join(character if character.isprintable() or character in kept else "\ufffd" for character in text)
