"""One engine per process for the same model, settings and engine arguments."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from blendrag import BlendConfig, BlendEngine

_engines: WeakValueDictionary[str, BlendEngine] = WeakValueDictionary()
_lock = threading.Lock()


def shared_engine(model: str, config: BlendConfig, engine_args: Mapping[str, Any]) -> BlendEngine:
    """The open engine that has these arguments, or a new one, which starts on first use.

    Frameworks copy and rebuild their model objects freely, so a model object must find its engine again.  The
    engine lives as long as an object uses it, or until it is closed.
    """
    key = _key(model, config, engine_args)
    with _lock:
        engine = _engines.get(key)
        if engine is None or engine.closed:
            engine = _engines[key] = BlendEngine(model, config=config, **engine_args)
        return engine


def lend_engine(engine: BlendEngine) -> None:
    """Lets objects that are rebuilt from this engine's arguments find it, instead of starting another one.

    For an engine that an application hands to a model object: saving and loading keeps only the arguments.
    """
    key = _key(engine.model, engine.config, engine.engine_args)
    with _lock:
        known = _engines.get(key)
        if known is None or known.closed:
            _engines[key] = engine


def _key(model: str, config: BlendConfig, engine_args: Mapping[str, Any]) -> str:
    return json.dumps([model, config.model_dump(mode="json"), dict(engine_args)], sort_keys=True, default=repr)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
