"""Backends by name, imported only when asked for."""

from __future__ import annotations

from importlib import import_module

from backends.base import Backend, BackendUnavailableError

ENTRY_POINT_GROUP = "kv_coordinator.backends"

_BUILTIN = {
    "loopback": "backends.loopback:LoopbackBackend",
    "mooncake": "backends.mooncake:MooncakeBackend",
    "nixl": "backends.nixl:NixlBackend",
}


def names() -> list[str]:
    """All backend names that ``load`` knows, without importing any of them."""
    return sorted({*_BUILTIN, *_third_parties()})


def load(name: str) -> type[Backend]:
    """Import the backend ``name`` and return its class.

    Raises:
        BackendUnavailableError: no backend has that name; or it has, but a library that it needs
            cannot be imported. The text tells the two apart.

    """
    target = _BUILTIN.get(name) or _third_parties().get(name)
    if target is None:
        message = f"there is no backend named {name!r}; known: {', '.join(names())}"
        raise BackendUnavailableError(message)
    module_name, _, attribute = target.partition(":")
    try:
        module = import_module(module_name)
        backend = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        message = (
            f"backend {name!r} is known ({target}) but cannot be loaded: {error}; "
            f"install what it needs, for example pip install 'kv-coordinator[{name}]'"
        )
        raise BackendUnavailableError(message) from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        message = f"backend {name!r}: {target} is not a subclass of backends.base.Backend"
        raise BackendUnavailableError(message)
    return backend


def _third_parties() -> dict[str, str]:
    """The backends of other packages: name -> "module:class"."""
    # Only here: it is a tenth of what a worker imports at its start, and few have such a backend.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
