"""A LangChain agent whose search tool returns documents: their KV is reused in every turn of the conversation.

    .venv/bin/python examples/langchain_agent.py [FOLDER [QUESTION ...]]

FOLDER holds .md, .txt, .html or .pdf files; without it, docs/ of this repository is read.

The model has 135 million parameters and would seldom call a tool by itself, so its first step is told to.  Its own chat
template shows no tools; the one here does, in the form that many models were trained on.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from blendrag.documents import read_folder, split
from blendrag.models import engine_arguments, fetch
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_blendrag import BlendVectorStore, ChatBlend, SentenceTransformerEmbeddings
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs"
questions = sys.argv[2:] or ["What does the delimiter do?", "And what is a blend pass?"]

TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nYou call functions.\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nTo call one, answer with\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\n' + (function | tojson) + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""


@wrap_model_call
def search_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """The first answer to a question is a call of the search tool."""
    asked = isinstance(request.messages[-1], HumanMessage) and len(request.messages) == 1
    return handler(request.override(tool_choice="search" if asked else "none"))


model = ChatBlend(model=fetch("smollm2"), engine_args=engine_arguments("smollm2"), chat_template=TEMPLATE,
                  temperature=0, max_tokens=40)
pieces = [piece for source in read_folder(folder) for piece in split(source, model.get_num_tokens)]
documents = [Document(piece.text) for piece in pieces]
embeddings = SentenceTransformerEmbeddings(str(fetch("minilm")))
store = BlendVectorStore.from_documents(documents, embeddings, llm=model)


@tool(response_format="content_and_artifact")
def search(query: Annotated[str, Field(max_length=60)]) -> tuple[str, list[Document]]:
    """Searches the documentation."""
    found = store.similarity_search(query, k=6)
    return "\n\n".join(document.page_content for document in found), found


agent = create_agent(model, [search], middleware=[search_first], checkpointer=InMemorySaver())

conversation = {"configurable": {"thread_id": "1"}}
for question in questions:
    print(f"\n> {question}")
    result = agent.invoke({"messages": [HumanMessage(question)]}, conversation)
    start = max(n for n, message in enumerate(result["messages"]) if isinstance(message, HumanMessage))
    for message in result["messages"][start + 1 :]:
        if isinstance(message, AIMessage):
            blend = message.response_metadata["blend"]
            print(f"{message.tool_calls[0]['args'] if message.tool_calls else message.content.strip()}\n"
                  f"  {blend['prompt_tokens']} prompt tokens, {blend['chunks_found']} chunks: "
                  f"{blend['chunks_reused']} reused, {blend['chunks_prefix_cached']} in vLLM's prefix cache; "
                  f"first token after {blend['first_token_s']:.2f} s")
model.close()
