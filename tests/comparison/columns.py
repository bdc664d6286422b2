"""The classes of the table, each as one builds it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from blendrag import BlendEngine
from tests.comparison.subject import Column, Subject
from tests.comparison.watch import BlendWatch, PipelineWatch, ServerWatch, VllmWatch
from tests.engine.serving import Server

HERMES = Path(__file__).parents[2] / "integrations/langchain/tests/templates/hermes.jinja"
"""A chat template that shows tools: SmolLM2's own does not."""

NOWHERE = "/no/such/model"
ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
                          "kv_cache_memory_bytes": 2**28}

OURS = ("ChatBlend", "BlendLLM", "BlendLLM (LlamaIndex)", "BlendChatGenerator")
"""Our classes with an engine in the process."""

SERVED = "ChatOpenAI"


def ours(name: str, **built: Any) -> Subject:
    """One of `OURS`.

    Args:
        built: `engine`, or `model` and `engine_args`.
    """
    made = {"ChatBlend": _chat_blend, "BlendLLM": _blend_llm, "BlendLLM (LlamaIndex)": _llama_index_blend,
            "BlendChatGenerator": _haystack_blend}[name]
    return made(built)


def _of_vllm(options: dict[str, Any]) -> dict[str, Any]:
    """Options as fields of `SamplingParams`."""
    options = dict(options)
    if choice := options.pop("choice", None):
        from vllm.sampling_params import StructuredOutputsParams

        options["structured_outputs"] = StructuredOutputsParams(choice=choice)
    return options


def _of_openai(options: dict[str, Any]) -> dict[str, Any]:
    """Options as vLLM's server takes them from OpenAI's client."""
    options = dict(options)
    extra = options.pop("extra_body", {})
    if choice := options.pop("choice", None):
        extra = extra | {"structured_outputs": {"choice": choice}}
    if "ignore_eos" in options:
        extra = extra | {"ignore_eos": options.pop("ignore_eos")}
    return options | ({"extra_body": extra} if extra else {})


def _stored(engine: BlendEngine) -> Callable[[Any], Any]:
    return lambda texts: engine.encode(list(texts))


def _in_process(engine: BlendEngine) -> dict[str, Any]:
    return {"watch": BlendWatch(engine), "tokenizer": engine.tokenizer, "translate": _of_vllm,
            "store": _stored(engine), "tools": {"fields": {"chat_template": HERMES.read_text()}}}


def _copies(model: Any) -> Callable[..., Any]:
    """Variants of a pydantic object on the same engine."""
    return lambda **settings: model.model_copy(update=settings)


def _chat_blend(built: dict[str, Any]) -> Subject:
    from langchain_blendrag import ChatBlend

    from tests.comparison.langchain import LangChainChat

    model = ChatBlend(**built, temperature=0, max_tokens=20)
    column = Column(ChatBlend, make=partial(ChatBlend, **built), nowhere=lambda: ChatBlend(model=NOWHERE),
                    variant=_copies(model), **_in_process(model.engine))
    return LangChainChat(column, model)


def _blend_llm(built: dict[str, Any]) -> Subject:
    from langchain_blendrag import BlendLLM

    from tests.comparison.langchain import LangChainLLM

    model = BlendLLM(**built, temperature=0, max_tokens=20)
    column = Column(BlendLLM, make=partial(BlendLLM, **built), nowhere=lambda: BlendLLM(model=NOWHERE),
                    variant=_copies(model), **_in_process(model.engine))
    return LangChainLLM(column, model)


def _llama_index_blend(built: dict[str, Any]) -> Subject:
    from llama_index.llms.blendrag import BlendLLM

    from tests.comparison.llama_index import LlamaIndexLLM

    def variant(**settings: Any) -> BlendLLM:
        if "stop" in settings:
            settings["sampling_args"] = {"stop": settings.pop("stop")}
        return BlendLLM(**built, **{"temperature": 0, "max_tokens": 20} | settings)

    model = variant()
    column = Column(BlendLLM, make=partial(BlendLLM, **built), nowhere=lambda: BlendLLM(NOWHERE),
                    variant=variant, **_in_process(model.engine))
    return LlamaIndexLLM(column, model)


def _haystack_blend(built: dict[str, Any]) -> Subject:
    from haystack_integrations.components.generators.blendrag import BlendChatGenerator

    from tests.comparison.haystack import HaystackGenerator

    def variant(**settings: Any) -> BlendChatGenerator:
        return BlendChatGenerator(**built, generation_kwargs={"temperature": 0, "max_tokens": 20} | settings)

    model = variant()
    column = Column(BlendChatGenerator, make=partial(BlendChatGenerator, **built),
                    nowhere=lambda: BlendChatGenerator(NOWHERE), variant=variant, **_in_process(model.engine))
    return HaystackGenerator(column, model)


def served(server: Server, model: Path) -> Subject:
    """langchain-openai's `ChatOpenAI` on `blendrag serve`.

    Args:
        server: runs the model as "served", trusts chat templates in requests, and reads tool calls as Hermes does.
        model: folder of the model.
    """
    from langchain_openai import ChatOpenAI

    from tests.comparison.langchain import LangChainChat

    def make(**given: Any) -> ChatOpenAI:
        return ChatOpenAI(**{"model": "served", "base_url": f"{server.url}/v1", "api_key": server.api_key,
                             "temperature": 0, "max_tokens": 20, "max_retries": 0} | given)

    def store(texts: Any) -> None:
        make().invoke("Say yes.", max_tokens=8, extra_body={"documents": list(texts)})

    chat = make()
    unreachable = {"base_url": "http://127.0.0.1:9/v1"}
    column = Column(ChatOpenAI, watch=ServerWatch(server), tokenizer=AutoTokenizer.from_pretrained(model),
                    make=make, nowhere=lambda: make(**unreachable), variant=make,
                    translate=_of_openai, store=store, has_engine=False,
                    tools={"options": {"extra_body": {"chat_template": HERMES.read_text()}}},
                    stream_usage={"stream_usage": True})
    return LangChainChat(column, chat)


