"""Layouts of well-known models, and of your own, as TOML files.

A preset is a file of ``configs/layouts`` of a source tree, which an installed package has as
``coordinator/layouts``. Its keys are the fields of ``coordinator.layout.Layout``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import msgspec

from coordinator.errors import ConfigError
from coordinator.layout import Layout

_PACKAGE: Final = Path(__file__).parent
#: Where presets are; in a source tree the second one is not there.
_DIRECTORIES: Final = (_PACKAGE.parent / "configs" / "layouts", _PACKAGE / "layouts")
_FIELDS: Final = msgspec.structs.fields(Layout)
#: A layout by the names of its fields; on the wire it is a list. An extra is a list here, too.
_File: Final = msgspec.defstruct(
    "Layout", [(field.name, field.type, field.default) for field in _FIELDS], forbid_unknown_fields=True
)


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted({path.stem for directory in _DIRECTORIES for path in directory.glob("*.toml")})


def load(name: str, stages: int | None = None) -> Layout:
    """Read a preset, or the file at the path ``name`` if that ends in ``.toml``.

    Args:
        name: which one.
        stages: cut it into so many pipeline stages, which differ by one layer at most, the longer ones
            first; None: leave it as it is cut there.

    Raises:
        ConfigError: there is none, it says something that is no layout, or cannot be cut like that.

    """
    for directory in _DIRECTORIES:
        # The name alone: a preset is nowhere else.
        path = directory / f"{name}.toml"
        if name == Path(name).name and path.is_file():
            return _staged(_read(path), stages)
    if name.endswith(".toml"):
        return _staged(_read(Path(name)), stages)
    raise ConfigError([f"there is no layout {name!r}: name a .toml file, or one of {', '.join(names())}"])


def _staged(layout: Layout, stages: int | None) -> Layout:
    if stages is None:
        return layout
    if not 1 <= stages <= layout.layers:
        raise ConfigError([f"{layout.layers} layers cannot be cut into {stages} pipeline stages"])
    each, longer = divmod(layout.layers, stages)
    cut = tuple(each + (stage < longer) for stage in range(stages))
    return msgspec.structs.replace(layout, stages=cut if stages > 1 else ())


def _read(path: Path) -> Layout:
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: {error}"]) from error
    try:
        told = msgspec.convert(fields, _File)
    except msgspec.ValidationError as error:
        raise ConfigError([f"{path}: {error}"]) from error
    return Layout(**{field.name: getattr(told, field.name) for field in _FIELDS})
