"""The tuned function: how it is called, and what it shows of its tunings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tune_jax._alone import Alone, stand_alone
from tune_jax._binding import make_call
from tune_jax._call import Call, with_hints
from tune_jax._entry import WrongEntryError, make_entry
from tune_jax._hoist import hoist
from tune_jax._jax import Tracer, shaped, trace_state_clean
from tune_jax._lookup import key_of, known_results, memory_of, tune_once
from tune_jax._primitive import HANDED, bind_call
from tune_jax._records import Tunable
from tune_jax._results import Results
from tune_jax._shardings import committed_devices


class TunedFunction:
    """A function that tunes itself at its first call for new arguments and runs the winner after that.

    What an equal tuned function of this process was tuned for counts as its own from its first such call on.

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
        return self if instance is None else TunedMethod(self, instance)

    def __copy__(self) -> TunedFunction:
        """A tuned function is what it is by identity, as a jitted one is."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedFunction:
        """A tuned function is what it is by identity, as a jitted one is."""
        return self

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
        call, inputs = self._bind(args, kwargs)
        alone, known = _stand_alone(call, inputs)
        results = tune_once(alone.call, alone.avals, known)
        assert results is not None, "only a call inside the function itself meets its own tuning"
        return results

    def results_for(self, /, *args: Any, **kwargs: Any) -> Results | None:
        """The results that calls with these arguments go by, None if they have not been tuned for."""
        call, inputs = self._bind(args, kwargs)
        alone, known = _stand_alone(call, inputs)
        return known_results(memory_of(self._tunable), key_of(alone.call, alone.avals, known))

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

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Sequence[Any]]:
        call, inputs = make_call(self._tunable, args, kwargs)
        return (call, inputs) if trace_state_clean() else hoist(call, inputs)

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


class TunedMethod:
    """A tuned function bound to an instance, which goes first into each of its calls."""

    def __init__(self, function: TunedFunction, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's signature without its first parameter."""
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __getattr__(self, name: str) -> Any:
        """What the tuned function has; what takes a call's arguments gets the instance first."""
        if name == "__wrapped__":
            raise AttributeError("a bound method wraps nothing: the function inside takes the instance too")
        value = getattr(self.__func__, name)
        return functools.partial(value, self.__self__) if name in _TAKES_ARGUMENTS else value

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the tuned function with the instance."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """As bound methods: the same function of the same instance."""
        return isinstance(other, TunedMethod) and (self.__func__, id(self.__self__)) == (
            other.__func__,
            id(other.__self__),
        )

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"


_TAKES_ARGUMENTS = {"tune", "results_for", "lower", "trace", "eval_shape"}


def _stand_alone(call: Call, inputs: Sequence[Any]) -> tuple[Alone, list[Any]]:
    """The call on its own, and what is known of its inputs: values, and structs for their shardings."""
    known = [None if isinstance(value, Tracer) else value for value in inputs]
    return stand_alone(call, [shaped(jax.typeof(value)) for value in inputs], committed_devices(known)), known
