"""One component's hold on an engine that other components may use too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from blendrag import BlendConfig, BlendEngine
from blendrag.adapters import lend_engine, shared_engine
from blendrag.errors import ConfigError

_users: WeakKeyDictionary[BlendEngine, WeakSet[EngineHandle]] = WeakKeyDictionary()
_lent: WeakSet[BlendEngine] = WeakSet()
_lock = threading.Lock()


class EngineHandle:
    """The engine of one component, and the arguments that it is made of.

    Components with equal model, config and engine arguments share an engine, in one pipeline or in several.  Nothing is
    started here.

    Args:
        owner: class name of the component, for messages.
        model: name or folder of the model, as vLLM takes it.
        config: a `BlendConfig`, or a mapping of its fields.
        engine_args: further engine arguments of vLLM's.
        engine: an engine to use instead of one of our own; it brings the other three, and is never closed here.

    Raises:
        ConfigError: there is neither model nor engine, an engine and what it brings, or an unknown setting.
    """

    def __init__(self, owner: str, model: str | PathLike[str] | None, config: BlendConfig | Mapping[str, Any] | None,
                 engine_args: Mapping[str, Any] | None, engine: BlendEngine | None) -> None:
        if engine is not None:
            if not (model is None and config is None and engine_args is None):
                raise ConfigError("an engine brings its model, config and engine_args: leave them out beside engine=")
            model, config, engine_args = engine.model, engine.config, engine.engine_args
            lend_engine(engine)
            _lent.add(engine)
        elif model is None:
            raise ConfigError(f"{owner} needs a model: pass its name or folder, or engine=")
        self.model = str(model)
        self.config = config if isinstance(config, BlendConfig) else BlendConfig(**(config or {}))
        self.engine_args = dict(engine_args or {})
        self._given = engine
        self._engine: BlendEngine | None = None

    @property
    def engine(self) -> BlendEngine:
        """The engine, made anew where it was closed; it starts with its first use."""
        with _lock:
            if self._given is not None:
                return self._given
            if self._engine is None or self._engine.closed:
                self._engine = shared_engine(self.model, self.config, self.engine_args)
                _users.setdefault(self._engine, WeakSet()).add(self)
            return self._engine

    def start(self) -> None:
        """Loads the model, unless it is loaded."""
        _ = self.engine.tokens  # whatever asks the engine something starts it

    def close(self) -> None:
        """Lets go of the engine, and closes it where no other component holds it."""
        with _lock:
            engine, self._engine = self._engine, None
            if engine is None or engine in _lent:
                return
            users = _users[engine]
            users.discard(self)
            if users:
                return
        engine.close()

    def init_parameters(self) -> dict[str, Any]:
        """`model`, `config` and `engine_args` as plain values, for a component's `to_dict`."""
        return {"model": self.model, "config": self.config.model_dump(mode="json", exclude_unset=True),
                "engine_args": self.engine_args}
