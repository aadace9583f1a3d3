"""Options that several commands share, as one object: typer sees its fields, the command gets the object."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter of a command that is a dataclass by an option for each field.

    `Annotated[CliOptions, ("model", "dtype")]` takes the fields that are named, in this order.
    """
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind, names = _dataclass_of(parameter.annotation)
        if kind is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = (kind, names)
        known = {each.name: each for each in fields(kind)}
        parameters += [_parameter(name, known[name].default, known[name].type) for name in names]

    @wraps(command)
    def run(**given: Any) -> int:
        for group, (kind, names) in groups.items():
            given[group] = kind(**{name: given.pop(name) for name in names})
        return command(**given)

    run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return run


def _dataclass_of(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the dataclass that an annotation names and the fields that are taken; None for another type."""
    if get_origin(annotation) is Annotated and is_dataclass(get_args(annotation)[0]):
        kind, names = get_args(annotation)
        return kind, names
    if is_dataclass(annotation):
        return annotation, tuple(each.name for each in fields(annotation))
    return None, ()


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
