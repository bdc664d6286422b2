"""What a framework integration needs of blendrag besides the engine itself."""

from .arguments import Call, split_arguments
from .background import gather, iterate
from .chat import chat_template_of, has_chat_template, reads_tools, render_chat
from .chat_prompt import chat_prompt
from .engines import lend_engine, shared_engine
from .logprobs import logprobs_of
from .replies import Reply, ReplyDelta, ToolCall, ToolCallDelta
from .storing import forget_chunks, store_chunks
from .tools import answer_form
from .turn import ChatTurn, ReplyStream
from .usage import usage_of

__all__ = ["Call", "ChatTurn", "Reply", "ReplyDelta", "ReplyStream", "ToolCall", "ToolCallDelta", "answer_form",
           "chat_prompt", "chat_template_of", "forget_chunks", "gather", "has_chat_template", "iterate", "lend_engine",
           "logprobs_of", "reads_tools", "render_chat", "shared_engine", "split_arguments", "store_chunks",
           "usage_of"]
