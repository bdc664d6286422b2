"""One engine per process for the same model, settings and engine arguments."""

from __future__ import annotations

import json
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
    key = json.dumps([model, config.model_dump(mode="json"), dict(engine_args)], sort_keys=True, default=repr)
    with _lock:
        engine = _engines.get(key)
        if engine is None or engine.closed:
            engine = _engines[key] = BlendEngine(model, config=config, **engine_args)
        return engine
