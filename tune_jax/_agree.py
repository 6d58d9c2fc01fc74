"""Processes of one job agree on a tuning, by texts in a store that they share. No tuning in here, and no jax.

A `Round` is one attempt at one key. Process 0 leads. Each process says its words and hears those of others, until an
outcome is written; the first one stands, so that all processes see the same. Who cannot go on writes its error as the
outcome. While a process is in a round it gives signs of life, so that waiting for one that works takes as long as it
must, and waiting for one that has not come, or is gone, ends with an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from tune_jax._errors import AgreementError, NoCandidateError

LEADER = 0
# How long one wait lasts before errors and signs of life are looked for.
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 1.0
# How far apart signs of life are.
_LONGEST_PAUSE_S = 5.0


class OutOfReachError(ConnectionError):
    """The store cannot be reached."""


class Store(Protocol):
    """Texts by key that all processes of a job share; each method raises OutOfReachError where it cannot be reached."""

    @property
    def process(self) -> int:
        """The number of this process."""

    @property
    def processes(self) -> int:
        """How many processes there are."""

    def put(self, key: str, text: str) -> None:
        """Write, over what may be there."""

    def put_once(self, key: str, text: str) -> bool:
        """Write unless something is there; whether it was written."""

    def read(self, key: str) -> str | None:
        """The text, None if there is none."""

    def wait(self, key: str, seconds: float) -> str | None:
        """The text as soon as it is there, None if it is not within that time."""

    def list(self, folder: str) -> dict[str, str]:
        """All texts whose keys begin with `folder` and a slash."""

    def delete(self, folder: str) -> None:
        """Forget a key, and all that begin with it and a slash."""


@dataclasses.dataclass(frozen=True)
class Topic:
    """What a round is about: a name that is equal in all processes, and words for people."""

    name: str
    words: str


class Round:
    """One attempt of all processes at one topic, from entering to leaving the `with` block.

    `has_failed` says whether the outcome that stands is an error.

    Raises:
      AgreementError: a process gives no sign of life while it is waited for, another one ended the round with an
        error, or the store cannot be reached.
      NoCandidateError: another process ended the round with it.
    """

    def __init__(self, store: Store, topic: Topic, *, timeout_s: float) -> None:
        self._store = store
        self._topic = topic
        self._timeout_s = timeout_s
        self._folder = f"tune_jax/rounds/{topic.name}"
        self._outcome = f"{self._folder}/outcome"
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="tune-jax-heartbeat", daemon=True)
        self.has_failed = False

    def __enter__(self) -> Round:
        self._beating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._beating.join(_LONGEST_WAIT_S)
        with contextlib.suppress(OutOfReachError):
            if error is not None:
                self._tell(error)
            if self._store.process == LEADER:
                self._store.delete(f"{self._folder}/said")
            self._store.delete(self._sign(self._store.process))
        if isinstance(error, OutOfReachError):
            raise self._out_of_reach(error) from error

    def say(self, word: str, text: str = "") -> None:
        """Tell the others something."""
        self._store.put(self._said(word, self._store.process), text)

    def hear(self, word: str, process: int) -> str:
        """Wait until `process` says `word`, and return the text."""
        return self._wait(self._said(word, process), process)

    def hear_others(self, word: str) -> dict[int, str]:
        """Wait until every other process says `word`; the texts by process."""
        others = [process for process in range(self._store.processes) if process != self._store.process]
        return {process: self.hear(word, process) for process in others}

    def conclude(self, text: str) -> str:
        """Write the outcome, and return the one that stands."""
        self._store.put_once(self._outcome, json.dumps({"text": text}))
        return self.hear_outcome()

    def hear_outcome(self) -> str:
        """Wait for the outcome."""
        return self._read_outcome(self._wait(self._outcome, LEADER))

    def find_outcome(self) -> str | None:
        """The outcome if there is one already."""
        found = self._store.read(self._outcome)
        return None if found is None else self._read_outcome(found)

    def _said(self, word: str, process: int) -> str:
        return f"{self._folder}/said/{word}/{process}"

    def _sign(self, process: int) -> str:
        return f"{_signs(process)}/{self._topic.name}"

    def _beat(self) -> None:
        """Give signs of life until the round is left; if the store is gone, whoever waits finds out."""
        pause_s = min(self._timeout_s / 4, _LONGEST_PAUSE_S)
        with contextlib.suppress(OutOfReachError):
            for count in itertools.count():
                self._store.put(self._sign(self._store.process), f"{count} {self._topic.words}")
                if self._left.wait(pause_s):
                    break

    def _wait(self, key: str, process: int) -> str:
        wait_s = _FIRST_WAIT_S
        seen: dict[str, str] = {}
        sign, since = None, time.monotonic()
        while (text := self._store.wait(key, wait_s)) is None:
            wait_s = min(2 * wait_s, self._timeout_s / 4, _LONGEST_WAIT_S)
            self.find_outcome()
            signs = self._store.list(_signs(process))
            # Where it was seen last says more than that it has gone on.
            seen = signs or seen
            if signs.get(self._sign(process)) != sign:
                sign, since = signs.get(self._sign(process)), time.monotonic()
            elif time.monotonic() - since >= self._timeout_s:
                raise self._nothing_heard(process, seen)
        return text

    def _tell(self, error: BaseException) -> None:
        """Make an error the outcome, unless there is one."""
        told = {"process": self._store.process, "type": type(error).__name__, "message": str(error)}
        self._store.put_once(self._outcome, json.dumps({"error": told}))
        self.has_failed = "error" in json.loads(self._store.read(self._outcome) or "{}")

    def _read_outcome(self, packed: str) -> str:
        outcome = json.loads(packed)
        if "error" in outcome:
            raise self._told_error(**outcome["error"])
        return str(outcome["text"])

    def _told_error(self, *, process: int, type: str, message: str) -> Exception:
        """What to raise here for an error on another process."""
        alike = {NoCandidateError.__name__: NoCandidateError, AgreementError.__name__: AgreementError}
        if type in alike:
            return alike[type](message)
        words = f"{type}: {message}" if message else type
        return AgreementError(f"process {process} could not tune [{self._topic.words}]: {words}")

    def _nothing_heard(self, process: int, seen: Mapping[str, str]) -> AgreementError:
        return AgreementError(
            f"process {self._store.process} waited {self._timeout_s:g} s for process {process} to tune together "
            f"[{self._topic.words}]. {self._whereabouts(process, seen)} Every process must make the same tuned calls: "
            "let all make this one, or give its hyperparameters in the call, so that it is not tuned. If that process "
            "is only late, raise CONFIG.agreement_timeout_s."
        )

    def _whereabouts(self, process: int, seen: Mapping[str, str]) -> str:
        calls = sorted({text.partition(" ")[2] for text in seen.values()})
        if self._sign(process) in seen:
            return "It came, but gives no more signs of life: it has ended, or hangs."
        if self._topic.words in calls:
            return "It came to a call that reads the same, but whose function, grid or static values differ."
        if calls:
            return f"It came to another call: {' and '.join(f'[{call}]' for call in calls)}."
        return "It came to no tuned call: it went another way, is late, or has ended."

    def _out_of_reach(self, error: OutOfReachError) -> AgreementError:
        return AgreementError(
            f"process {self._store.process} cannot reach the coordinator of jax.distributed, which process {LEADER} "
            f"runs, to tune [{self._topic.words}]: {error}. That process may have ended; see what it printed last."
        )


def _signs(process: int) -> str:
    return f"tune_jax/signs/{process}"
