"""The later turns of a conversation: continued on what was blended for the first, and blended anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blendrag.engine import BlendEngine
from blendrag.errors import BlendError
from blendrag.evaluate.ask import FORCED_TOKENS, Answer, answer, encoded_prompt, expected_along, force
from blendrag.evaluate.dataset import FollowUp, Question
from blendrag.evaluate.metrics import Distribution
from blendrag.evaluate.outcome import Outcome, compare
from blendrag.evaluate.prompts import follow_up_prompt, with_answer
from blendrag.evaluate.settings import PLAIN, Setting
from blendrag.prompt import BlendPrompt

CONTINUED, ANEW = "continued", "anew"
ARMS = (CONTINUED, ANEW)
"""What vLLM's prefix cache holds when a turn is asked: what the turns before it left there, or nothing."""

_Reply = tuple[Answer, list[Distribution]]
"""An answer, and what was expected along plain vLLM's."""


@dataclass(frozen=True)
class Turn:
    """A turn behind the first, answered in every way.

    Attributes:
        number: 2 or more.
        follow_up: its question.
        previous_answer: to the turn before it, as it stands in the prompt of every arm.
        plain: a full prefill with nothing in vLLM's prefix cache.
        arms: for each of `ARMS` the outcome of each setting by its label, compared with `plain`.
    """

    number: int
    follow_up: FollowUp
    previous_answer: str
    plain: Outcome
    arms: Mapping[str, Mapping[str, Outcome]]


def measure_turns(engine: BlendEngine, question: Question, settings: Sequence[Setting], answer_tokens: int,
                  first_answer: str) -> list[Turn]:
    """Each follow-up of a question in every way.

    The earlier answers in a prompt are plain vLLM's, whatever was answered in other ways: all see the same tokens.

    Args:
        settings: the plain one needs not be among them.
        first_answer: plain vLLM's to the question itself.

    Raises:
        BlendError: a prompt does not fit the model or does not begin as the one before it, or a request was not
            answered as it should have been.
    """
    prompts, texts = [encoded_prompt(engine, question)], [first_answer]
    full: list[_Reply] = []
    for follow_up in question.follow_ups:
        prompts.append(follow_up_prompt(engine.tokenizer, prompts[-1], texts[-1], follow_up))
        reply = answer(engine, prompts[-1], PLAIN, answer_tokens)
        full.append((reply, expected_along(engine, prompts[-1], PLAIN, reply.token_ids[:FORCED_TOKENS]).places))
        texts.append(reply.text)
    conversation = _Conversation(engine, prompts, texts, full, answer_tokens)
    blended = [setting for setting in settings if setting.policy is not None]
    arms = {CONTINUED: {setting.label: conversation.go_on(setting) for setting in blended},
            ANEW: {setting.label: conversation.start_over(setting) for setting in blended}}
    return [Turn(at + 2, follow_up, texts[at], compare(full[at], full[at], follow_up.answers),
                 {arm: {label: compare(full[at], replies[at], follow_up.answers) for label, replies in by_label.items()}
                  for arm, by_label in arms.items()})
            for at, follow_up in enumerate(question.follow_ups)]


class _Conversation:
    """The prompts of all turns, to be asked in one way or another.

    Args:
        texts: plain vLLM's answers, that of the last turn included.
        full: of each turn behind the first, what plain vLLM answered and expected.
    """

    def __init__(self, engine: BlendEngine, prompts: Sequence[BlendPrompt], texts: Sequence[str],
                 full: Sequence[_Reply], answer_tokens: int) -> None:
        self.engine, self.prompts, self.full, self.answer_tokens = engine, prompts, full, answer_tokens
        self.answer_ids = [answer_ids(engine, before, text, after)
                           for before, text, after in zip(prompts, texts, prompts[1:], strict=False)]

    def start_over(self, setting: Setting) -> list[_Reply]:
        """Each turn behind the first, with an empty prefix cache."""
        return [self._ask(number, setting, reset=True) for number in range(1, len(self.prompts))]

    def go_on(self, setting: Setting) -> list[_Reply]:
        """Each turn behind the first, after the turns before it, on which plain vLLM's answers are forced."""
        replies = []
        for number, ids in enumerate(self.answer_ids):
            force(self.engine, self.prompts[number], setting, ids, reset=number == 0)
            replies.append(self._ask(number + 1, setting, reset=False))
        return replies

    def _ask(self, number: int, setting: Setting, *, reset: bool) -> _Reply:
        """Without a reset the second request finds the blocks of the first: they expect on the KV that answered."""
        prompt = self.prompts[number]
        reply = answer(self.engine, prompt, setting, self.answer_tokens, reset=reset)
        along = self.full[number - 1][0].token_ids[:FORCED_TOKENS]
        return reply, expected_along(self.engine, prompt, setting, along, reset=reset).places


def answer_ids(engine: BlendEngine, before: BlendPrompt, text: str, after: BlendPrompt) -> list[int]:
    """The tokens of an answer as the next turn's prompt has them, and the one behind them.

    Engines compute the KV of a token when the next one is due: with it, the whole answer is computed.

    Raises:
        BlendError: the next turn's prompt does not begin with the tokens of this one's.
    """
    ids, spoken, whole = (engine.tokens(prompt).ids
                          for prompt in (before, with_answer(engine.tokenizer, before, text), after))
    if whole[: len(ids)] != ids:
        raise BlendError(f"the model's tokenizer joins the answer {text!r} to what stands before it, so that the next "
                         "turn does not begin as this one: leave this conversation out")
    # The answer's last token may be another one where text follows it.
    end = next((at for at, (one, other) in enumerate(zip(spoken, whole, strict=False)) if one != other), len(spoken))
    return whole[len(ids) : max(end, len(ids)) + 1]
