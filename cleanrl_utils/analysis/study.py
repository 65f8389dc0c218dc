"""An Optuna study: open it, and show it as one web page."""

import html
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.running.source import fingerprint

try:
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
        check_distribution_compatibility,
    )
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import BaseTrial, FixedTrial, TrialState
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import (
        ArgumentError,
        IntegrityError,
        NoSuchModuleError,
        OperationalError,
        ProgrammingError,
    )
except ImportError:
    raise missing_package("optuna", "optuna") from None

AGGREGATIONS: dict[str, Callable] = {
    "average": statistics.fmean,
    "median": statistics.median,
    "max": max,
    "min": min,
}
SCORED = "scored"  # key in the study of what its scores are
LENGTH = "total-timesteps"
CODES = "codes"  # key in the study of the versions of the code that its trials ran
ATTEMPTS = 4  # to open a study: several machines may create its tables at once


class AnyTrial:
    """Optuna's trial, also with the names that suggest_float had in earlier versions."""

    def __init__(self, trial: BaseTrial):
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self._trial.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self._trial.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self._trial.suggest_float(name, low, high, step=q)


def open_study(storage: str, **settings: Any) -> optuna.Study:
    """Open a study, or create it."""
    try:
        make_url(storage)
    except (ArgumentError, ValueError):  # their text may show a part of the password
        raise BadInput(
            "Tuner: storage is not a database URL like sqlite:///cleanrl_hpopt.db"
        ) from None
    for attempt in range(ATTEMPTS):
        try:
            study = optuna.create_study(storage=storage, load_if_exists=True, **settings)
            if study.get_trials(deepcopy=False):  # else a sampler with a seed repeats itself
                study.sampler.reseed_rng()
            return study
        except (IntegrityError, ProgrammingError, OperationalError) as error:
            if attempt == ATTEMPTS - 1:
                reason = str(error.orig).strip().splitlines()[0]
                raise BadInput(f"Tuner: the storage cannot be used: {reason}") from None
            time.sleep(1)
        except (NoSuchModuleError, ImportError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BadInput(f"Tuner: the storage cannot be used: {reason}") from None
    raise AssertionError


def without_password(storage: str) -> str:
    return make_url(storage).render_as_string(hide_password=True)


def requeue(study: optuna.Study, trial: BaseTrial) -> None:
    """Mark an interrupted trial as failed, and queue its settings for a new trial."""
    try:
        study.tell(trial.number, state=TrialState.FAIL)
    except (UpdateFinishedTrialError, ValueError):  # another tuner has just requeued it
        return
    study.enqueue_trial(trial.params)


def study_page(study: optuna.Study, facts: list[str], command: str) -> str:
    """A self-contained page: facts, the command with the best settings, Optuna's figures."""
    counts = {state: 0 for state in TrialState}
    for trial in study.get_trials(deepcopy=False):
        counts[trial.state] += 1
    trials = ", ".join(f"{n} {state.name.lower()}" for state, n in counts.items() if n)
    title = html.escape(f"Study {study.study_name}")
    parts = [f"<!doctype html><meta charset='utf-8'><title>{title}</title>"]
    parts += ["<style>body{font:16px sans-serif;margin:2em}pre{white-space:pre-wrap}</style>"]
    parts += [f"<h1>{title}</h1>"]
    parts += [f"<p>{html.escape(fact)}</p>" for fact in [f"Trials: {trials}.", *facts]]
    parts += [f"<pre>{html.escape(command)}</pre>"]
    for number, figure in enumerate(figures(study)):
        # The first figure includes plotly, so that the page needs no network.
        parts.append(figure.to_html(full_html=False, include_plotlyjs=number == 0))
    return "\n".join(parts)


def figures(study: optuna.Study) -> list[Any]:
    """Optuna's figures of this study, without those that need more trials than it has."""
    from optuna import importance, visualization

    def importances(study: optuna.Study) -> Any:
        evaluator = importance.PedAnovaImportanceEvaluator()  # needs no further package
        return visualization.plot_param_importances(study, evaluator=evaluator)

    drawn = []
    plots = [visualization.plot_optimization_history, visualization.plot_intermediate_values]
    plots += [importances, visualization.plot_slice, visualization.plot_parallel_coordinate]
    for plot in [*plots, visualization.plot_timeline]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                drawn.append(plot(study))
        except (ValueError, RuntimeError):
            continue
    return drawn


def check_same_study(
    study: optuna.Study,
    scored: dict[str, Any],
    params_fn: Callable[[Any], Mapping[str, Any]],
    script: str,
) -> None:
    """Stop if the earlier trials of a study are not comparable with those of this call."""
    check_same_scores(study, scored)
    check_same_space(study, params_fn)
    study.set_user_attr(SCORED, scored)
    note_other_code(study, script)


def note_other_code(study: optuna.Study, script: str) -> None:
    """Say if trials of a study ran other code than this call would run."""
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    codes = study.user_attrs.get(CODES, []) if ended else []
    codes = list(dict.fromkeys([*codes, fingerprint(Path(script))]))
    study.set_user_attr(CODES, codes)
    if len(codes) > 1:
        what = f"note: {script}, or what it imports, has changed during study {study.study_name}"
        print(f"{what}: its trials may not be comparable", flush=True)


def check_same_scores(study: optuna.Study, scored: dict[str, Any]) -> None:
    """Stop if the earlier trials of a study were scored in another way."""
    direction = study.direction.name.lower()
    earlier = {**study.user_attrs.get(SCORED, {}), "direction": direction}
    for name, value in scored.items():
        if earlier.get(name, value) != value:
            raise other_study(study, f"has {name} {earlier.get(name)}, this call {value}")


def check_same_space(study: optuna.Study, params_fn: Callable[[Any], Mapping[str, Any]]) -> None:
    """Stop if the earlier trials of a study had other kinds of parameters, or runs of other length.

    Optuna allows other ranges of numbers, and more or fewer parameters.
    """
    earlier = [trial for trial in study.get_trials(deepcopy=False) if "params" in trial.user_attrs]
    if not earlier:
        return
    now = optuna.create_study().ask()  # of a study in memory: only to see the parameters
    params_fn(AnyTrial(now))
    for trial in earlier:
        for name, old in trial.distributions.items():
            new = now.distributions.get(name, old)
            try:
                check_distribution_compatibility(old, new)
            except ValueError:
                differs = f"has {name} {describe(old)}, this call {describe(new)}"
                raise other_study(study, differs) from None
        old_length = length_of(trial.user_attrs["params"])
        length = length_with(params_fn, {**now.params, **trial.params}, old_length)
        if length != old_length and trial.state != TrialState.FAIL:
            raise other_study(study, f"has {LENGTH} {old_length}, this call {length}")


def length_of(params: Mapping[str, Any]) -> Any:
    """The total timesteps among these settings, "unset" without."""
    return {name.replace("_", "-"): value for name, value in params.items()}.get(LENGTH, "unset")


def length_with(
    params_fn: Callable[[Any], Mapping[str, Any]], values: dict[str, Any], unknown: Any
) -> Any:
    """The total timesteps with these values of the parameters; `unknown` if it takes others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # values of an earlier call may be out of range
            return length_of(params_fn(AnyTrial(FixedTrial(values))))
    except ValueError:
        return unknown


def describe(space: BaseDistribution) -> str:
    """The values that a parameter can have."""
    if isinstance(space, CategoricalDistribution):
        return f"one of {', '.join(map(str, space.choices))}"
    assert isinstance(space, FloatDistribution | IntDistribution)
    kind = "a float" if isinstance(space, FloatDistribution) else "an int"
    return f"{kind} from {space.low} to {space.high}" + (", log=True" if space.log else "")


def other_study(study: optuna.Study, differs: str) -> BadInput:
    return BadInput(f"Tuner: study {study.study_name} {differs}: use another study_name")


def at_least_one(name: str, number: int) -> None:
    require(number >= 1, f"Tuner: {name} must be at least 1, got {number}")


def check_target_scores(target_scores: Mapping[str, Any]) -> None:
    """Stop unless every task has two different numbers; a single task may have None."""
    require(len(target_scores) > 0, "Tuner: target_scores names no task")
    for env_id, target in target_scores.items():
        require(
            target is None or is_range(target),
            f"Tuner: target_scores of {env_id} must be two different numbers, not {target}",
        )
    comparable = None not in target_scores.values()
    require(
        comparable or len(target_scores) == 1,
        "Tuner: several tasks need target_scores like [low, high], to be comparable",
    )


def is_range(target: Any) -> bool:
    """Whether these are two different numbers."""
    if not isinstance(target, list | tuple) or len(target) != 2:
        return False
    numbers = all(isinstance(end, Real) and math.isfinite(end) for end in target)
    return numbers and target[0] != target[1]
