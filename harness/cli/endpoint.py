"""`harness check --endpoint`: a server in the place of an engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.output import STATUS
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec

if TYPE_CHECKING:
    from harness.campaigns.endpoint.address import Address

_OF_A_SERVER = {"model", "hf", "dtype", "device", "truth", "requests", "max_new_tokens", "lora", "other_loras"}
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
        typer.Option(metavar="SECONDS", help="Longest silence of the server in a request. [default: 60]"),
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
        from harness.campaigns.endpoint.address import Address

        for option, value in (("--concurrency", self.concurrency), ("--request-timeout", self.request_timeout)):
            if value is not None and not 0 < value < math.inf:
                raise HarnessError(Code.BAD_OPTION, "it must be positive", where=option, actual=value)
        given = {"concurrency": self.concurrency, "timeout_s": self.request_timeout}
        known = {name: value for name, value in given.items() if value is not None}
        return Address(url=self.endpoint, served_model=self.served_model, **known)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ServerOptions(AddressOptions):
    """Options that are about a server, as they were given."""

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check a server with OpenAI's completions, in place of an engine; the environment's HARNESS_API_KEY "
            "is its key.",
        ),
    ] = None
    again: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Prompts that the server gets again alone, repeated, reversed, continued. [default: 4]"
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether a server is to be checked.

        Raises:
            HarnessError: BAD_OPTION: there are options for one, and no address.
        """
        if self.endpoint is None and self != ServerOptions():
            what = "these options are of a server, and none is named"
            raise HarnessError(Code.BAD_OPTION, what, where="--endpoint", hint="add --endpoint http://host:port")
        return self.endpoint is not None

    def check(
        self,
        given: opt.Given,
        others: Sequence[object],
        local_files_only: bool,
        form: str,
        report: Callable[[str, int, int], None],
    ) -> int:
        """Check the server and print what was found; return the exit status.

        Args:
            given: model, prompts, dtype and truth.
            others: values of options that say nothing of a server; none may be given.
            local_files_only: never ask the hub.
            form: how to print.
            report: told what is being done.
        """
        named = [name for name in given if name not in _OF_A_SERVER]
        if named or any(other is not None for other in others):
            what = (
                "a server is checked by what it answers: options of engines, schedules, faults and pages are not for it"
            )
            raise HarnessError(Code.BAD_OPTION, what, where="--endpoint", actual=", ".join(named) or None)
        forms.ENDPOINT.chosen(form)
        address = self.address()  # first: it says which package the client lacks
        from harness.campaigns.endpoint.run import check_endpoint
        from harness.plan import plan_request

        if not {"model", "requests"} & given.keys():
            given["requests"] = [RequestSpec(prompt=text) for text in _DEFAULT_PROMPTS]
        plan = plan_request(**given, local_files_only=local_files_only)
        result = check_endpoint(plan, address, num_again=self._again(), progress=report)
        forms.ENDPOINT.show(result, form)
        return STATUS[result.outcome]

    def _again(self) -> int:
        if self.again is not None and self.again < 0:
            raise HarnessError(Code.BAD_OPTION, "it cannot be negative", where="--again", actual=self.again)
        return 4 if self.again is None else self.again


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
