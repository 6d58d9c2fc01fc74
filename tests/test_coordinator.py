"""The store on top of JAX's client: which answers are a plain no, and which mean that it cannot be reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tune_jax._agree import OutOfReachError
from tune_jax._coordinator import Coordinator, find_coordinator

ASKED: dict[str, Callable[[Coordinator], Any]] = {
    "put": lambda store: store.put("k", "text"),
    "put_once": lambda store: store.put_once("k", "text"),
    "read": lambda store: store.read("k"),
    "wait": lambda store: store.wait("k", 0.25),
    "list": lambda store: store.list("folder"),
    "delete": lambda store: store.delete("folder"),
}


class Client:
    """Notes what it is asked, and answers each question with the same value or error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def reply(*args: Any, **kwargs: Any) -> Any:
            self.asked.append((name, *args, *kwargs.items()))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return reply


def ask(what: str, answer: Any) -> tuple[Any, Client]:
    client = Client(answer)
    return ASKED[what](Coordinator(client, process=1, processes=2)), client


@pytest.mark.parametrize(
    ("what", "answer", "asked", "expected"),
    [
        ("put", None, ("key_value_set", "k", "text", ("allow_overwrite", True)), None),
        ("put_once", None, ("key_value_set", "k", "text"), True),
        ("read", "text", ("key_value_try_get", "k"), "text"),
        ("wait", "text", ("blocking_key_value_get", "k", 250), "text"),
        ("list", [("folder/a", "1")], ("key_value_dir_get", "folder"), {"folder/a": "1"}),
        ("list", [], ("key_value_dir_get", "folder"), {}),
        ("delete", None, ("key_value_delete", "folder"), None),
    ],
)
def test_each_question_is_one_of_the_clients(what, answer, asked, expected):
    came, client = ask(what, answer)
    assert came == expected
    assert client.asked == [asked]


@pytest.mark.parametrize(
    ("what", "status", "expected"),
    [
        ("put_once", "ALREADY_EXISTS: key k already exists.\nmore", False),
        ("read", "NOT_FOUND: Config key k not found.", None),
        ("wait", "DEADLINE_EXCEEDED: GetKeyValue() timed out", None),
        ("list", "NOT_FOUND: nothing there", {}),
        ("delete", "NOT_FOUND: nothing there", None),
    ],
)
def test_what_is_not_there_is_an_answer(what, status, expected):
    assert ask(what, jax.errors.JaxRuntimeError(status))[0] == expected


@pytest.mark.parametrize("what", ASKED)
def test_any_other_error_means_out_of_reach(what):
    with pytest.raises(OutOfReachError, match=r"^UNAVAILABLE: failed to connect$"):
        ask(what, jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nAdditional information: none"))


def test_a_wait_is_never_endless_or_zero():
    client = Client("text")
    Coordinator(client, process=0, processes=2).wait("k", 0.0)
    assert client.asked == [("blocking_key_value_get", "k", 1)]


def test_a_process_alone_has_no_coordinator():
    assert find_coordinator() is None
