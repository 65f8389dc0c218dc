"""Learning from replay memory in JAX: a script defines an update, this compiles and runs it.

An update is a pure function. It takes the state of learning (a NamedTuple of arrays with a `key`)
and a random batch, and returns the next state and a list of metrics: one dict per gradient step,
whose means are logged. `Training` makes one update per call, `BackgroundTraining` several while the
loop acts. Both keep the state on the device, reuse its memory for the next state (donation), and
are part of checkpoints.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from cleanrl_utils.errors import require
from cleanrl_utils.speed.jax_acting import in_numpy
from cleanrl_utils.speed.jax_tools import Params, arrays_of, is_key, with_arrays


class Training:
    """The state of learning: init() returns the first, update(state, batch, *rest) the next and its
    metrics. `rest` is whatever else the script passes to each update."""

    def __init__(self, init: Callable, update: Callable, memory: Any, batch_size: int, *rest: Any):
        self._update_state = update
        self.memory = memory
        self.batch_size = batch_size
        state = jax.jit(init)()
        self._packing = Packing(state)
        self._packed = self._packing.pack(state)
        self._names = self._metric_names(state, *rest)
        self._no_metrics = jnp.zeros((2, len(self._names)))
        self._sums = self._no_metrics  # row 0: sums of the metrics; row 1: their counts
        self._update = jax.jit(self._update_packed, donate_argnums=0)
        self._changes: dict[Callable, Callable] = {}

    @property
    def state(self) -> Any:
        """A copy of the state of learning, as NumPy arrays except its key."""
        state = self._packing.unpack(self._packed)
        return jax.tree.map(lambda x: x if is_key(x) else np.array(x), state)

    def update(self, *rest: Any) -> None:
        """Make one update, with a batch from the memory."""
        inputs = self._packed, self._sums, self.memory.replay
        self._packed, self._sums = self._update(*inputs, *rest)

    def change(self, function: Callable) -> None:
        """Replace the state by function(state), say by one with a new target network."""
        if function not in self._changes:

            def changed(packed: Any) -> Any:
                return self._packing.pack(function(self._packing.unpack(packed)))

            self._changes[function] = jax.jit(changed, donate_argnums=0)
        self._packed = self._changes[function](self._packed)

    def policy(self, function: Callable) -> Callable[[np.ndarray], np.ndarray]:
        """function(state, obs) as a fast function of a NumPy obs; it uses the current state."""
        if not self._packing.enabled:
            on_cpu = in_numpy(function)
            return lambda obs: on_cpu(self._packed, obs)
        compiled = jax.jit(lambda packed, obs: function(self._packing.unpack(packed), obs))
        return lambda obs: np.asarray(compiled(self._packed, obs))

    def metrics(self) -> dict[str, float]:
        """Means of the metrics since the last call, without those that had no update."""
        sums, counts = np.asarray(self._sums)
        self._sums = self._no_metrics
        means = {}
        for name, total, count in zip(self._names, sums, counts, strict=True):
            if count:
                means[name] = total / count
        return means

    def state_dict(self) -> dict[str, list[np.ndarray]]:
        return {"arrays": arrays_of((self._packed, self._sums))}

    def load_state_dict(self, saved: dict[str, list[np.ndarray]]) -> None:
        self._packed, self._sums = with_arrays((self._packed, self._sums), saved["arrays"])

    def _draw(self, replay: Any, key: Array) -> tuple:
        return (self.memory.sample(replay, key, self.batch_size),)

    def _metric_names(self, state: Any, *rest: Any) -> list[str]:
        """Names of all metrics: those of an update whose optional parts are all due, as is the
        default of its argument `due`."""
        names: list[str] = []

        def trace(state: Any, replay: Any) -> None:
            drawn = self._draw(replay, state.key)
            for metrics in self._update_state(state, *drawn, *rest)[1]:
                names.extend(name for name in metrics if name not in names)

        jax.eval_shape(trace, state, self.memory.replay)
        return names

    def _update_packed(self, packed: Any, sums: Array, replay: Any, *rest: Any) -> tuple:
        state = self._packing.unpack(packed)
        key, draw_key = random.split(state.key)
        drawn = self._draw(replay, draw_key)
        state, logged = self._update_state(state._replace(key=key), *drawn, *rest)
        return self._packing.pack(state), self._add(sums, logged)

    def _add(self, sums: Array, logged: list[dict[str, Array]]) -> Array:
        """Add the metrics of one update, a dict per gradient step, to the sums and counts."""
        totals = []
        counts = []
        for name in self._names:
            values = [metrics[name] for metrics in logged if name in metrics]
            totals.append(sum(values, jnp.zeros(())))
            counts.append(float(len(values)))
        return sums + jnp.stack([jnp.stack(totals), jnp.array(counts)])


class BackgroundTraining(Training):
    """Several updates in one program, in the background, while the loop acts.

    Each update is update(state, batches, noise, due). `batches` are two independent ones, for the
    critics and the policy. `noise` is standard normal, (noises, batch_size, *action_shape). `due`
    says for each optional part of the update, such as that of the policy, whether it is due.
    XLA launches GPU kernels one by one, so a thread does it. A GPU draws the random numbers of all
    updates as fast as those of one, so they are drawn together.
    """

    def __init__(self, init: Callable, update: Callable, memory: Any, batch_size: int, noises: int):
        self.noises = noises
        super().__init__(init, update, memory, batch_size)
        self._actor_packing = Packing(super().state.actor.params)
        self._program = jax.jit(self._updates_packed, static_argnums=4, donate_argnums=(0, 2))
        self._thread = ThreadPoolExecutor(1)
        self._launched: Future | None = None  # returns arrays that may still be computed
        self._take_actor()

    def start(self, *due: Sequence[bool]) -> Params:
        """Insert the collected steps into the memory, then make updates, without waiting for them.
        Each argument is for one optional part and says for every update whether it is due; their
        common length is the number of updates. Returns the actor's parameters as the updates before
        left them: a GPU goes on to the new ones while these are fetched."""
        schedule = tuple(zip(*due, strict=True))
        collected = self.memory.take_collected()
        self._settle()
        inputs = self._packed, self._sums, self.memory.replay, collected
        actor = self._actor
        self._launched = self._thread.submit(self._program, *inputs, schedule)
        return self._actor_packing.fetch(actor)

    def wait(self) -> Params:
        """Wait for all updates; returns the actor's parameters as NumPy arrays."""
        self._settle()
        return self._actor_packing.fetch(self._actor)

    def _settle(self) -> None:
        """Take over what the program that was started last returns, computed or not."""
        if self._launched is not None:
            self._packed, self._sums, self.memory.replay, self._actor = self._launched.result()
            self._launched = None

    def _take_actor(self) -> None:
        """The actor's parameters before the first program: a copy, since programs reuse memory."""
        self._actor = self._actor_packing.pack(super().state.actor.params)

    @property
    def state(self) -> Any:
        self._settle()
        return super().state

    def metrics(self) -> dict[str, float]:
        self._settle()
        return super().metrics()

    def state_dict(self) -> dict[str, list[np.ndarray]]:
        self._settle()
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, list[np.ndarray]]) -> None:
        self._settle()
        super().load_state_dict(saved)
        self._take_actor()

    def _updates_packed(
        self, packed: Any, sums: Array, replay: Any, collected: Array, schedule: tuple
    ) -> tuple:
        state = self._packing.unpack(packed)
        replay = self.memory.insert(replay, collected)
        key, draw_key = random.split(state.key)
        drawn = self._draw_many(replay, draw_key, len(schedule))

        def update(state: Any, sums: Array, drawn: Any, due: tuple) -> tuple[Any, Array]:
            state, logged = self._update_state(state, *self._gather(replay, *drawn), due)
            return state, self._add(sums, logged)

        state, sums = scan_updates(update, (state._replace(key=key), sums), schedule, drawn)
        actor = self._actor_packing.pack(state.actor.params)
        return self._packing.pack(state), sums, replay, actor

    def _draw_many(self, replay: Any, key: Array, updates: int) -> tuple[Array, Array]:
        """Indices of two batches, (updates, 2, batch_size), and noise, for all updates."""
        shape = updates, self.noises, self.batch_size, *self.memory.action_shape
        if self.noises == 0:
            noise_key = key
        else:
            key, noise_key = random.split(key)
        indices = self.memory.sample_indices(replay, key, updates, 2, self.batch_size)
        return indices, random.normal(noise_key, shape)

    def _gather(self, replay: Any, indices: Array, noise: Array) -> tuple:
        return [self.memory.gather(replay, i) for i in indices], noise

    def _draw(self, replay: Any, key: Array) -> tuple:
        indices, noise = self._draw_many(replay, key, 1)
        return self._gather(replay, indices[0], noise[0])


