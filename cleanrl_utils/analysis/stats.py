"""Statistics of sets of runs with few runs per task, in NumPy.

A set is a list of arrays, one per task, each with the final scores of its runs. Intervals come from
the stratified bootstrap: runs are drawn again with replacement, within their own task. See Agarwal
et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021.
"""

import math
from collections.abc import Sequence

import numpy as np

Set = Sequence[np.ndarray]

RESAMPLES = 50_000
CONFIDENCE = 0.95
CHUNK = 4_000_000  # numbers per batch of resamples: limits the memory


def interval(samples: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of bootstrap samples."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def iqm(scores: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Interquartile mean over the last axis: mean of the middle half, robust to outliers.

    Without weights, a quarter of the runs (rounded down) is left out on either side.
    """
    if weights is None:
        ordered = np.sort(scores, axis=-1)
        cut = scores.shape[-1] // 4
        return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)
    order = np.argsort(scores, axis=-1)
    edges = np.cumsum((weights / weights.sum())[order], axis=-1)
    inside = np.diff(np.clip(edges, 0.25, 0.75), axis=-1, prepend=0.25)
    return (np.take_along_axis(scores, order, -1) * inside).sum(-1) / 0.5


def task_weights(runs: Set) -> np.ndarray | None:
    """Weights that make all tasks count the same; None if all have equally many runs."""
    sizes = np.array([len(scores) for scores in runs])
    return None if len(set(sizes)) == 1 else np.repeat(1 / sizes, sizes)


def set_iqm(runs: Set) -> float:
    return float(iqm(np.concatenate(runs), task_weights(runs)))


def bootstrap_iqm(runs: Set, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """The set's interquartile mean in each of `resamples` stratified resamplings."""
    random = np.random.default_rng(seed)
    weights = task_weights(runs)
    total = sum(len(scores) for scores in runs)
    chunk = max(1, CHUNK // total)
    out = []
    for start in range(0, resamples, chunk):
        count = min(chunk, resamples - start)
        drawn = [scores[random.integers(0, len(scores), (count, len(scores)))] for scores in runs]
        out.append(iqm(np.concatenate(drawn, axis=1), weights))
    return np.concatenate(out)


def iqm_curve(curves: Set, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The interquartile mean at each point of learning curves, (runs, points) for each task, and
    its pointwise interval."""
    at_each_point = list(zip(*(task.T for task in curves), strict=True))
    means = [set_iqm(runs) for runs in at_each_point]
    bounds = [interval(bootstrap_iqm(runs, seed, 1000)) for runs in at_each_point]
    return np.array(means), *np.transpose(bounds)


def difference(
    old: Set, new: Set, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float]]:
    """Interquartile mean of `new` minus that of `old`, and its interval."""
    samples = bootstrap_iqm(new, seed + 1, resamples) - bootstrap_iqm(old, seed, resamples)
    return set_iqm(new) - set_iqm(old), interval(samples)


def profile(runs: Set, levels: np.ndarray) -> np.ndarray:
    """Performance profile: the fraction of runs that score above each level, mean over tasks."""
    fractions = [(scores[:, None] > levels).mean(0) for scores in runs]
    return np.mean(fractions, axis=0)


def profile_interval(
    runs: Set, levels: np.ndarray, seed: int = 0, resamples: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """Pointwise interval of the performance profile."""
    random = np.random.default_rng(seed)
    total: np.ndarray | float = 0.0
    for scores in runs:
        n = len(scores)
        counts = random.multinomial(n, np.full(n, 1 / n), resamples)  # how often each run is drawn
        total = total + counts @ (scores[:, None] > levels) / n
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(total) / len(runs), [tail, 1 - tail], axis=0)
    return low, high


def optimality_gap(
    runs: Set, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float]]:
    """How far runs stay below a score of 1, mean over tasks; a score above 1 counts as 1."""
    random = np.random.default_rng(seed)
    gaps = [np.maximum(1 - scores, 0) for scores in runs]
    samples = np.zeros(resamples)
    for gap in gaps:
        n = len(gap)
        samples += random.multinomial(n, np.full(n, 1 / n), resamples) @ gap / n
    return float(np.mean([gap.mean() for gap in gaps])), interval(samples / len(runs))


def tolerance(count: int, share: float = 0.9, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """(k, share) of the tolerance interval from the k-th lowest to the k-th highest of `count`.

    With this confidence the interval contains at least `share` of all runs of the same kind, of
    whatever distribution (Wilks, 1941). Few runs allow only the range from the lowest to the
    highest, k = 1, and a smaller share, which is returned. See Patterson et al., "Empirical Design
    in Reinforcement Learning", 2024.
    """
    k = 1
    while 2 * (k + 1) < count and contains(count, k + 1, share) >= confidence:
        k += 1
    if contains(count, k, share) >= confidence:
        return k, share
    low, high = 0.0, share  # bisection: the confidence falls with the share
    for _ in range(60):
        middle = (low + high) / 2
        if contains(count, 1, middle) >= confidence:
            low = middle
        else:
            high = middle
    return 1, low


def contains(count: int, k: int, share: float) -> float:
    """The probability that the k-th lowest to the k-th highest of `count` contain a share."""
    between = count + 1 - 2 * k  # spans of the distribution between the two
    terms = (math.comb(count, i) * share**i * (1 - share) ** (count - i) for i in range(between))
    return sum(terms)


def improvement(
    old: Set, new: Set, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float]]:
    """Probability that a run of `new` beats a run of `old` on the same task; ties count half."""
    random = np.random.default_rng(seed)
    points = []
    samples = np.zeros(resamples)
    for a, b in zip(old, new, strict=True):
        wins = (b[:, None] > a) + 0.5 * (b[:, None] == a)
        points.append(wins.mean())
        drawn_a = random.multinomial(len(a), np.full(len(a), 1 / len(a)), resamples)
        drawn_b = random.multinomial(len(b), np.full(len(b), 1 / len(b)), resamples)
        samples += ((drawn_b @ wins) * drawn_a).sum(1) / wins.size
    return float(np.mean(points)), interval(samples / len(points))


def regressed(
    old: Set, new: Set, smallest: float = 0.0, seed: int = 0, resamples: int = RESAMPLES
) -> bool:
    """Whether `new` is significantly worse than `old`, and by more than `smallest`.

    Both must hold: the 95% interval of the difference of the interquartile means lies below zero,
    and the 95% intervals of the two sets do not overlap. The first alone would flag one of forty
    comparisons of identical code, too many for a check of every change.
    """
    before = bootstrap_iqm(old, seed, resamples)
    after = bootstrap_iqm(new, seed + 1, resamples)
    apart = interval(after)[1] < interval(before)[0]
    below = interval(after - before)[1] < 0
    return bool(apart and below and set_iqm(old) - set_iqm(new) > smallest)


def mean_and_std(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """Mean ± sample standard deviation over seeds; for one seed the mean alone."""
    numbers = np.asarray(values, float)
    mean = f"{numbers.mean():.{digits}f}"
    return f"{mean} ± {numbers.std(ddof=1):.{digits}f}" if len(numbers) > 1 else mean
