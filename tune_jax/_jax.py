"""The one door to JAX's internals: everything outside the stable public API is imported here and nowhere else.

Each name is exercised by `tests/test_jax.py` on every supported version, so that a JAX release that moves one of
them fails there first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

try:
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src import distributed as _distributed
    from jax._src import dtypes as _dtypes
    from jax._src import mesh as _mesh
    from jax._src import profiler as _profiler
    from jax._src import source_info_util as _source_info
    from jax._src import util as _util
    from jax._src.interpreters import batching as _batching
    from jax._src.lax import lax as _lax
    from jax.extend.core import Primitive, jaxprs_in_params, subjaxprs
    from jax.interpreters import ad, batching, mlir, partial_eval
except ImportError as error:
    raise ImportError(f"tune-jax needs jax 0.10.2 or newer, and found {jax.__version__}: {error}") from error

SymbolicZero = ad.Zero
ShapedArray = jax.core.ShapedArray
Tracer = jax.core.Tracer
trace_state_clean: Callable[[], bool] = _core.trace_state_clean
# All that JAX's own caches of traces go by besides the arguments: settings, axis names and sizes, mesh.
trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context
# The mesh of `jax.set_mesh`, seen inside of traces too; empty where there is none.
concrete_mesh: Callable[[], jax.sharding.Mesh] = _mesh.get_concrete_mesh

_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def make_primitive(name: str) -> Primitive:
    """Return a new primitive with several results."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def hold_weakly(kind: type) -> None:
    """Keep parameters of this type out of JAX's global cache of abstract values, which would keep them alive."""
    _util.weakref_cache_key_types.add(kind)


def register_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(axis, args, dims, **params)`; `axis` has `size`, `name` and `spmd_name`."""
    batching.fancy_primitive_batchers[primitive] = rule


def is_named(axis: Any) -> bool:
    """Whether a batching rule's axis has a name that collectives can use."""
    return axis.name is not _core.no_axis_name


def is_batched(value: Any) -> bool:
    """Whether a value inside a function under `jax.vmap` has the mapped axis."""
    return isinstance(value, _batching.BatchTracer) and value.batch_dim is not None


def register_jvp(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(primals, tangents, **params)`; tangents may be symbolic zeros."""
    ad.primitive_jvps[primitive] = rule


def register_transpose(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(cotangents, *args, **params)`, where the linear ones among `args` are placeholders."""
    ad.primitive_transposes[primitive] = rule


def is_linear_input(value: Any) -> bool:
    """Whether an argument of a transpose rule stands for an input to be transposed."""
    return bool(ad.is_undefined_primal(value))


def zero_tangent(value: Any) -> Any:
    """The symbolic zero among the tangents of `value`."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def takes_cotangent(aval: Any) -> bool:
    """Whether values like this can be differentiated: floats and complex numbers, not integers or keys."""
    return bool(aval.to_tangent_aval().dtype != jax.dtypes.float0)


def instantiate(cotangent: Any) -> Any:
    """A cotangent as an array, symbolic zeros included."""
    return ad.instantiate_zeros(cotangent)


def register_lowering(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(context, *args, **params)` for every platform."""
    mlir.register_lowering(primitive, rule)


