"""Requirements on the nodes of a cluster, checked before the first task."""

from collections.abc import Mapping, Sequence

from harness.campaigns.suite.fingerprint import fingerprint
from harness.campaigns.suite.node_task import Look
from harness.campaigns.suite.preflight import unknown_engine
from harness.campaigns.suite.task import SuiteCase
from harness.errors import Code, HarnessError


def refuse_store(seen: Look, store: str) -> None:
    """Refuse a node that cannot use the store; raises HarnessError (STORE_FAILED)."""
    if seen.store_error is not None:
        raise HarnessError(
            Code.STORE_FAILED,
            f"a node cannot use the store: {seen.store_error}",
            where=f"{seen.name}: {store}",
            hint="name a folder or URL that every node can write: --store s3://bucket/folder",
        )


def refuse_differences(looks: Sequence[Look]) -> None:
    """Refuse versions that differ: goldens and figures of two nodes would be of different programs.

    Raises:
        HarnessError: NODES_DIFFER.
    """
    own = fingerprint()
    for seen in looks:
        if seen.own.versions != own:
            raise _differing("a node has other versions than this machine", seen.name, own, seen.own.versions)
    for name in sorted({name for seen in looks for name in seen.environments}):
        having = [(seen.name, found.versions) for seen in looks if (found := seen.environments.get(name)) is not None]
        for node, versions in having:
            if versions != having[0][1]:
                what = f"the environment {name!r} has other versions on two nodes"
                raise _differing(what, f"{having[0][0]} and {node}", having[0][1], versions)


def _differing(what: str, where: str, expected: Mapping[str, str], actual: Mapping[str, str]) -> HarnessError:
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    return HarnessError(
        Code.NODES_DIFFER,
        what,
        where=where,
        expected={name: expected.get(name) for name in names},
        actual={name: actual.get(name) for name in names},
        hint="install the same versions on every node",
    )


def refuse_missing(looks: Sequence[Look], cases: Sequence[SuiteCase]) -> None:
    """Refuse cases whose model, environment or engine no node has.

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_SUITE, UNKNOWN_ENGINE.
    """
    for case in cases:
        if all(case.case.model in seen.missing_models for seen in looks):
            what, hint = "no node has the model", "download it, or mount it at the same path, on at least one node"
            raise HarnessError(
                Code.NOT_A_CHECKPOINT, what, where=case.name, expected="a folder or a cached hub id",
                actual=case.case.model, hint=hint,
            )  # fmt: skip
        places = [found for seen in looks if (found := seen.installed(case.environment)) is not None]
        if not places:
            what = f"no node has the environment {case.environment!r}"
            hint = "install it, with the harness in it, at the same path on at least one node"
            raise HarnessError(Code.BAD_SUITE, what, where=case.name, hint=hint)
        if all(case.case.engine not in found.engines for found in places):
            known = sorted({engine for found in places for engine in found.engines})
            raise unknown_engine(case, f"no node has an engine called {case.case.engine!r}", known)
