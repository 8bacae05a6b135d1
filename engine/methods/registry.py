"""Names to methods: what a user may ask for on a command line."""

import dataclasses
import importlib
import pkgutil

import engine.methods
from engine.errors import SettingError
from engine.methods.base import Method


def methods():
    """{name: class} of every method in engine/methods that has a name of its own (Method.named),
    sorted by name.
    """
    for found in pkgutil.walk_packages(engine.methods.__path__, "engine.methods."):
        importlib.import_module(found.name)
    classes, todo = {}, [Method]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if vars(cls).get("named", True):
            classes[cls().name] = cls
    return dict(sorted(classes.items()))


def make(name, settings, elsewhere="omnikv"):
    """The method of this name with settings {field: value}. Raises SettingError for a name or a
    field that does not exist.

    elsewhere: whose a field that this method does not have is said to be.
    """
    known = methods()
    if name not in known:
        raise SettingError(f"method: found {name!r}, expected one of {', '.join(known)}")
    fields = {field.name for field in dataclasses.fields(known[name])}
    for field in settings:
        if field not in fields:
            raise SettingError(
                f"{field}: belongs to --method {elsewhere}, but --method {name} was given"
            )
    return known[name](**settings)
