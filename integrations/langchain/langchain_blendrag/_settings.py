"""What `BlendLLM` and `ChatBlend` have in common: the engine, its settings, and the sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Self

from blendrag import BlendConfig, BlendEngine, BlendPrompt
from blendrag.adapters import Call, lend_engine, shared_engine, split_arguments
from blendrag.errors import ConfigError
from blendrag.reading import as_prompt
from langchain_core.language_models import LangSmithParams
from langchain_core.load import dumpd
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "stop", "seed", "n", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "logprobs")
OF_HOSTED_MODELS = {"api_key", "base_url", "timeout", "max_retries"}
OF_LANGCHAIN = {"stream"}


class EngineSettings(BaseModel):
    """Fields of a LangChain model that runs on a `BlendEngine`.

    Building one is cheap: the engine starts with the first request.  Objects with the same model, config and engine
    arguments share one engine; `engine=` hands one over explicitly.  `api_key`, `base_url`, `timeout` and
    `max_retries`, which hosted models take, are accepted and have no effect.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, extra="forbid")

    model: str = ""
    """Name or folder of the model, as vLLM takes it; with `engine`, the engine's."""

    config: BlendConfig = Field(default_factory=BlendConfig)
    """Blending and the chunk store: a `BlendConfig`, or a mapping of its fields."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM, such as `max_model_len`, `dtype` or `gpu_memory_utilization`."""

    given_engine: BlendEngine | None = Field(default=None, alias="engine", exclude=True, repr=False)
    """An engine to use instead of one of our own; it brings its model, config and engine arguments."""

    temperature: float | None = None
    """Sampling temperature; 0 is greedy.  None, here and below, is vLLM's default."""

    max_tokens: int | None = 512
    """Longest answer, in tokens; None: up to the end of the context window."""

    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    stop: list[str] | None = None
    """Texts that end the answer; those of a call are added to them."""

    seed: int | None = None

    n: int | None = None
    """How many answers a prompt gets."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    logprobs: bool | int | None = None
    """Log probabilities of the answer's tokens: True, with `top_logprobs` of the likeliest ones at each place."""

    top_logprobs: int | None = None

    sampling_args: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's `SamplingParams`, such as `bad_words` or `min_tokens`."""

    _engine: BlendEngine | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _complete_arguments(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = {name: value for name, value in values.items() if name not in OF_HOSTED_MODELS}
        if unknown := sorted(set(values) - set(cls.model_fields) - {"engine"}):
            raise ConfigError(f"{cls.__name__} has no argument {unknown[0]!r}: vLLM's engine arguments go into "
                              "engine_args, its sampling parameters into sampling_args, blending's into config")
        if isinstance(values.get("model"), PathLike):
            values["model"] = str(values["model"])
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        engine = values.get("engine", values.get("given_engine"))
        if engine is not None:
            return values | _of_engine(engine, values)
        if not values.get("model"):
            raise ConfigError(f"{cls.__name__} needs a model: pass model=\"name or folder\", or engine=")
        return values

    @property
    def engine(self) -> BlendEngine:
        """The engine that answers; objects with equal settings share it."""
        if self.given_engine is not None:
            return self.given_engine
        if self._engine is None or self._engine.closed:
            self._engine = shared_engine(self.model, self.config, self.engine_args)
        return self._engine

    def close(self) -> None:
        """Closes the engine, for every object that shares it, and frees its memory; a later call starts it anew.

        An engine handed over with `engine=` stays closed.
        """
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: the engine is made again from the arguments."""
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Arguments that are serialised in a form of our own."""
        return {"config": self._config_values()}

    @property
    def _serialized(self) -> dict[str, Any]:
        """What response caches compare; LangChain keeps the first one, which a copy with other fields would inherit."""
        return dict(dumpd(self))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of plain text in the model's own tokenizer."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        return self.engine.tokens(self._cut(text, rendered=True)).ids

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]  # LangChain's
        params["ls_provider"] = "blendrag"
        return params

    def _cut(self, text: str, *, rendered: bool) -> BlendPrompt:
        """The text with its marks read.

        Args:
            rendered: a chat template made the text, so it has its special tokens already.
        """
        return as_prompt(text, self.config.delimiter, self.config.keep_delimiter, add_special_tokens=not rendered)

    def _call(self, arguments: Mapping[str, Any], stop: Sequence[str] | None) -> Call:
        defaults = {name: getattr(self, name) for name in SAMPLING} | self.sampling_args
        given = {name: value for name, value in arguments.items() if name not in OF_LANGCHAIN}
        likeliest = given.pop("top_logprobs", self.top_logprobs) or 0
        wanted = given.pop("logprobs", defaults["logprobs"])
        if isinstance(wanted, bool):  # as in OpenAI's chat API; a number is vLLM's own form
            wanted = likeliest if wanted else None
        return split_arguments(defaults | {"logprobs": wanted}, given, stop)

    def _identity(self) -> dict[str, Any]:
        """Everything that decides what the model answers: caches compare it."""
        return {
            "model": self.model,
            "config": self._config_values(),
            "engine_args": self.engine_args,
            **{name: getattr(self, name) for name in (*SAMPLING, "top_logprobs")},
            "sampling_args": self.sampling_args,
        }

    def _config_values(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json", exclude_unset=True)


def _of_engine(engine: BlendEngine, values: Mapping[str, Any]) -> dict[str, Any]:
    own = {"model": engine.model, "config": engine.config, "engine_args": dict(engine.engine_args)}
    for name, value in own.items():
        given = values.get(name)
        if given and given != value:
            raise ConfigError(f"{name} differs from that of the engine ({given!r}, not {value!r}): leave it out, or "
                              "leave engine out and have another one made")
    lend_engine(engine)
    return own
