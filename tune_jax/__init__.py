"""tune-jax: tune the hyperparameters of JAX functions by timing every choice on the device."""

from tune_jax._config import CONFIG
from tune_jax._errors import TuneError
from tune_jax._function import TunedFunction
from tune_jax._program import tune_all
from tune_jax._record import record
from tune_jax._records import Failure
from tune_jax._report import tabulate, to_df
from tune_jax._results import ProgramResults, Results, TunedCall
from tune_jax._session import logger
from tune_jax._tune import tune

tune_logger = logger

__all__ = [
    "CONFIG",
    "Failure",
    "ProgramResults",
    "Results",
    "TuneError",
    "TunedCall",
    "TunedFunction",
    "logger",
    "record",
    "tabulate",
    "to_df",
    "tune",
    "tune_all",
    "tune_logger",
]
