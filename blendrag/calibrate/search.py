"""The search: which policy, which layers, which ratio, and the proof on questions that had no part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blendrag.calibrate.candidates import CHEAPEST, CONTROL, FAMILIES, FIRST_LOOK, RATIOS, Family
from blendrag.calibrate.measure import Answers
from blendrag.calibrate.points import Point, frontier, point
from blendrag.calibrate.suitable import REPEATS, distinct, require
from blendrag.calibrate.target import Target
from blendrag.engine import BlendEngine
from blendrag.errors import BlendError, DatasetError, EngineClosedError
from blendrag.evaluate.dataset import Question
from blendrag.evaluate.run import Failure
from blendrag.evaluate.settings import PLAIN, Setting

MOST_ROWS = 0.7
"""What computes more than this share of a full prefill's rows is not worth being approximate."""

_FINALISTS = 2

_PROOFS = 6
"""Settings that are tried on the other questions, at most."""

Progress = Callable[[str, int, int], None]


@dataclass
class Calibration:
    """What was found.

    Attributes:
        target: what had to be met.
        tuning: every setting on the questions that were searched with, the cheapest first.
        check: settings on the other questions, in the order in which they were tried, the dearest first.
        control: everything recomputed; its KL is rounding, below which nothing comes.
        questions: those that were measured.
        prompt_tokens: mean length of their prompts.
        failures: those that were left out.
        repeats: questions that were given more than once, and asked once.
    """

    target: Target
    tuning: list[Point] = field(default_factory=list)
    check: list[Point] = field(default_factory=list)
    control: Point | None = None
    questions: list[Question] = field(default_factory=list)
    prompt_tokens: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    repeats: int = 0

    @property
    def chosen(self) -> Point | None:
        """The cheapest that met the target on questions that it was not chosen by; None where none did."""
        return next((p for p in reversed(self.check) if p.meets), None)


def calibrate(engine: BlendEngine, questions: Sequence[Question], target: Target, *,
              families: Sequence[Family] = FAMILIES, ratios: Sequence[float] = RATIOS,
              on_progress: Progress = lambda stage, done, total: None) -> Calibration:
    """Finds the cheapest setting that meets a target on every other question, and proves it on the rest.

    1. Families of policies are compared at one ratio; of those that none beats in both rows and KL the best two go on.
    2. Each of these is measured at every ratio.
    3. The settings that no other beats are tried on the questions left, from the dearest to cheaper ones, until one
       fails.  As their order is fixed beforehand, the last one that passes is as sure as if it had been the only one
       (fixed-sequence testing: Angelopoulos et al., "Learn then Test", arXiv 2110.01052).  How sure a single one is:
       `blendrag.calibrate.proof`.

    Args:
        engine: started with `blendrag.evaluate.engine_arguments`; best without a store of its own.
        questions: at least `suitable.LEAST_QUESTIONS` that fit the model; others, and repeats, are left out.
        families, ratios: what is tried, besides settings without a ratio.
        on_progress: called with (what is being done, questions done, questions in all).

    Raises:
        DatasetError: too few questions; where the target is about F1, one without an answer, or only wrong ones.
        BlendError: the engine died, or a blend pass failed.
    """
    asked = distinct(questions)
    require(asked, target, len(questions), REPEATS)
    search = _Search(engine, Calibration(target, repeats=len(questions) - len(asked)), on_progress)
    result = search.result
    search.leave_out(asked)
    tuning, check = result.questions[::2], result.questions[1::2]
    tried = [*CHEAPEST, *(family.setting(FIRST_LOOK) for family in families)]
    search.require_right_answers(tuning)
    search.require_right_answers(check)
    search.ask("comparing policies", tuning, [CONTROL, *tried])
    result.control = search.point(CONTROL, tuning)
    for family in search.finalists(families, tuning):
        more = [family.setting(ratio) for ratio in ratios if ratio != FIRST_LOOK]
        search.ask(f"ratios of {family.name}", tuning, more)
        tried += more
    result.tuning = sorted((search.point(setting, tuning) for setting in tried), key=lambda p: (p.rows, p.kl))
    path = [p.setting for p in frontier(result.tuning) if p.meets and p.rows <= MOST_ROWS]
    for setting in reversed(_thinned(path)):
        search.ask(f"proving {setting.label}", check, [setting])
        result.check.append(search.point(setting, check, proven=True))
        if not result.check[-1].meets:
            break
    return result


def _thinned(path: Sequence[Setting]) -> list[Setting]:
    """At most `_PROOFS` settings, evenly spread, the cheapest and the dearest among them."""
    if len(path) <= _PROOFS:
        return list(path)
    return [path[round(number * (len(path) - 1) / (_PROOFS - 1))] for number in range(_PROOFS)]


class _Search:
    """Asks questions and tells how it goes."""

    def __init__(self, engine: BlendEngine, result: Calibration, on_progress: Progress) -> None:
        self.result = result
        self._answers = Answers(engine, with_f1=result.target.min_f1 is not None)
        self._on_progress = on_progress

    def leave_out(self, questions: Sequence[Question]) -> None:
        """Asks all plainly, and leaves out those that cannot be asked."""
        lengths = []
        for number, question in enumerate(questions, 1):
            try:
                self._answers.ask(question, [])
            except EngineClosedError:
                raise
            except BlendError as error:
                self.result.failures.append(Failure(question, str(error)))
            else:
                self.result.questions.append(question)
                lengths.append(self._answers.prompt_tokens(question))
            self._on_progress("plain answers", number, len(questions))
        why = [f"line {failure.question.line}: {failure.reason}" for failure in self.result.failures[:1]]
        require(self.result.questions, self.result.target, len(questions), "".join(why))
        self.result.prompt_tokens = sum(lengths) / len(lengths)

    def require_right_answers(self, questions: Sequence[Question]) -> None:
        """Complains where a share of a full prefill's F1 is a share of nothing."""
        if self.result.target.min_f1 is not None and not any(a.f1 for a in self._answers.of(PLAIN, questions)):
            raise DatasetError(f"a full prefill has F1 0 on {len(questions)} questions, so any policy keeps min_f1: "
                               "check the answers, or give max_kl instead")

    def ask(self, stage: str, questions: Sequence[Question], settings: Sequence[Setting]) -> None:
        """Answers questions with settings."""
        for number, question in enumerate(questions, 1):
            self._answers.ask(question, settings)
            self._on_progress(stage, number, len(questions))

    def point(self, setting: Setting, questions: Sequence[Question], proven: bool = False) -> Point:
        """What a setting came to; `meets` by its means, or `proven` by their intervals too."""
        blended, full = self._answers.of(setting, questions), self._answers.of(PLAIN, questions)
        target = self.result.target
        return point(setting, blended, target.proven_by(blended, full) if proven else target.met_by(blended, full))

    def finalists(self, families: Sequence[Family], questions: Sequence[Question]) -> list[Family]:
        """Of the families that no other beats in both rows and KL, the best."""
        points = {self.point(family.setting(FIRST_LOOK), questions): family for family in families}
        best = sorted(frontier(list(points)), key=lambda p: p.kl)[:_FINALISTS]
        return [points[one] for one in best]
