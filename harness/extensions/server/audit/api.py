"""What a server serves, from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from harness.api.arguments import Dtype, dtype_name, named_as_arguments
from harness.base.progress import Progress
from harness.extensions.server.audit.report import audit_text
from harness.extensions.server.audit.result import AuditResult
from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AuditReport(AuditResult):
    """The result of an audit. It is true if the server serves the first hypothesis."""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return audit_text(self, width=100)


def audit(
    endpoint: str,
    hypotheses: Sequence[str],
    *,
    model: str | Path | None = None,
    dtype: Dtype = "auto",
    tokens: int = 600,
    ask: Mapping[str, float] | None = None,
    seed: int = 0,
    served_model: str | None = None,
    truth: str = "auto",
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> AuditReport:
    """Find out which of some hypotheses a server serves, from its answers alone.

    Args:
        endpoint: address of the server.
        hypotheses: names as for `harness server audit`, the claimed one first: `bf16`, `fp8`, `q4`, a folder,
            `bf16+temperature=0.7`, ...
        model: checkpoint that dtypes and types are of; None: the embedded default.
        dtype: of the server.
        tokens: to ask for, at least.
        ask: parameters of the sampler to ask for.
        seed: of prompts and requests.
        served_model: name of the model at the server; None: the first that it lists.
        truth: as `check` has it.
        progress: called with what is being done, how much of it is done, and how much there is.
        local_files_only: never ask the model hub.

    Raises:
        HarnessError: an argument cannot be used; the server is not there, or answers nothing that can be judged.
    """
    from harness.extensions.server.address import Address
    from harness.extensions.server.audit.run import run_audit
    from harness.plan import plan_engine

    with named_as_arguments():
        chosen_model = {} if model is None else {"model": str(model)}
        plan = plan_engine(dtype=dtype_name(dtype), truth=truth, local_files_only=local_files_only, **chosen_model)
        address = Address(url=endpoint, served_model=served_model)
        asked = [f"{name}={value}" for name, value in (ask or {}).items()]
        result = run_audit(plan, address, hypotheses, num_tokens=tokens, ask=asked, seed=seed, progress=progress)
    return AuditReport(**{field.name: getattr(result, field.name) for field in fields(result)})