def steps_per_iteration(args: Any, *frequencies: str) -> int:
    """Steps of all environments per iteration, that is per start of a BackgroundTraining.

    Refuses settings below it, and a frequency of which it is neither multiple nor divisor: the
    schedule of updates would differ between iterations, and each schedule is compiled anew."""
    steps = args.learn_every * args.num_envs
    for flag in ("total-timesteps", "learning-starts", "buffer-size"):
        enough = getattr(args, flag.replace("-", "_")) >= steps
        require(enough, f"--{flag} must be at least --learn-every x --num-envs = {steps}")
    names = " and ".join(f"--{flag}" for flag in frequencies)
    for flag in frequencies:
        frequency = getattr(args, flag.replace("-", "_"))
        fits = steps % frequency == 0 or frequency % steps == 0
        what = f"{steps} (--learn-every x --num-envs), or be a multiple of it"
        require(fits, f"{names} must divide {what}")
    return steps


def scan_updates(update: Callable, carry: tuple, due: tuple, drawn: Any) -> tuple:
    """carry = update(*carry, drawn[i], due[i]) for each i; `due` is known when this is compiled.
    Where `due` repeats itself it becomes a loop, whose body is compiled once."""
    begin = 0
    while begin < len(due):
        period, times = repetition(due[begin:])
        end = begin + period * times
        pattern = due[begin : begin + period]
        drawn_here = jax.tree.map(lambda x, here=slice(begin, end): x[here], drawn)
        carry = scan_pattern(update, carry, pattern, times, drawn_here)
        begin = end
    return carry


