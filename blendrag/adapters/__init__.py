"""What a framework integration needs of blendrag besides the engine itself."""

from .arguments import Call, split_arguments
from .background import gather, iterate
from .chat import has_chat_template, render_chat
from .engines import shared_engine
from .usage import usage_of

__all__ = ["Call", "gather", "has_chat_template", "iterate", "render_chat", "shared_engine", "split_arguments",
           "usage_of"]
