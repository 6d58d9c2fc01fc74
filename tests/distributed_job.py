"""What each process of a job under `jax.distributed` does; it prints what came of each scenario as one line of JSON.

Run as `python distributed_job.py PROCESS PROCESSES PORT SCENARIO...`. All processes run the same scenarios in order.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tune_jax import CONFIG, TuneError, tune, tune_all
from tune_jax._jax import distributed_client
from tune_jax._lookup import SHARED, memory_of

PROCESS, PROCESSES, PORT = map(int, sys.argv[1:4])
PATIENT_S, IMPATIENT_S = 60.0, 1.0
X = np.ones(8, np.float32)
Outcome = Any


def scale(x: Any, *, b: int) -> Any:
    return x * b


def error_of(action: Callable[[], Any]) -> list[str] | None:
    """Type and message of the error that an action ends in."""
    try:
        action()
    except (TuneError, KeyboardInterrupt) as error:
        return [type(error).__name__, str(error)]
    return None


def in_sight(seconds: float, action: Callable[[], Any]) -> list[str] | None:
    """The same with another timeout."""
    CONFIG.agreement_timeout_s = seconds
    error = error_of(action)
    CONFIG.agreement_timeout_s = PATIENT_S
    return error


def meet(place: str) -> None:
    """Wait until all processes are here."""
    client, _, _ = distributed_client()
    client.wait_at_barrier(place, 60_000)


def opposite_rankings() -> Outcome:
    def work(x: Any, *, b: int) -> Any:
        steps = b if PROCESS == 0 else 400 - b
        return jax.lax.fori_loop(0, steps, lambda _, a: a * 1.0001, x)

    tuned = tune(work, {"b": [300, 100]})
    started = time.monotonic()
    tuned(X)
    return {"results": tuned.results.to_dict(), "best": tuned.optimal_hyperparams, "s": time.monotonic() - started}


def failure_on_one() -> Outcome:
    def fragile(x: Any, *, b: int) -> Any:
        if b == 1 and PROCESS == PROCESSES - 1:
            raise ValueError("no room")
        return x * b

    tuned = tune(fragile, {"b": [1, 2]})
    return [tuned(X).tolist(), tuned.results.to_dict()]


def failure_at_the_first_run() -> Outcome:
    def check(x: Any) -> Any:
        if PROCESS == PROCESSES - 1:
            raise MemoryError("none left")
        return x

    def fragile(x: Any, *, b: int) -> Any:
        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x) if b == 1 else x * b

    return tune(fragile, {"b": [1, 2]}).tune(X).to_dict()


def every_candidate_fails() -> Outcome:
    def never(x: Any, *, b: int) -> Any:
        jax.pure_callback(lambda x: 1 / 0, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.pure_callback(lambda x: {}["way"], jax.ShapeDtypeStruct(x.shape, x.dtype), x) * b

    tuned = tune(never, {"b": [1, 2]})
    errors = [error_of(lambda: tuned(X)), error_of(lambda: tuned.tune(X))]
    return {"kinds": [error[0] for error in errors], "message": errors[0][1], "rows": tuned.results.to_dict()}


def sample() -> Outcome:
    tuned = tune(scale, {"b": list(range(1, 50))}, sample_num=4, seed=PROCESS)
    return tuned.tune(X).to_dict()


def unnamed_choices() -> Outcome:
    tuned = tune(lambda x, *, act: act(x), {"act": [jnp.tanh, jnp.sin]})
    tuned(X)
    return [tuned.optimal_hyperparams["act"] in (jnp.tanh, jnp.sin), tuned.results.best.id]


def transformed() -> Outcome:
    tuned = tune(lambda x, *, b: (x * b / b).sum(), {"b": [2, 4]})
    x = jnp.ones((3, 4))
    eager = jax.grad(tuned)(x)
    jitted = jax.jit(jax.grad(tuned))(2 * x)
    batched = jax.jit(jax.vmap(tuned))(x)
    placed = tuned(jax.device_put(X, jax.local_devices()[-1]))
    looked_up = tuned.results_for(x[0])
    values = [float(eager.sum()), float(jitted.sum()), batched.tolist(), float(placed)]
    return [values, [results.to_dict() for results in memory_of(tuned._tunable).results.values()], looked_up is None]


def nested() -> Outcome:
    inner = tune(lambda x, *, b: x * b / b, {"b": [2, 4]})
    outer = tune(lambda x, *, c: inner(x) * c, {"c": [1, 3]})
    outer(X)
    return [inner.results.to_dict(), outer.results.to_dict()]


def threads_in_another_order() -> Outcome:
    first, second = (tune(scale, {"b": [number, 20 + number]}) for number in (1, 2))
    threads = [threading.Thread(target=tuned, args=(X,)) for tuned in (first, second)]
    for thread in threads if PROCESS == 0 else reversed(threads):
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return [first.results.to_dict(), second.results.to_dict()]


def functions_alike() -> Outcome:
    return [tune(scale, {"b": [5, 6]}).tune(X).to_dict() for _ in range(2)]


def made_anew() -> Outcome:
    def step(x: Any) -> Any:
        total = x.sum()
        tuned = tune(lambda y, *, b: y * total * b / b, {"b": [2, 4]})
        return tuned(x) + tune(lambda y, *, b: y * b / b, {"b": [2, 4]})(x)

    calls = tune_all(jax.value_and_grad(lambda x: step(x).sum()), X)
    value, slopes = jax.jit(jax.value_and_grad(lambda x: step(x).sum()))(X)
    return [[call.results.to_dict() for call in calls], float(value), slopes.tolist()]


def on_a_local_mesh() -> Outcome:
    tuned = tune(lambda x, *, b: jax.lax.psum(x * b / b, "i"), {"b": [2, 4]})
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("i",))
    over_devices = jax.shard_map(tuned, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
    x = np.arange(4 * len(jax.local_devices()), dtype=np.float32)
    return [float(jax.jit(over_devices)(x).sum() - x.sum()), tuned.results.to_dict()]


def forgotten() -> Outcome:
    tuned = tune(scale, {"b": [7, 8]})
    tuned.tune(X)
    if PROCESS == 1:
        SHARED.clear()
        memory_of(tuned._tunable).results.clear()
        tuned.tune(X)
    return [tuned.results.to_dict(), tune(scale, {"b": [7, 8]}).tune(X).to_dict()]


def spanning() -> Outcome:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    sharding = jax.NamedSharding(mesh, jax.P("i"))
    x = jax.make_array_from_callback((16,), sharding, lambda place: np.ones(16, np.float32)[place])
    tuned = tune(scale, {"b": [3, 4]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager = tuned(x)
    values = [shard.data.tolist() for shard in eager.addressable_shards]
    jitted = jax.jit(tuned)(x)
    asked = tune(scale, {"b": [3, 4]}, in_shardings=sharding)
    return {
        "warnings": [str(warning.message) for warning in caught],
        "values": values,
        "tune": error_of(lambda: tuned.tune(x)),
        "asked": error_of(lambda: asked.tune(np.ones(16, np.float32))),
        "under jit": tuned.results.to_dict(),
        "same": jitted.addressable_shards[0].data.tolist()[0] == tuned.optimal_hyperparams["b"],
    }


def example_error_on_one() -> Outcome:
    sizes = [8, 3] if PROCESS == 1 else [8, 8]
    tuned = tune(scale, {"b": [9, 10]}, example_args=lambda **_: (X[: sizes[-1]],))
    error = error_of(lambda: tuned.tune(X))
    sizes.pop()
    return [error, len(tuned.tune(X))]


def interrupt_on_one() -> Outcome:
    def interrupted(x: Any, *, b: int) -> Any:
        if b == 2 and PROCESS == 1:
            raise KeyboardInterrupt
        return x * b

    return error_of(lambda: tune(interrupted, {"b": [1, 2]}).tune(X))


def another_call() -> Outcome:
    tuned = tune(scale, {"b": [11, 12]})
    return in_sight(IMPATIENT_S, lambda: tuned.tune(np.ones(20 + PROCESS, np.float32)))


def another_function() -> Outcome:
    body = (lambda x, *, b: x * b) if PROCESS == 0 else (lambda x, *, b: x + b)
    return in_sight(IMPATIENT_S, lambda: tune(body, {"b": [1, 2]}).tune(X))


def late_caller() -> Outcome:
    tuned = tune(scale, {"b": [13, 14]})
    if PROCESS == 1:
        time.sleep(2.5 * IMPATIENT_S)
    started = time.monotonic()
    error = in_sight(IMPATIENT_S, lambda: tuned.tune(X))
    return {"error": error, "s": time.monotonic() - started, "again": len(tuned.tune(X))}


def slow_tuner() -> Outcome:
    def slow(x: Any, *, b: int) -> Any:
        if PROCESS == PROCESSES - 1:
            time.sleep(1.5 * IMPATIENT_S)
        return x * b

    return in_sight(IMPATIENT_S, lambda: tune(slow, {"b": [1, 2]}).tune(X))


def one_ends() -> Outcome:
    def ending(x: Any, *, b: int) -> Any:
        if PROCESS == 1:
            os._exit(0)
        return x * b

    return in_sight(IMPATIENT_S, lambda: tune(ending, {"b": [1, 2]}).tune(X))


def main() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, PROCESS)
    CONFIG.profiling_samples, CONFIG.max_rounds, CONFIG.agreement_timeout_s = 2, 4, PATIENT_S
    for name in sys.argv[4:]:
        meet(name)
        sys.stdout.write(json.dumps({name: globals()[name]()}) + "\n")
        sys.stdout.flush()
    if PROCESS == 0:
        # The coordinator lives in this process, and JAX ends the others when it goes.
        sys.stdin.read()
    # At a normal end JAX would wait for processes that have ended without a word.
    os._exit(0)


if __name__ == "__main__":
    main()