def scan_pattern(update: Callable, carry: tuple, pattern: tuple, times: int, drawn: Any) -> tuple:
    """One update for each entry of `pattern`, all of it `times` times; `drawn` has their inputs."""
    period = len(pattern)

    def updates_of_pattern(carry: tuple, drawn: Any) -> tuple[tuple, None]:
        for i, due in enumerate(pattern):
            drawn_i = jax.tree.map(lambda x, i=i: x[i], drawn)
            carry = update(*carry, drawn_i, due)
        return carry, None

    drawn = jax.tree.map(lambda x: x.reshape(times, period, *x.shape[1:]), drawn)
    carry, _ = jax.lax.scan(updates_of_pattern, carry, drawn)
    return carry


def repetition(due: tuple) -> tuple[int, int]:
    """Length of the pattern that `due` begins with and repeats, and how many times it stands there;
    of all such patterns the one that covers the most."""
    best_period = 1
    best_covered = 0
    for period in range(1, len(due) // 2 + 1):
        times = times_at_start(due, period)
        if times > 1 and period * times > best_covered:
            best_period = period
            best_covered = period * times
    return best_period, times_at_start(due, best_period)


def times_at_start(due: tuple, period: int) -> int:
    """How many times in a row `due` begins with its first `period` entries."""
    most = len(due) // period
    for times in range(most):
        if due[times * period : (times + 1) * period] != due[:period]:
            return times
    return most


class Packing:
    """All arrays of a tree as one vector for each data type.

    A GPU program takes some microseconds per array that it is given: fifty parameters and moments
    would take as long as an update. On a CPU the copies cost more, and the tree stays as it is.
    """

    @staticmethod
    def enabled_by_default() -> bool:
        return jax.default_backend() != "cpu"

    def __init__(self, tree: Any):
        self.enabled = self.enabled_by_default()
        leaves, self.structure = jax.tree.flatten(tree)
        self.types = [str(x.dtype) for x in leaves]
        self.shapes = [x.shape for x in leaves]

    @partial(jax.jit, static_argnums=0)
    def pack(self, tree: Any) -> Any:
        if not self.enabled:
            return tree
        vectors: dict[str, list[Array]] = {kind: [] for kind in self.types}
        for kind, leaf in zip(self.types, jax.tree.leaves(tree), strict=True):
            vectors[kind].append(leaf.reshape(-1))
        return {kind: jnp.concatenate(parts) for kind, parts in vectors.items()}

    @partial(jax.jit, static_argnums=0)
    def unpack(self, packed: Any) -> Any:
        return self._views(packed) if self.enabled else packed

    def fetch(self, packed: Any) -> Any:
        """The tree with NumPy arrays, fetched from the device as few vectors."""
        packed = jax.device_get(packed)
        return self._views(packed) if self.enabled else packed

    def _views(self, vectors: dict[str, Any]) -> Any:
        leaves = []
        starts = dict.fromkeys(self.types, 0)
        for kind, shape in zip(self.types, self.shapes, strict=True):
            start = starts[kind]
            starts[kind] = start + prod(shape)
            leaves.append(vectors[kind][start : starts[kind]].reshape(shape))
        return jax.tree.unflatten(self.structure, leaves)
