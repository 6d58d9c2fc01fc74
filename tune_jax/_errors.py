"""The exception tree: every error that the library raises on purpose."""

from __future__ import annotations


class TuneError(Exception):
    """Base of all errors that tune-jax raises on purpose."""


class HyperparamsError(TuneError, ValueError):
    """A grid of hyperparameters that cannot be used."""


class HyperparamsTypeError(TuneError, TypeError):
    """A grid, or one of its names or values, of the wrong type."""


class ArgumentError(TuneError, TypeError):
    """An argument of a tuned call that cannot be used."""


class OptionError(TuneError, ValueError):
    """An option of `tune` with a value that it does not take."""


class ExampleError(TuneError, ValueError):
    """Example arguments that do not fit the call."""


class NoCandidateError(TuneError, ValueError):
    """Every candidate failed."""


class AgreementError(TuneError, RuntimeError):
    """The processes of one job could not agree on a tuning."""


class ProfileError(TuneError, RuntimeError):
    """Device time could not be read from a trace."""


class ResultsError(TuneError, ValueError):
    """Samples that cannot be ranked, or stored results that cannot be read."""


class CallSiteError(TuneError, LookupError):
    """A call site where a program makes no tuned call, or several."""
