"""What makes two calls the same tuning, and how a key reads."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tune_jax import tune
from tune_jax._binding import make_call
from tune_jax._call import Batch, Call, with_batch
from tune_jax._jax import trace_context
from tune_jax._key import _CALL_FIELDS, _TUNABLE_FIELDS, default_device, describe_aval, device_of, digest_of, on_device
from tune_jax._lookup import key_of
from tune_jax._placement import MeshShape, Placement
from tune_jax._records import Tunable

X = np.arange(4, dtype=np.float32)
MESH = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])


def scale(x, mode="plain", *, b, c=1):
    return x * b


TUNED = tune(scale, {"b": [1, 2], "c": [1, 2]})
CALL, _ = make_call(TUNED._tunable, (X,), {})


def key(*args, tuned=TUNED, **kwargs):
    call, inputs = make_call(tuned._tunable, args, kwargs)
    return key_of(call, [jax.typeof(value) for value in inputs], inputs)


def digest(*args, tuned=TUNED, **kwargs):
    call, _ = make_call(tuned._tunable, args, kwargs)
    return digest_of(key(*args, tuned=tuned, **kwargs), call)


def test_the_same_call_has_the_same_key_and_digest():
    assert key(X) == key(X + 1)
    assert hash(key(X)) == hash(key(X + 1))
    assert digest(X) == digest(X + 1)


@pytest.mark.parametrize(
    "same",
    [
        lambda: key(jnp.asarray(X)),
        lambda: key(x=X),
        lambda: key(X, "plain"),
        lambda: key(jax.ShapeDtypeStruct((4,), np.float32)),
    ],
    ids=["jax array", "keyword", "default", "struct"],
)
def test_the_way_of_passing_makes_no_difference(same):
    assert same() == key(X)


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(X[:3]),
        lambda: key(X.reshape(2, 2)),
        lambda: key(X.astype(np.float16)),
        lambda: key(X, "other"),
        lambda: key(X, b=1),
        lambda: key(X, b=1, c=1),
        lambda: key([X]),
        lambda: key(X, tuned=tune(scale, {"b": [1, 2]})),
    ],
    ids=["shape", "rank", "dtype", "static", "one fixed", "both fixed", "structure", "another tuned function"],
)
def test_what_makes_another_program_makes_another_key(other):
    assert other() != key(X)


def test_fixed_values_of_different_types_make_different_keys():
    assert len({key(X, b=1), key(X, b=True), key(X, b=1.0)}) == 3


def test_settings_that_change_programs_make_different_keys():
    plain = key(X)
    with jax.default_matmul_precision("highest"):
        precise = key(X)
    with jax.enable_x64(True):
        wide = key(X)
    assert len({plain, precise, wide}) == 3
    assert key(X) == plain


def test_weak_types_make_no_difference():
    assert key(2.0 * jnp.ones(())) == key(np.float32(2))


def test_a_key_reads_like_the_call():
    text = str(key(X, "other", b=2))
    assert text.startswith("scale(x: float32[4], mode: 'other'); b=2; ")
    assert jax.devices()[0].device_kind in text


def test_settings_that_are_set_are_in_the_text():
    with jax.default_matmul_precision("highest"):
        assert "jax_default_matmul_precision=highest" in str(key(X))


def test_a_digest_is_short_and_fit_for_a_file_name():
    assert len(digest(X)) == 32
    assert digest(X).isalnum()


PROBE = """
    import jax, numpy as np
    from tune_jax import tune
    from tune_jax._binding import make_call
    from tune_jax._key import digest_of
    from tune_jax._lookup import key_of

    class Thing:
        pass

    def scale(x, tree, act=jax.nn.relu, *, b, c=1):
        return x * b if c in {"a", "b", "c"} else x

    tuned = tune(scale, {"b": [abs, Thing], "c": [1, 2]}, where=lambda b, c: c != 3)
    x = np.arange(4.0, dtype="f4")
    call, inputs = make_call(tuned._tunable, (x, {"s": {"a", "b", "c"}, "t": Thing, "x": x}), {})
    print(digest_of(key_of(call, [jax.typeof(value) for value in inputs], inputs), call))
