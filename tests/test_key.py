"""What makes two calls the same tuning, and how a key reads."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tune_jax import tune
from tune_jax._binding import make_call
from tune_jax._jax import trace_context
from tune_jax._key import default_device, describe_aval, device_of, on_device
from tune_jax._lookup import key_of
from tune_jax._placement import MeshShape, Placement

X = np.arange(4, dtype=np.float32)


def scale(x, mode="plain", *, b, c=1):
    return x * b


TUNED = tune(scale, {"b": [1, 2], "c": [1, 2]})


def key(*args, tuned=TUNED, **kwargs):
    call, inputs = make_call(tuned._tunable, args, kwargs)
    return key_of(call, [jax.typeof(value) for value in inputs], inputs)


def test_the_same_call_has_the_same_key_and_digest():
    assert key(X) == key(X + 1)
    assert hash(key(X)) == hash(key(X + 1))
    assert key(X).digest == key(X + 1).digest


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
    assert len(key(X).digest) == 32
    assert key(X).digest.isalnum()


def test_a_digest_is_the_same_in_a_fresh_process():
    script = (
        "import numpy as np, jax\nfrom tune_jax import tune\n"
        "from tune_jax._binding import make_call\nfrom tune_jax._lookup import key_of\n"
        "def scale(x, mode='plain', *, b, c=1): return x * b\n"
        "tuned = tune(scale, {'b': [1, 2], 'c': [1, 2]})\n"
        "call, inputs = make_call(tuned._tunable, (np.arange(4.0, dtype='f4'),), {})\n"
        "print(key_of(call, [jax.typeof(v) for v in inputs], inputs).digest)"
    )
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == key(X).digest


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
    assert placed(jax.devices()[:2]).digest == placed(jax.devices()[2:4]).digest
    assert placed(jax.devices()[:4]) != placed(jax.devices()[:2])


def test_sharded_and_unsharded_values_make_different_keys():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    replicated = jax.device_put(X, jax.NamedSharding(mesh, jax.P()))
    assert len({key(X), key(sharded), key(replicated)}) == 3


def test_a_key_on_a_mesh_is_the_same_in_a_fresh_process(run_python):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    own = key(jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))))
    done = run_python(
        """
        import numpy as np, jax
        from jax.sharding import AxisType
        from tune_jax import tune
        from tune_jax._binding import make_call
        from tune_jax._lookup import key_of
        def scale(x, mode='plain', *, b, c=1): return x * b
        tuned = tune(scale, {'b': [1, 2], 'c': [1, 2]})
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[2:4], axis_types=(AxisType.Explicit,))
        x = jax.device_put(np.arange(4.0, dtype='f4'), jax.NamedSharding(mesh, jax.P("data")))
        call, inputs = make_call(tuned._tunable, (x,), {})
        print(key_of(call, [jax.typeof(v) for v in inputs], inputs).digest)
        """
    )
    assert done.stdout.strip() == own.digest
