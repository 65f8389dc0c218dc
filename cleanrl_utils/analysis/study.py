"""An Optuna study: open it, and show it as one web page."""

import html
import math
import time
import warnings
from numbers import Real
from typing import Any

from cleanrl_utils.errors import BadInput, missing_package, require

try:
    import optuna
    from optuna.trial import Trial, TrialState
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

SCORED = "scored"  # key in the study of what its scores are
ATTEMPTS = 4  # to open a study: several machines may create its tables at once


class AnyTrial:
    """Optuna's trial, also with the names that suggest_float had in earlier versions."""

    def __init__(self, trial: Trial):
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
            return optuna.create_study(storage=storage, load_if_exists=True, **settings)
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


def check_same_scores(study: optuna.Study, scored: dict[str, Any]) -> None:
    """Stop if the earlier trials of a study were scored in another way."""
    direction = study.direction.name.lower()
    earlier = {**study.user_attrs.get(SCORED, {}), "direction": direction}
    for name, value in scored.items():
        differs = f"has {name} {earlier.get(name)}, this call {value}: use another study_name"
        same = earlier.get(name, value) == value
        require(same, f"Tuner: study {study.study_name} {differs}")
    study.set_user_attr(SCORED, scored)


def is_range(target: Any) -> bool:
    """Whether these are two different numbers."""
    if not isinstance(target, list | tuple) or len(target) != 2:
        return False
    numbers = all(isinstance(end, Real) and math.isfinite(end) for end in target)
    return numbers and target[0] != target[1]
