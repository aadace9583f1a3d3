"""Groups of options that several commands share: typer sees the single options, the command gets one object."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin

from harness.command.options import CaseOptions


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter of a command that stands for a group of options by these options.

    A group is a parameter whose type is a dataclass (one option per field) or is annotated with `CaseOptions`.
    """
    groups: dict[str, tuple[Callable[[Mapping[str, Any]], Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group_parts = _group(parameter.annotation)
        if group_parts is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        gather, members = group_parts
        groups[parameter.name] = (gather, [member.name for member in members])
        parameters += members

    @wraps(command)
    def run(**arguments: Any) -> int:
        for group, (gather, names) in groups.items():
            arguments[group] = gather({name: arguments.pop(name) for name in names})
        return command(**arguments)

    run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return run


def _group(annotation: Any) -> tuple[Callable[[Mapping[str, Any]], Any], list[inspect.Parameter]] | None:
    """Return the function that makes the object of a group, and its parameters; None for any other type."""
    if is_dataclass(annotation):
        members = [_parameter(field.name, field.default, field.type) for field in fields(annotation)]
        return lambda arguments: annotation(**arguments), members  # type: ignore[operator]
    if get_origin(annotation) is Annotated and isinstance(group := get_args(annotation)[1], CaseOptions):
        return group.gather, [_parameter(name, None, kind) for name, kind in group.types.items()]
    return None


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
