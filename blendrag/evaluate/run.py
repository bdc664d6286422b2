"""Asks every question plainly and with every setting, and compares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from blendrag.engine import BlendEngine
from blendrag.errors import BlendError, EngineClosedError
from blendrag.evaluate.ask import FORCED_TOKENS, Answer, answer, encoded_prompt, expected_along
from blendrag.evaluate.dataset import Question
from blendrag.evaluate.metrics import Distribution
from blendrag.evaluate.outcome import Outcome, compare
from blendrag.evaluate.settings import DEFAULT, PLAIN, Setting
from blendrag.evaluate.turns import Turn, measure_turns
from blendrag.policies import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A question that could not be measured."""

    question: Question
    reason: str


@dataclass
class Evaluation:
    """What was measured so far.

    Attributes:
        settings: the baseline first.
        questions: those that were answered in every way, in the order of the data set.
        outcomes: of each setting, by its label, one for each of `questions`.
        turns: of each of `questions`, the later turns of its conversation; empty where only the first was asked for.
        failures: questions that were left out.
        interrupted: the user did not wait for the rest.
    """

    settings: tuple[Setting, ...]
    questions: list[Question] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    turns: list[list[Turn]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


def evaluate(engine: BlendEngine, questions: Sequence[Question], settings: Sequence[Setting], *,
             default: Policy | None = None, answer_tokens: int = 32, turns: bool = False,
             on_progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Measures settings against a plain full prefill.

    The questions come one after the other, each answered in every way before the next, so that what is there after
    Ctrl-C or a failure is paired.  A question that fails in one way is left out of all.

    Args:
        engine: started with `engine_arguments`.
        settings: without the baseline, which is measured in any case.
        default: what "default" stands for; None: the policy that the engine uses unasked.
        answer_tokens: most tokens of an answer.
        turns: measure the follow-ups of each question, too.
        on_progress: called with (questions done, questions in all).
    """
    # Asking for its policy starts the engine: what goes wrong here is no question's fault.
    used = engine.policy if default is None else default
    result = Evaluation((PLAIN, *(replace(s, policy=used) if s.name == DEFAULT else s for s in settings)))
    result.outcomes = {setting.label: [] for setting in result.settings}
    try:
        with suppress(BlendError):  # the question will say so again
            for question in questions[:1]:
                _warm_up(engine, question, result.settings)
        for number, question in enumerate(questions, 1):
            try:
                found = measure(engine, question, result.settings, answer_tokens)
                later = measure_turns(engine, question, result.settings, answer_tokens,
                                      found[PLAIN.label].text) if turns else []
            except EngineClosedError:
                raise
            except Exception as error:
                logger.debug("question in line %d failed", question.line, exc_info=True)
                reason = str(error) if isinstance(error, BlendError) else f"{type(error).__name__}: {error}"
                result.failures.append(Failure(question, reason))
            else:
                result.questions.append(question)
                result.turns.append(later)
                for label, outcome in found.items():
                    result.outcomes[label].append(outcome)
            if on_progress:
                on_progress(number, len(questions))
    except KeyboardInterrupt:
        result.interrupted = True
    except EngineClosedError as error:
        undone = questions[len(result.questions) + len(result.failures)]
        result.failures.append(Failure(undone, f"{error}; the questions behind it were not asked"))
    return result


def measure(engine: BlendEngine, question: Question, settings: Sequence[Setting],
            answer_tokens: int) -> Mapping[str, Outcome]:
    """One question in every way, by the settings' labels; the first setting is what the others are compared with.

    Raises:
        BlendError: the prompt does not fit the model, or a request was not answered as it should have been.
    """
    prompt = encoded_prompt(engine, question)
    found: dict[str, Outcome] = {}
    baseline: tuple[Answer, list[Distribution]] | None = None
    for setting in settings:
        given = answer(engine, prompt, setting, answer_tokens)
        full = baseline[0] if baseline else given
        expected = expected_along(engine, prompt, setting, full.token_ids[:FORCED_TOKENS]).places
        baseline = baseline or (given, expected)
        found[setting.label] = compare(baseline, (given, expected), question.answers)
    return found


def _warm_up(engine: BlendEngine, question: Question, settings: Sequence[Setting]) -> None:
    """Compiles and allocates what first use does."""
    prompt = encoded_prompt(engine, question)
    for setting in settings:
        answer(engine, prompt, setting, 1)
