"""Which syntax a model calls tools in, told by its chat template."""

from __future__ import annotations

from blendrag.errors import PromptError

_SIGNS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm47"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<start_function_call>",), "functiongemma"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("functools[",), "phi4_mini_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)
"""What all stands in a template, and vLLM's parser of the calls that its model writes; the first that fits counts."""


def tool_syntax(template: str, parser: str = "auto") -> str:
    """Name of vLLM's tool parser for a model with this chat template.

    Args:
        parser: a name, which is returned after a check, or "auto".

    Raises:
        PromptError: vLLM has no parser of that name, or none can be told from the template.
    """
    from blendrag.runtime.tool_parsing import parser_names

    known = parser_names()
    if parser == "auto":
        fitting = [name for signs, name in _SIGNS if name in known and all(sign in template for sign in signs)]
        if not fitting:
            raise PromptError("the chat template does not tell in which syntax the model calls tools: name vLLM's "
                              'parser of it as tool_parser="hermes" for instance, or require a call by tool_choice')
        return fitting[0]
    if parser not in known:
        raise PromptError(f"vLLM has no tool parser {parser!r}: use auto or one of {', '.join(known)}")
    return parser
