"""Questions, each answered plainly once and blended with one setting after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.engine import BlendEngine
from blendrag.evaluate.ask import answer, encoded_prompt, expected_along
from blendrag.evaluate.dataset import Question
from blendrag.evaluate.metrics import Distribution, divergence, f1, first_line
from blendrag.evaluate.prompts import build_prompt
from blendrag.evaluate.settings import PLAIN, Setting
from blendrag.prompt import BlendPrompt

ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Answered:
    """How one question was answered in one way.

    Attributes:
        rows: share of a full prefill's rows that was computed.
        kl: KL(plain || this) of the first token's distribution, in nats.
        top1: both expect the same first token most.
        f1: of the answer's first line; None where it was not asked for, or no right answer is known.
    """

    rows: float
    kl: float
    top1: bool
    f1: float | None = None


class Answers:
    """Asks what has not been asked yet, and remembers every answer.

    Args:
        engine: started with `blendrag.evaluate.engine_arguments`.
        with_f1: also let the model answer.
    """

    def __init__(self, engine: BlendEngine, *, with_f1: bool) -> None:
        self._engine = engine
        self._with_f1 = with_f1
        self._full: dict[Question, Distribution] = {}
        self._known: dict[tuple[Question, str], Answered] = {}

    def ask(self, question: Question, settings: Sequence[Setting]) -> None:
        """Answers a question with settings, and plainly where that was not done yet.

        Raises:
            BlendError: the prompt does not fit the model, or a request was not answered as it should have been.
        """
        new = [setting for setting in (PLAIN, *settings) if (question, setting.label) not in self._known]
        if not new:
            return
        prompt = encoded_prompt(self._engine, question)
        for setting in new:
            self._known[question, setting.label] = self._answer(question, prompt, setting)

    def of(self, setting: Setting, questions: Sequence[Question]) -> list[Answered]:
        """The answers to questions that were asked with a setting."""
        return [self._known[question, setting.label] for question in questions]

    def prompt_tokens(self, question: Question) -> int:
        """Length of the question's prompt."""
        return len(self._engine.tokens(build_prompt(self._engine.tokenizer, question)).ids)

    def _answer(self, question: Question, prompt: BlendPrompt, setting: Setting) -> Answered:
        # What is expected at the first place does not depend on what is forced on it.
        told = expected_along(self._engine, prompt, setting, [0])
        full = self._full.setdefault(question, told.places[0])
        score = None
        if self._with_f1 and question.answers:
            said = answer(self._engine, prompt, setting, ANSWER_TOKENS).text
            score = f1(first_line(said), question.answers)
        return Answered(told.rows, divergence(full, told.places[0]), told.places[0].likeliest == full.likeliest, score)
