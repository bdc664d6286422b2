"""What blending costs in quality and saves in time, on a user's own questions; see docs/evaluation.md."""

from blendrag.evaluate.ask import engine_arguments
from blendrag.evaluate.conversations import conversations_of
from blendrag.evaluate.dataset import FollowUp, Question, load_questions, shuffled
from blendrag.evaluate.outcome import Outcome, compare
from blendrag.evaluate.run import Evaluation, evaluate, measure
from blendrag.evaluate.settings import PLAIN, Setting, settings_of
from blendrag.evaluate.summary import Summary, summarise
from blendrag.evaluate.turn_summary import TurnSummary, summarise_turns
from blendrag.evaluate.turns import Turn, measure_turns

__all__ = ["PLAIN", "Evaluation", "FollowUp", "Outcome", "Question", "Setting", "Summary", "Turn",
           "TurnSummary", "compare",
           "conversations_of", "engine_arguments", "evaluate", "load_questions", "measure", "measure_turns",
           "settings_of", "shuffled", "summarise", "summarise_turns"]