"""


def test_a_digest_is_the_same_in_processes_with_other_addresses_and_hash_seeds(run_python):
    digests = {run_python(PROBE, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "2")}
    assert len(digests) == 1


def twin():
    def scale(x, mode="plain", *, b, c=1):
        return x * b

    return scale


@pytest.mark.parametrize(
    ("make", "args", "kwargs"),
    [
        (lambda: TUNED, (X,), {}),
        (lambda: tune(twin(), {"b": [1, 2]}), (X, twin()), {}),
        (lambda: tune(twin(), {"b": [1, 2]}, where=lambda b: b < 3), (X,), {"c": object}),
        (lambda: tune(twin(), {"b": [1, 2]}, example_args=((X, {"a": X}),)), ((X, {"a": X}),), {}),
        (lambda: tune(twin(), {"b": [1, 2]}, seed=time.monotonic_ns(), max_workers=1, progress=False), (X,), {"c": 2}),
    ],
    ids=["same", "function made anew", "predicate made anew", "tree", "what changes no program"],
)
def test_like_calls_of_like_functions_have_the_same_digest(make, args, kwargs):
    assert digest(*args, tuned=make(), **kwargs) == digest(*args, tuned=make(), **kwargs)


def plus(x, mode="plain", *, b, c=1):
    return x + b


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(X[:3]),
        lambda: digest(X.astype(np.float16)),
        lambda: digest(X, "other"),
        lambda: digest(X, b=1),
        lambda: digest(X, b=True),
        lambda: digest([X]),
        lambda: digest((X,)),
        lambda: digest(X, tuned=tune(plus, {"b": [1, 2], "c": [1, 2]})),
        lambda: digest(X, tuned=tune(scale, {"b": [1, 3], "c": [1, 2]})),
        lambda: digest(X, tuned=tune(scale, {"b": [1, 2], "c": [1, 2]}, where=lambda b: b > 0)),
        lambda: digest(X, tuned=tune(scale, {"b": [1, 2], "c": [1, 2]}, sample_num=2)),
        lambda: digest(
            X, tuned=tune(scale, {"b": [1, 2], "c": [1, 2]}, in_shardings=jax.NamedSharding(MESH, jax.P("i")))
        ),
        lambda: digest(X, tuned=tune(scale, {"b": [1, 2], "c": [1, 2]}, event_filter_regex="mul")),
        lambda: digest(X, tuned=tune(jax.jit(scale, donate_argnums=0), {"b": [1, 2], "c": [1, 2]})),
        lambda: digest(jax.device_put(X, jax.NamedSharding(MESH, jax.P("i")))),
        lambda: digest_of(dataclasses.replace(key(X), device="another"), CALL),
        lambda: digest_of(key(X), with_batch(CALL, Batch((0,), 4, None, None))),
    ],
)
def test_what_makes_another_tuning_makes_another_digest(other):
    assert other() != digest(X)


def test_settings_make_other_digests():
    with jax.default_matmul_precision("highest"):
        precise = digest(X)
    assert precise != digest(X)


def test_every_field_is_in_the_digest_or_left_out_on_purpose():
    apart = {
        "signature",
        "space",
        "seed",
        "example_args",
        "example_kws",
        "max_workers",
        "progress",
        "keep_trace",
        "state",
    }
    assert {field.name for field in dataclasses.fields(Tunable)} == apart | set(_TUNABLE_FIELDS)
    apart = {"tunable", "paths", "statics", "fixed", "hints", "traced"}
    assert {field.name for field in dataclasses.fields(Call)} == apart | set(_CALL_FIELDS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(X, "float32[4]"), (jnp.zeros((2, 3), jnp.bfloat16), "bfloat16[2,3]"), (np.float32(1), "float32[]")],
)
def test_abstract_values_read_like_jax_writes_them(value, expected):
    assert describe_aval(jax.typeof(value)) == expected


# Devices


def test_programs_of_inputs_without_shardings_run_on_the_default_device():
    assert device_of([None, None]) == default_device() == jax.devices()[0]


def test_the_default_device_is_the_callers():
    second = jax.devices()[1]
    with jax.default_device(second):
        assert default_device() == second


def test_the_default_device_may_be_a_platform():
    with jax.default_device("cpu"):
        assert default_device() == jax.devices("cpu")[0]


def test_the_default_device_is_one_of_the_mesh_that_is_set():
    first, second, third = jax.devices()[:3]
    with jax.set_mesh(jax.sharding.Mesh(np.array([second, third]), ("i",))):
        assert default_device() == second
        with jax.default_device(third):
            assert default_device() == third
    assert default_device() == first


def test_shardings_decide_the_device():
    second, third = jax.devices()[1:3]
    mesh = jax.sharding.Mesh(np.array([third, second]), ("i",))
    assert device_of([None, jax.NamedSharding(mesh, jax.P())]) == second


def test_new_arrays_go_to_the_device_asked_for():
    second = jax.devices()[1]
    with on_device(second):
        assert jnp.zeros(2).devices() == {second}
    assert jnp.zeros(2).devices() == {jax.devices()[0]}


def test_asking_for_the_default_device_changes_no_setting():
    before = trace_context()
    with on_device(jax.devices()[0]):
        assert trace_context() == before
    with on_device(jax.devices()[1]):
        assert trace_context() != before


def test_values_on_one_device_have_no_placement():
    assert key(jax.device_put(X, jax.devices()[1])).placement == ()


def test_sharded_values_have_a_placement_that_names_mesh_and_spec():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    sharded = key([jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))), X])
    assert sharded.placement == (Placement(MeshShape(("data",), (2,), (AxisType.Auto,)), jax.P("data")), None)
    assert "; x[0] on mesh(data=2 Auto) P('data'" in str(sharded)
    assert "x[1] on" not in str(sharded)


def test_the_same_mesh_over_other_devices_makes_the_same_key():
    def placed(devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        return key(jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))))

    assert placed(jax.devices()[:2]) == placed(jax.devices()[2:4]) == placed(jax.devices()[1::-1])
    assert digest_of(placed(jax.devices()[:2]), CALL) == digest_of(placed(jax.devices()[2:4]), CALL)
    assert placed(jax.devices()[:4]) != placed(jax.devices()[:2])


def test_sharded_and_unsharded_values_make_different_keys():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    replicated = jax.device_put(X, jax.NamedSharding(mesh, jax.P()))
    assert len({key(X), key(sharded), key(replicated)}) == 3


MESH_PROBE = """
    import os
    import numpy as np, jax
    from jax.sharding import AxisType
    from tune_jax import tune
    from tune_jax._binding import make_call
    from tune_jax._key import digest_of
    from tune_jax._lookup import key_of
    def scale(x, mode='plain', *, b, c=1): return x * b
    tuned = tune(scale, {'b': [1, 2], 'c': [1, 2]})
    first = int(os.environ["FIRST"])
    devices = jax.devices()[first:first + 2]
    mesh = jax.make_mesh((2,), ("data",), devices=devices, axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.arange(4.0, dtype='f4'), jax.NamedSharding(mesh, jax.P("data")))
    call, inputs = make_call(tuned._tunable, (x,), {})
    print(digest_of(key_of(call, [jax.typeof(v) for v in inputs], inputs), call))
"""


def test_a_digest_on_a_mesh_is_the_same_in_processes_with_other_devices(run_python):
    assert len({run_python(MESH_PROBE, FIRST=first, PYTHONHASHSEED=first).stdout for first in ("0", "2")}) == 1