def vllm_haystack(server: Server, model: Path) -> Subject:
    """vllm-haystack's generator on a stock `vllm serve`, started like the other."""
    from haystack.utils import Secret
    from haystack_integrations.components.generators.vllm import VLLMChatGenerator

    from tests.comparison.haystack import HaystackGenerator

    def make(**given: Any) -> VLLMChatGenerator:
        return VLLMChatGenerator(**{"model": "served", "api_base_url": f"{server.url}/v1",
                                    "api_key": Secret.from_env_var("VLLM_API_KEY", strict=False)} | given)

    def variant(**settings: Any) -> VLLMChatGenerator:
        return make(generation_kwargs={"temperature": 0, "max_tokens": 20} | settings)

    unreachable = {"api_base_url": "http://127.0.0.1:9/v1"}
    column = Column(VLLMChatGenerator, watch=ServerWatch(server), tokenizer=AutoTokenizer.from_pretrained(model),
                    make=make, nowhere=lambda: make(**unreachable), variant=variant,
                    translate=_of_openai, has_engine=False,
                    tools={"options": {"extra_body": {"chat_template": HERMES.read_text()}}},
                    stream_usage={"stream_options": {"include_usage": True}})
    return HaystackGenerator(column, variant())


def community_vllm(model: Path) -> Subject:
    """langchain-community's `VLLM`."""
    from langchain_community.llms import VLLM

    from tests.comparison.langchain import LangChainLLM

    def translate(options: dict[str, Any]) -> dict[str, Any]:
        options = _of_vllm(options)
        return options | ({"logprobs": 1} if options.get("logprobs") else {})

    def make(**given: Any) -> VLLM:
        return VLLM(temperature=0, max_new_tokens=20, **_engine(model) | given)

    llm = make()
    column = Column(VLLM, watch=VllmWatch(llm.client), tokenizer=llm.client.get_tokenizer(), make=make,
                    nowhere=lambda: make(model=NOWHERE), variant=_copies(llm), translate=translate)
    return LangChainLLM(column, llm)


def llama_index_vllm(model: Path) -> Subject:
    """llama-index-llms-vllm's `Vllm`."""
    from llama_index.llms.vllm import Vllm

    from tests.comparison.llama_index import LlamaIndexLLM

    def make(**given: Any) -> Vllm:
        return Vllm(temperature=0, max_new_tokens=20, **_engine(model) | given)

    llm = make()
    column = Column(Vllm, watch=VllmWatch(llm._client), tokenizer=llm._client.get_tokenizer(), make=make,
                    nowhere=lambda: make(model=NOWHERE), variant=_copies(llm), translate=_of_vllm)
    return LlamaIndexLLM(column, llm)


def chat_hugging_face(model: Path) -> Subject:
    """langchain-huggingface's `ChatHuggingFace` on a `HuggingFacePipeline`."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

    from tests.comparison.langchain import LangChainChat

    usual = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    names = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}

    def make(folder: str) -> ChatHuggingFace:
        pipeline = HuggingFacePipeline.from_model_id(folder, "text-generation", pipeline_kwargs=usual,
                                                     model_kwargs={"dtype": "float32"})
        return ChatHuggingFace(llm=pipeline, model_id=folder)

    def translate(options: dict[str, Any]) -> dict[str, Any]:
        rest = dict(options)
        passed = {name: rest.pop(name) for name in ("stop", "frobnicate") if name in rest}
        for name in ("logprobs", "choice"):
            rest.pop(name, None)  # there is nothing to ask for them with
        if rest.pop("ignore_eos", False):
            rest["min_new_tokens"] = rest["max_tokens"]
        if "n" in rest:
            rest["do_sample"] = True
        return passed | {"pipeline_kwargs": usual | {names.get(name, name): value for name, value in rest.items()}}

    chat = make(str(model))

    def variant(**settings: Any) -> ChatHuggingFace:
        model_id = settings.pop("model", str(model))
        stop = {"stop": settings.pop("stop")} if "stop" in settings else {}
        pipeline = chat.llm.model_copy(update={"model_id": model_id, "pipeline_kwargs": usual | settings})
        return chat.model_copy(update={"llm": pipeline, "model_id": model_id, **settings, **stop})

    column = Column(ChatHuggingFace, watch=PipelineWatch(chat.llm.pipeline.model), tokenizer=chat.tokenizer,
                    make=partial(ChatHuggingFace, llm=chat.llm), nowhere=lambda: make(NOWHERE), variant=variant,
                    translate=translate)
    return LangChainChat(column, chat)


def _engine(model: Path) -> dict[str, Any]:
    """Arguments for the engine in the form that both classes of others take."""
    rest = {name: value for name, value in ENGINE.items() if name != "dtype"}
    return {"model": str(model), "dtype": ENGINE["dtype"], "vllm_kwargs": rest}


def with_bos(model: Path, target: Path) -> Path:
    """The same model with a tokenizer that puts a BOS before any text, as Llama's and Gemma's do."""
    from tokenizers.processors import TemplateProcessing

    target.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(model)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    for file in model.iterdir():
        (target / file.name).symlink_to(file)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in Path(folder).iterdir():
            (target / file.name).unlink(missing_ok=True)
            (target / file.name).write_bytes(file.read_bytes())
    return target