def lower_inline(context: Any, function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Any:
    """Lower `function` in place, as if the program had called it itself: without what its results do not need."""

    def needed(*values: Any) -> Sequence[Any]:
        closed = jax.make_jaxpr(function)(*values)
        wanted = [True] * len(closed.jaxpr.outvars)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        return _core.eval_jaxpr(jaxpr, closed.consts, *values)

    return mlir.lower_fun(needed, multiple_results=True)(context, *args)


def lowering_platforms(context: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule's program is meant for; several only when exporting."""
    return tuple(context.platforms or context.module_context.platforms)


def lowering_devices(context: Any) -> tuple[jax.Device, ...]:
    """The devices that a lowering rule's program is meant for, empty where JAX does not know them."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return tuple(mesh.devices.flat)
    return tuple(getattr(axes, "device_assignment", None) or _devices_of_caller())


def _devices_of_caller() -> Sequence[jax.Device]:
    """The devices that JAX lowers a program for.

    It tells rules only of how many there are, since it then lowers once for several; the function that does it knows.
    To mark a primitive as one that needs devices would tell its rule, but refuses programs over two meshes, and over
    meshes without devices.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "lower_sharding_computation":
            return frame.f_locals.get("device_assignment") or ()
        frame = frame.f_back
    return ()


def used_inputs(closed_jaxpr: Any) -> tuple[bool, ...]:
    """Which inputs of a traced program its outputs or effects depend on."""
    jaxpr = closed_jaxpr.jaxpr
    return tuple(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def closed_over(traced: Any) -> tuple[Any, ...]:
    """What a traced program closes over, if tracers are among it; the program's first inputs stand for these."""
    return tuple(traced._consts)


def eval_closed(closed_jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run a traced program in the ambient trace; outside of the mesh it was traced under, nothing varies over that."""
    jaxpr, given = closed_jaxpr.jaxpr, [*closed_jaxpr.consts, *inputs]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    results = [variable for equation in jaxpr.eqns for variable in equation.outvars]
    if not set().union(*(_varying_axes(v.aval) for v in (*variables, *results))) <= set(axis_names()):
        return _eval_unvarying(jaxpr, dict(zip(variables, given, strict=True)))
    given = [_vary_as(v.aval, value) for v, value in zip(variables, given, strict=True)]
    split = len(closed_jaxpr.consts)
    return list(_core.eval_jaxpr(jaxpr, given[:split], *given[split:]))


def _varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes in whose places an array inside `jax.shard_map` may have different values."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def _vary_as(aval: Any, value: Any) -> Any:
    missing = _varying_axes(aval) - _varying_axes(jax.typeof(value))
    return lax.pcast(value, tuple(missing), to="varying") if missing else value


def _eval_unvarying(jaxpr: Any, values: dict[Any, Any]) -> list[Any]:
    def read(atom: Any) -> Any:
        return values[atom] if isinstance(atom, _core.Var) else atom.val

    for equation in jaxpr.eqns:
        primitive, operands = equation.primitive, [read(atom) for atom in equation.invars]
        if primitive.name in ("pvary", "pcast"):
            results = operands
        elif primitive.name in ("jit", "pjit"):
            results = eval_closed(equation.params["jaxpr"], operands)
        else:
            with equation.ctx.manager:
                found = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def dynamic_grid_bounds(closed_jaxpr: Any) -> int:
    """How many bounds of Pallas grids in a traced program are computed rather than known."""
    return _dynamic_bounds(closed_jaxpr.jaxpr)


def _dynamic_bounds(jaxpr: Any) -> int:
    own = sum(getattr(e.params.get("grid_mapping"), "num_dynamic_grid_bounds", 0) for e in jaxpr.eqns)
    return own + sum(_dynamic_bounds(inner) for inner in subjaxprs(jaxpr))


def placed_parts(closed_jaxpr: Any) -> tuple[Any, ...]:
    """The jaxpr of a traced program that says on which devices it runs, as by a mesh; nothing if it does not.

    JAX looks for this in the parameters of every primitive before it lowers.
    """
    found = _dispatch.get_intermediate_shardings(closed_jaxpr.jaxpr)
    return (closed_jaxpr.jaxpr,) if any(isinstance(one, jax.sharding.Sharding) for one, _ in found) else ()


def inner_jaxprs(equation: Any) -> tuple[Sequence[Any], int]:
    """The programs inside an equation, and how often it runs them; a `while` counts as once."""
    length = equation.params["length"] if equation.primitive.name == "scan" else 1
    return tuple(jaxprs_in_params(equation.params)), length


def current_source() -> Any:
    """Where the equation comes from that is being made or lowered, as equations have it in `source_info`."""
    return _source_info.current()


def source_frames(source_info: Any) -> list[tuple[str, int, str]]:
    """File, line and function of the frames that led to an equation, innermost first, without JAX's own."""
    frames = _source_info.user_frames(source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def shaped(aval: Any) -> Any:
    """The shape, dtype, weak type and explicit sharding of an abstract value, without what only its own trace knows."""
    weak = getattr(aval, "weak_type", False)
    if is_explicit(aval):
        return ShapedArray(aval.shape, aval.dtype, weak_type=weak, sharding=aval.sharding)
    return ShapedArray(aval.shape, aval.dtype, weak_type=weak)


def is_explicit(aval: Any) -> bool:
    """Whether an abstract value says how it lies on the explicit axes of a mesh."""
    return jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What `jax.jit(...).trace` takes for an abstract value, with what is known of its place on the ambient mesh."""
    weak = getattr(aval, "weak_type", False)
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=weak, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )


def key_impl_name(dtype: Any) -> str:
    """The name of the generator behind a PRNG key dtype, as `jax.random.wrap_key_data` takes it."""
    return str(dtype._impl.name)


def is_key_dtype(value: Any) -> bool:
    """Whether `value` is the dtype of PRNG keys."""
    return isinstance(value, _dtypes.ExtendedDType)


def as_weak(value: Any) -> Any:
    """The same array with a weak type, as one made of a Python number has it."""
    return _lax._convert_element_type(value, value.dtype, weak_type=True)


def batch_size(value: Any) -> int | None:
    """The size of the axis that `jax.vmap` maps a value over; None where it is not mapped."""
    if not isinstance(value, _batching.BatchTracer) or not isinstance(value.batch_dim, int):
        return None
    return int(value.val.shape[value.batch_dim])


def custom_derivative(function: Any) -> tuple[str, tuple[str, ...]] | None:
    """The name of what gives `function` its own derivative, and of the attributes that hold its rules."""
    if isinstance(function, jax.custom_vjp):
        return "custom_vjp", ("fwd", "bwd")
    return ("custom_jvp", ("jvp",)) if isinstance(function, jax.custom_jvp) else None


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Leave the ambient trace: inside, arrays are concrete, and programs compile, run and may return NaN or inf."""
    names = _core.trace_ctx.axis_env
    with (
        jax.core.eval_context(),
        _outside_manual_axes(),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
    ):
        # Axis names stay when the trace goes, and what uses one could then be traced, but not lowered.
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(names)


def _outside_manual_axes() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of the `shard_map` around, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Manual not in mesh.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def axis_names() -> tuple[Any, ...]:
    """The names of the axes that collectives can use here."""
    return tuple(_core.get_axis_env().axis_sizes)


def jit_is_disabled() -> bool:
    """Whether the caller runs under `jax.disable_jit`."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def default_device_setting() -> Any:
    """The caller's default device: a device, a platform's name, or None."""
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def settings() -> tuple[tuple[str, Any], ...]:
    """The caller's settings that change what a function computes or compiles to."""
    return tuple((name, getattr(jax.config, name)) for name in _SETTINGS)


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a tuning depends on besides its call: settings, the default device, the mesh and the axis names."""

    settings: tuple[tuple[str, Any], ...]
    mesh: Any
    axes: Any


def surroundings() -> Surroundings:
    """The caller's surroundings, to come back to."""
    device = ("jax_default_device", default_device_setting())
    return Surroundings((*settings(), device), jax.sharding.get_abstract_mesh(), _core.trace_ctx.axis_env)


@contextlib.contextmanager
def restored(around: Surroundings) -> Iterator[None]:
    """Be in these surroundings again."""
    before = _core.trace_ctx.axis_env
    with contextlib.ExitStack() as stack:
        for name, value in around.settings:
            stack.enter_context(_config.config_states[name](value))
        stack.enter_context(jax.sharding.use_abstract_mesh(around.mesh))
        stack.callback(_core.trace_ctx.set_axis_env, before)
        _core.trace_ctx.set_axis_env(around.axes)
        yield


def is_jitted(function: Any) -> bool:
    """Whether `function` is the result of `jax.jit`."""
    return hasattr(function, "_jit_info") and hasattr(function, "lower")


def abandon_trace(folder: str) -> None:
    """Forget the profiler's session that writes to `folder` if it still is one, so that another can start.

    JAX keeps a session for good whose trace could not be written, or whose stop was interrupted.
    """
    state = _profiler._profile_state
    with state.lock:
        # jax 0.10 has the session's folder in the state itself.
        session = getattr(state, "session", state)
        if session is not None and session.log_dir == folder:
            state.reset()


def lowered_devices(lowered: Any) -> tuple[int, ...]:
    """Ids of the devices that a lowered program is to be compiled for; its text does not say them."""
    return tuple(device.id for device in lowered._lowering._device_list or ())


def has_host_callbacks(lowered: Any) -> bool:
    """Whether a lowered program calls Python functions of the host; its text does not say which."""
    return bool(lowered._lowering.compile_args["host_callbacks"])


def jit_statics(function: Any) -> frozenset[str]:
    """Names of a jitted function's static parameters."""
    return _named_parameters(function, "static_argnames", "static_argnums")


def jit_donations(function: Any) -> frozenset[str]:
    """Names of a jitted function's donated parameters."""
    return _named_parameters(function, "donate_argnames", "donate_argnums")


def jit_compiler_options(function: Any) -> dict[str, Any]:
    """The compiler options of a jitted function."""
    return dict(function._jit_info.compiler_options_kvs)


def _named_parameters(function: Any, names_field: str, numbers_field: str) -> frozenset[str]:
    info = function._jit_info
    parameters = list(info.fun_signature.parameters.values()) if info.fun_signature else []
    numbered = [parameters[i] for i in getattr(info, numbers_field) if -len(parameters) <= i < len(parameters)]
    # One of *args cannot be said by name, and the name would mean all of them.
    named = {parameter.name for parameter in numbered if parameter.kind is not parameter.VAR_POSITIONAL}
    return frozenset(getattr(info, names_field)) | named


def distributed_client() -> tuple[Any, int, int] | None:
    """The coordinator's client, this process's number and how many there are; None where this one is alone."""
    state = _distributed.global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return state.client, state.process_id, state.num_processes
