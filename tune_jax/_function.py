"""The tuned function: how it is called, and what it shows of its tunings."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tune_jax._binding import make_call
from tune_jax._call import with_hints
from tune_jax._entry import WrongEntryError, make_entry
from tune_jax._jax import shaped, trace_state_clean
from tune_jax._leaves import is_concrete
from tune_jax._lookup import key_of, memory_of, tune_once
from tune_jax._primitive import HANDED, bind_call
from tune_jax._records import Tunable
from tune_jax._results import Results


class TunedFunction:
    """A function that tunes itself at its first call for new arguments and runs the winner after that.

    Attributes:
      timing_results: dict from candidate id to an object with `hyperparams`, `t_mean` and `t_std` in seconds,
        fastest first, of the latest tuning; empty before the first.
      optimal_hyperparams: dict with the fastest hyperparameters of the latest tuning; empty before the first.
    """

    def __init__(self, tunable: Tunable) -> None:
        functools.update_wrapper(self, tunable.function, updated=())
        self.__name__ = tunable.name
        self._tunable = tunable
        self._entry = make_entry(tunable)
        self.timing_results = memory_of(tunable).timing_results
        self.optimal_hyperparams = memory_of(tunable).optimal_hyperparams

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the winner for these arguments; tune first if nobody has."""
        if not trace_state_clean():
            call, inputs = make_call(self._tunable, args, kwargs)
            return bind_call(with_hints(call, inputs), inputs)
        before, HANDED.arguments = HANDED.arguments, (args, kwargs)
        try:
            return self._entry.run(*args, **kwargs)
        except (WrongEntryError, TypeError, ValueError):
            self._widen_entry(args, kwargs)
        finally:
            HANDED.arguments = before
        return self(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a method; the instance is then the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<tuned function {self.__name__}>"

    @property
    def results(self) -> Results | None:
        """The results of the latest tuning, None before the first."""
        return memory_of(self._tunable).latest

    def tune(self, /, *args: Any, **kwargs: Any) -> Results:
        """Tune for these arguments without running the function; `jax.ShapeDtypeStruct`s will do.

        Returns the results at hand if these arguments have been tuned for already.
        """
        call, inputs = make_call(self._tunable, args, kwargs)
        results = tune_once(call, _abstract(inputs), _concrete(inputs))
        assert results is not None, "only a call inside the function itself meets its own tuning"
        return results

    def results_for(self, /, *args: Any, **kwargs: Any) -> Results | None:
        """The results that calls with these arguments go by, None if they have not been tuned for."""
        call, inputs = make_call(self._tunable, args, kwargs)
        return memory_of(self._tunable).results.get(key_of(call, _abstract(inputs), _concrete(inputs)))

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower as a jitted function does; tunes if nobody has, and holds the winner."""
        lowered: jax.stages.Lowered = self._stage("lower", args, kwargs)
        return lowered

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace as a jitted function does; tunes only what is differentiated inside."""
        traced: jax.stages.Traced = self._stage("trace", args, kwargs)
        return traced

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the result as `jax.ShapeDtypeStruct`s; never tunes."""
        return self._stage("eval_shape", args, kwargs)

    def _stage(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before, HANDED.arguments = HANDED.arguments, (args, kwargs)
        try:
            jitted, staged_args, staged_kwargs = self._entry.stage(args, kwargs)
            return getattr(jitted, method)(*staged_args, **staged_kwargs)
        except (WrongEntryError, TypeError, ValueError):
            self._widen_entry(args, kwargs)
        finally:
            HANDED.arguments = before
        return self._stage(method, args, kwargs)

    def _widen_entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make room for static arguments that the entry did not expect; what it did expect is raised again."""
        wider = self._entry.widened(args, kwargs)
        if wider is None:
            raise
        self._entry = wider


def _abstract(inputs: Sequence[Any]) -> list[Any]:
    return [shaped(jax.typeof(value)) for value in inputs]


def _concrete(inputs: Sequence[Any]) -> list[Any]:
    return [value if is_concrete(value) else None for value in inputs]
