"""What blending costs in quality and saves in time, on a user's own questions; see docs/evaluation.md."""

from blendrag.evaluate.ask import engine_arguments
from blendrag.evaluate.dataset import Question, load_questions, shuffled
from blendrag.evaluate.run import Evaluation, Outcome, compare, evaluate, measure
from blendrag.evaluate.settings import PLAIN, Setting, settings_of
from blendrag.evaluate.summary import Summary, summarise

__all__ = ["PLAIN", "Evaluation", "Outcome", "Question", "Setting", "Summary", "compare", "engine_arguments",
           "evaluate", "load_questions", "measure", "settings_of", "shuffled", "summarise"]
