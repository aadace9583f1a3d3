"""`harness server check`: a server in the place of an engine; the address of a server for all commands."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from harness.command import options as opt
from harness.command.forms import Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec

if TYPE_CHECKING:
    from harness.extensions.server.address import Address

ENDPOINT = Forms(
    human="harness.extensions.server.check.report:endpoint_text",
    json="harness.extensions.server.check.report:endpoint_json",
    is_fenced=True,
)

_OF_A_SERVER = ("model", "hf", "dtype", "device", "truth", "requests", "max_new_tokens", "lora", "other_loras")
"""Fields of a case that say what the server should answer."""


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """The address of a server, for commands that are about nothing else."""

    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of the server; the environment's HARNESS_API_KEY is its key."),
    ] = None
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model at the server. [default: the first it lists]")
    ] = None
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Most requests at a time. [default: 8]")] = None
    request_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Read timeout in seconds. [default: 60]"),
    ] = None

    def address(self) -> "Address":
        """Return the address of the server.

        Raises:
            HarnessError: BAD_OPTION: there is none, a value makes no sense, or the client's package is not installed.
        """
        if self.endpoint is None:
            hint = "add --endpoint http://host:port"
            raise HarnessError(Code.BAD_OPTION, "no server is named", where="--endpoint", hint=hint)
        _refuse_without_client()
        from harness.extensions.server.address import Address

        for option, value in (("--concurrency", self.concurrency), ("--request-timeout", self.request_timeout)):
            if value is not None and not 0 < value < math.inf:
                raise HarnessError(Code.BAD_OPTION, "it must be positive", where=option, actual=value)
        given = {"concurrency": self.concurrency, "timeout_s": self.request_timeout}
        known = {name: value for name, value in given.items() if value is not None}
        return Address(url=self.endpoint, served_model=self.served_model, **known)  # type: ignore[arg-type]


@grouped
def check(
    server: AddressOptions,
    given: Annotated[opt.Given, opt.CaseOptions(*_OF_A_SERVER)],
    *,
    again: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Prompts that the server gets again: alone, repeated, reversed, continued."
        ),
    ] = 4,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, ENDPOINT.option()] = "human",
) -> int:
    """Check a server by the tokens and log probabilities that it returns.

    HuggingFace runs over the server's own tokens. --dtype is the server's.
    """
    address = server.address()  # first: it says which package the client lacks
    with progress_bar() as report:
        from harness.extensions.server.check.run import check_endpoint
        from harness.plan import plan_request

        if not {"model", "requests"} & given.keys():
            given["requests"] = [RequestSpec(prompt=text) for text in _DEFAULT_PROMPTS]
        plan = plan_request(**given, local_files_only=local_files_only)
        result = check_endpoint(plan, address, num_again=again, progress=report)
    ENDPOINT.show(result, format)
    return STATUS[result.outcome]


_DEFAULT_PROMPTS = ("hu rin pun | hu", "shau zen shu zei da dan | shau", "dei lou zo ge | dei lou", "vau win to | vau")
"""For the embedded model, which recites."""


def _refuse_without_client() -> None:
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise HarnessError(
            Code.BAD_OPTION,
            f"the client needs a package that is not installed: {error.name}",
            where="--endpoint",
            hint="pip install -e '.[serve]' in the harness's checkout",
        ) from error
