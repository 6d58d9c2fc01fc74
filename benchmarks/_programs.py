"""Random JAX programs around a tuned function: a small grammar.

A program is a base, the function that is tuned, inside layers, the transformations around it. It prints as an
expression, such as `jit(vmap[0,None](grad(energy(float32[2,3], float32[]))))`. Each layer also says what it does to
the calls of the tuned functions inside it, so that the keys that must be tuned are known without asking the tuner.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXIS = "i"

Function = Callable[[Any, Any], Any]
Make = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Argument:
    """The shape and dtype of one of a program's two arguments; a weak one is a Python number."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False

    def __str__(self) -> str:
        return f"{'weak ' * self.weak}{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def moves(self) -> bool:
        """Whether it can be differentiated by."""
        return jnp.issubdtype(jnp.dtype(self.dtype), jnp.inexact)

    def grown(self, axis: int | None, size: int) -> Argument:
        """The argument with one more axis, that which a layer takes away."""
        if axis is None:
            return self
        shape = list(self.shape)
        shape.insert(axis % (len(shape) + 1), size)
        return dataclasses.replace(self, shape=tuple(shape))

    def value(self, rng: np.random.Generator) -> Any:
        """Some value, between -2 and 2."""
        if self.weak:
            return 0.5
        kind = jnp.dtype(self.dtype)
        if kind == jnp.bool_:
            return jnp.asarray(rng.integers(0, 2, self.shape).astype(bool))
        if jnp.issubdtype(kind, jnp.integer):
            return jnp.asarray(rng.integers(0, 3, self.shape).astype(kind))
        parts = rng.uniform(-2, 2, (2, *self.shape))
        return jnp.asarray((parts[0] + 1j * parts[1] if jnp.issubdtype(kind, jnp.complexfloating) else parts[0]), kind)


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of one tuned function as it must be tuned: its inputs, and the sizes and inputs of the vmaps around it.

    Differentiation needs a winner, and so settles the key: a vmap around it adds nothing. A derivative of its own
    keeps as many differentiations off as `shields` says. A `cond` decides on the first argument.
    """

    function: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    batches: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    settled: bool = False
    shields: int = 0
    is_conditional: bool = False

    def mapped(self, size: int, dims: Sequence[int | None], *, named: bool) -> Site:
        """The call inside a vmap; where a condition on the first argument is mapped, so is all that it decides on."""
        moving = tuple(dim is not None or (self.is_conditional and dims[0] is not None) for dim in dims)
        moving += (False,) * (len(self.inputs) - len(dims))
        if self.settled or not (any(moving) or named):
            return self
        return dataclasses.replace(self, batches=(*self.batches, (size, moving)))

    def differentiated(self) -> Site:
        """The call inside a derivative."""
        if self.shields:
            return dataclasses.replace(self, shields=self.shields - 1)
        return dataclasses.replace(self, settled=True)

    @property
    def key(self) -> tuple[Any, ...]:
        """What can be compared with the keys that were tuned."""
        return self.function, self.inputs, self.batches


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a program while it is put together from the inside out."""

    x: Argument
    y: Argument
    sites: frozenset[Site]
    own_vjps: int = 0
    reverse: bool = True
    awaits_axis: bool = False
    is_sharded: bool = False
    is_heavy: bool = False

    @property
    def forward(self) -> bool:
        """Whether it can be differentiated forward, which a `custom_vjp` function cannot."""
        return self.own_vjps == 0

    def at_sites(self, change: Callable[[Site], Site]) -> Spec:
        """The same with each call changed."""
        return dataclasses.replace(self, sites=frozenset(map(change, self.sites)))

    def grown(self, size: int, dims: tuple[int | None, int | None]) -> Spec:
        """The same with one more axis in the arguments."""
        return dataclasses.replace(self, x=self.x.grown(dims[0], size), y=self.y.grown(dims[1], size))

    def inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """The inputs of a tuned function that stands here."""
        return tuple((argument.shape, argument.dtype) for argument in (self.x, self.y))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A transformation: how it is written, what it makes of a function, and what is known after it."""

    text: str
    wrap: Callable[[Function, Make], Function]
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Program:
    """A base inside layers, inside the context that it runs in."""

    base: str
    call: Callable[[Make], Function]
    layers: tuple[Layer, ...]
    context: str
    spec: Spec

    def __str__(self) -> str:
        text = self.base
        for layer in self.layers:
            text = f"{layer.text}({text})"
        return f"{self.context}: {text}  on {self.spec.x}, {self.spec.y}"

    def build(self, make: Make) -> Function:
        """The program with `make(label, function)` around each function that is to be tuned."""
        function = self.call(make)
        for layer in self.layers:
            function = layer.wrap(function, make)
        return function

    def arguments(self) -> tuple[Any, Any]:
        """Values for the program; make them in its context."""
        rng = np.random.default_rng(len(str(self)))
        return self.spec.x.value(rng), self.spec.y.value(rng)

    @property
    def keys(self) -> frozenset[tuple[Any, ...]]:
        """What must be tuned."""
        return frozenset(site.key for site in self.spec.sites)


def total(tree: Any) -> Any:
    """The sum of all that can be differentiated in a tree, as a float32."""
    return weight([leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)])


def weight(tree: Any) -> Any:
    """A number that depends on all of a tree, so that nothing in it is left out as unused."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "dtype", None) != jax.dtypes.float0]
    return sum((jnp.sum(jnp.real(jnp.asarray(leaf))).astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def keep(tree: Any, factor: int) -> Any:
    """The tree as it is, by a way that depends on the hyperparameter."""
    return jax.tree.map(functools.partial(_keep_leaf, factor=factor), tree)


def _keep_leaf(leaf: Any, *, factor: int) -> Any:
    leaf = jnp.asarray(leaf)
    if leaf.dtype == jnp.bool_:
        return ~~leaf if factor > 1 else leaf
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf + factor - factor
    return leaf * factor / factor


# The functions that are tuned


@jax.custom_vjp
def _own_slope(x: Any) -> Any:
    return x * x


_own_slope.defvjp(lambda x: (x * x, x), lambda x, slope: (slope * x * 3,))


@jax.custom_jvp
def _own_tangent(x: Any) -> Any:
    return jnp.sin(x)


_own_tangent.defjvp(lambda primals, tangents: (jnp.sin(*primals), 5 * tangents[0]))


def _energy(x, y, *, factor=1):
    return keep(jnp.sum(jnp.sin(x * y)), factor)


def _smooth(x, y, *, factor=1):
    return keep(jnp.sin(x) * y, factor)


def _several(x, y, *, factor=1):
    return keep({"out": x * y, "none": None, "rest": (x.sum(), [x > 0 if x.dtype.kind != "c" else x == 0])}, factor)


def _slope(x, y, *, factor=1):
    return keep(_own_slope(x * y) if jnp.issubdtype(jnp.result_type(x, y), jnp.inexact) else x * y, factor)


def _tangent(x, y, *, factor=1):
    return keep(_own_tangent(x * y) if jnp.issubdtype(jnp.result_type(x, y), jnp.inexact) else x * y, factor)


def _rolled(x, y, *, factor=1):
    return keep(lax.scan(lambda carry, _: (carry * y + x * y, None), x * y, None, length=3)[0], factor)


def _noisy(x, y, *, factor=1):
    return keep(jax.random.normal(jax.random.key(0), x.shape) + x * y, factor)


def _branches(x, y, *, factor=1):
    return keep(lax.cond(weight(x) > 0, lambda: jnp.cos(x * y), lambda: jnp.sin(x * y)), factor)


def _collect(x, y, *, factor=1):
    return keep(lax.psum(jnp.sin(x * y), AXIS) + lax.axis_index(AXIS), factor)


def _mode(x, y, mode, *, factor=1):
    return keep(getattr(jnp, mode)(x * y), factor)


def _repeated(x, y, times, *, factor=1):
    return keep(sum((x * y for _ in range(times)), x * y), factor)


def _stepped(x, y, step, *, factor=1):
    return keep(x * y + x * step, factor)


def _of_tree(tree, *, factor=1):
    return keep([tree["first"] * tree["rest"][0], None], factor)


class _Scaled:
    """Has a method to tune, whose instance is a static argument."""

    scale = 2

    def method(self, x, y, *, factor=1):
        return keep(jnp.sin(x * y) * self.scale, factor)


_SCALED = _Scaled()


@dataclasses.dataclass(frozen=True)
class _Base:
    """A function to tune, how a program calls it, with how many Python numbers, and what it asks of the layers."""

    function: Callable[..., Any]
    call: Callable[[Callable[..., Any], Any, Any], Any] = lambda function, x, y: function(x, y)
    own_vjps: int = 0
    awaits_axis: bool = False
    numbers: int = 0


BASES = {
    "energy": _Base(_energy),
    "smooth": _Base(_smooth),
    "several": _Base(_several),
    "own_vjp": _Base(_slope, own_vjps=1),
    "own_jvp": _Base(_tangent),
    "rolled": _Base(_rolled),
    "noisy": _Base(_noisy),
    "branches": _Base(_branches),
    "collect": _Base(_collect, awaits_axis=True),
    "static_string": _Base(_mode, lambda function, x, y: function(x, y, "cos")),
    "static_number": _Base(_repeated, lambda function, x, y: function(x, y, times=2)),
    "counter": _Base(_stepped, lambda function, x, y: function(x, y, 7), numbers=1),
    "tree": _Base(_of_tree, lambda function, x, y: function({"first": x, "rest": (y, None, "name")})),
    "method": _Base(_Scaled.method, lambda function, x, y: function(_SCALED, x, y)),
    "by_keyword": _Base(_smooth, lambda function, x, y: function(y=y, x=x)),
}


# The transformations


def _plain(text: str, transform: Callable[[Function], Function], spec: Spec) -> Layer:
    return Layer(text, lambda function, make: transform(function), spec)


def jit(rng: random.Random, spec: Spec) -> Layer:
    return _plain("jit", jax.jit, spec)


def jit_of_closure(rng: random.Random, spec: Spec) -> Layer:
    return _plain("jit_of_closure", lambda f: lambda x, y: jax.jit(lambda x: f(x, y))(x), spec)


def vmap(rng: random.Random, spec: Spec) -> Layer:
    size = rng.choice([1, 2, 3])
    dims = _draw_dims(rng, spec)
    out = rng.choice([0, -1])
    named = spec.awaits_axis or rng.random() < 0.2
    name = AXIS if spec.awaits_axis else f"axis{len(spec.x.shape)}{len(spec.y.shape)}"
    options = {"axis_name": name} if named else {}
    after = spec.grown(size, dims).at_sites(lambda site: site.mapped(size, dims, named=named))
    text = f"vmap[{dims[0]},{dims[1]}->{out}{' ' + name if named else ''}]"
    transform = functools.partial(jax.vmap, in_axes=dims, out_axes=out, **options)
    return _plain(text, transform, dataclasses.replace(after, awaits_axis=False))


def _draw_dims(rng: random.Random, spec: Spec) -> tuple[int | None, int | None]:
    x = rng.choice([0, 0, -1, rng.randint(0, len(spec.x.shape)), None])
    y = None if spec.y.weak else rng.choice([0, None, None, -1])
    return (0, None) if x is None and y is None else (x, y)


def map_in_batches(rng: random.Random, spec: Spec) -> Layer | None:
    if spec.awaits_axis or 0 in spec.x.shape:
        return None
    size, left = 2, rng.choice([0, 1])
    sizes = [size, left] if left else [size]
    sites = frozenset(site.mapped(n, (0, None), named=False) for site in spec.sites for n in sizes)
    after = dataclasses.replace(spec.grown(2 * size + left, (0, None)), sites=sites)
    return _plain(
        f"map_in_batches[{2 * size + left} by {size}]",
        lambda f: lambda x, y: lax.map(lambda row: f(row, y), x, batch_size=size),
        after,
    )


def both_batched_and_not(rng: random.Random, spec: Spec) -> Layer | None:
    if spec.awaits_axis:
        return None
    sites = spec.sites | {site.mapped(1, (0, None), named=False) for site in spec.sites}
    return _plain(
        "both_batched_and_not",
        lambda f: lambda x, y: (jax.vmap(f, in_axes=(0, None))(jnp.expand_dims(x, 0), y), f(x, y)),
        dataclasses.replace(spec, sites=sites),
    )


def twice(rng: random.Random, spec: Spec) -> Layer:
    return _plain("twice", lambda f: lambda x, y: (f(x, y), f(x + x, y)), spec)


def scan(rng: random.Random, spec: Spec) -> Layer:
    length = rng.choice([1, 2, 3])
    return _plain(
        f"scan[{length}]",
        lambda f: lambda xs, y: lax.scan(lambda carry, x: (carry + weight(f(x, y)), f(x, y)), jnp.float32(0), xs),
        spec.grown(length, (0, None)),
    )


def fori_loop(rng: random.Random, spec: Spec) -> Layer:
    return _plain(
        "fori_loop",
        lambda f: lambda x, y: lax.fori_loop(0, 2, lambda i, carry: carry + weight(f(x, y)), jnp.float32(0)),
        spec,
    )


def while_loop(rng: random.Random, spec: Spec) -> Layer:
    def run(f: Function, x: Any, y: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + weight(f(x, y))), (0, jnp.float32(0)))[1]

    return _plain("while_loop", lambda f: functools.partial(run, f), dataclasses.replace(spec, reverse=False))


def cond(rng: random.Random, spec: Spec) -> Layer:
    def run(f: Function, x: Any, y: Any) -> Any:
        return lax.cond(weight(x) > -1e3, f, lambda x, y: jax.tree.map(jnp.zeros_like, f(x + x, y)), x, y)

    after = spec.at_sites(lambda site: dataclasses.replace(site, is_conditional=True))
    return _plain("cond", lambda f: functools.partial(run, f), after)


def switch(rng: random.Random, spec: Spec) -> Layer:
    chosen = rng.choice([0, 1])
    return _plain(
        f"switch[{chosen}]", lambda f: lambda x, y: lax.switch(chosen, [f, lambda x, y: f(x + x, y)], x, y), spec
    )


def checkpoint(rng: random.Random, spec: Spec) -> Layer:
    policy = rng.choice([None, "everything_saveable", "nothing_saveable", "dots_saveable"])
    chosen = getattr(jax.checkpoint_policies, policy) if policy else None
    return _plain(f"checkpoint[{policy}]", lambda f: jax.checkpoint(f, policy=chosen), spec)


def own_vjp(rng: random.Random, spec: Spec) -> Layer | None:
    def transform(f: Function) -> Function:
        def forward(x: Any, y: Any) -> Any:
            out = f(x, y)
            return out, (x, y, weight(out))

        def backward(kept: Any, slopes: Any) -> Any:
            return tuple(_scaled(value, total(slopes) * kept[2]) for value in kept[:2])

        wrapped = jax.custom_vjp(f)
        wrapped.defvjp(forward, backward)
        return wrapped

    if spec.awaits_axis:
        return None
    after = spec.at_sites(lambda site: dataclasses.replace(site, shields=site.shields + (not site.settled)))
    return _plain("own_vjp", transform, dataclasses.replace(after, own_vjps=spec.own_vjps + 1))


def own_jvp(rng: random.Random, spec: Spec) -> Layer | None:
    def transform(f: Function) -> Function:
        wrapped = jax.custom_jvp(f)

        @wrapped.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            out = f(*primals)
            return out, jax.tree.map(lambda leaf: _tangent_of(leaf, total(tangents) * weight(out)), out)

        return wrapped

    if spec.awaits_axis or not spec.forward:
        return None
    after = spec.at_sites(lambda site: dataclasses.replace(site, shields=site.shields + (not site.settled)))
    return _plain("own_jvp", transform, after)


def _scaled(value: Any, scale: Any) -> Any:
    value = jnp.asarray(value)
    return value * scale.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else None


def _tangent_of(leaf: Any, scale: Any) -> Any:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return leaf * scale.astype(leaf.dtype)


def grad(rng: random.Random, spec: Spec) -> Layer | None:
    if not spec.x.moves or not spec.reverse or spec.awaits_axis:
        return None
    by = (0, 1) if spec.y.moves and rng.random() < 0.5 else 0
    how, form = rng.choice([("grad", jax.grad), ("value_and_grad", jax.value_and_grad)])
    return _plain(f"{how}[{by}]", lambda f: form(lambda x, y: total(f(x, y)), argnums=by), _after_derivative(spec))


def vjp(rng: random.Random, spec: Spec) -> Layer | None:
    def run(f: Function, x: Any, y: Any) -> Any:
        out, back = jax.vjp(lambda x: total(f(x, y)), x)
        return out, back(jnp.float32(2))

    if not spec.x.moves or not spec.reverse or spec.awaits_axis:
        return None
    return _plain("vjp", lambda f: functools.partial(run, f), _after_derivative(spec))


def jvp(rng: random.Random, spec: Spec) -> Layer | None:
    if not spec.x.moves or not spec.forward or spec.awaits_axis:
        return None
    form = rng.choice(["jvp", "linearize"] if spec.reverse else ["jvp"])
    transform = {
        "jvp": lambda f: lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (x,)),
        "linearize": lambda f: lambda x, y: jax.linearize(lambda x: f(x, y), x)[1](x),
    }[form]
    return _plain(form, transform, _after_derivative(spec))


def hessian(rng: random.Random, spec: Spec) -> Layer | None:
    real = jnp.issubdtype(jnp.dtype(spec.x.dtype), jnp.floating)
    if (
        not real
        or not (spec.forward and spec.reverse)
        or spec.is_heavy
        or spec.awaits_axis
        or np.prod(spec.x.shape) > 12
    ):
        return None
    after = _after_derivative(_after_derivative(spec))
    return _plain(
        "hessian", lambda f: jax.hessian(lambda x, y: total(f(x, y))), dataclasses.replace(after, is_heavy=True)
    )


def _after_derivative(spec: Spec) -> Spec:
    after = spec.at_sites(Site.differentiated)
    if after.sites & {dataclasses.replace(site, settled=True) for site in spec.sites if not site.shields}:
        # An outer tuned function that is settled now is tuned on its own, and with it what it calls.
        after = dataclasses.replace(
            after, sites=after.sites | {dataclasses.replace(s, settled=True) for s in spec.sites}
        )
    return dataclasses.replace(after, own_vjps=max(0, spec.own_vjps - 1))


def shard_map(rng: random.Random, spec: Spec) -> Layer | None:
    if spec.is_sharded or spec.awaits_axis:
        return None
    count = rng.choice([2, 4, 8])

    def transform(f: Function) -> Function:
        mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        local = lambda x, y: jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), f(x[0], y))  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)

    return _plain(f"shard_map[{count}]", transform, dataclasses.replace(spec.grown(count, (0, None)), is_sharded=True))


def tuned(rng: random.Random, spec: Spec) -> Layer:
    label = f"outer{len(spec.sites)}"

    def wrap(f: Function, make: Make) -> Function:
        # A Python number that nothing depends on would be no input.
        return make(label, lambda x, y, *, factor=1: keep((f(x, y), y), factor))

    return Layer("tuned", wrap, dataclasses.replace(spec, sites=spec.sites | {Site(label, spec.inputs())}))


def closure(rng: random.Random, spec: Spec) -> Layer:
    """A function made and tuned where it is called, which closes over the second argument."""

    def wrap(f: Function, make: Make) -> Function:
        def call(x: Any, y: Any) -> Any:
            def closed_over(x: Any, *, factor: int = 1) -> Any:
                return keep(f(x, y), factor)

            return make(MADE_ANEW, closed_over)(x)

        return call

    return Layer("closure", wrap, spec)


# The label of tuned functions that are made anew at each call, and so are tuned anew.
MADE_ANEW = "closed_over"

LAYERS: tuple[Callable[[random.Random, Spec], Layer | None], ...] = (
    jit,
    jit_of_closure,
    vmap,
    vmap,
    map_in_batches,
    both_batched_and_not,
    twice,
    scan,
    fori_loop,
    while_loop,
    cond,
    switch,
    checkpoint,
    own_vjp,
    own_jvp,
    grad,
    grad,
    vjp,
    jvp,
    hessian,
    shard_map,
    tuned,
)
CONTEXTS = ("plain", "plain", "plain", "x64", "no_jit", "debug_nans", "precise", "other_device", "threads")
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "complex64", "int32", "uint8", "bool")
WIDE_DTYPES = ("float64", "complex128", "int64", "float32")


def draw(seed: int, number: int, kinds: Sequence[Callable[..., Layer | None]] = LAYERS) -> Program:
    """Draw a program of these kinds of layers; the same seed and number give the same one."""
    rng = random.Random(f"{seed} {number}")
    context = rng.choice(CONTEXTS)
    base, spec = _draw_base(rng, context)
    layers: list[Layer] = []
    for _ in range(rng.randint(1, 6)):
        layers.append(_draw_layer(rng, spec, context, kinds))
        spec = layers[-1].spec
    if spec.awaits_axis:
        layers.append(vmap(rng, spec))
        spec = layers[-1].spec
    return assemble(base, layers, context, spec)


def assemble(base: str, layers: Sequence[Layer], context: str, spec: Spec) -> Program:
    """Put a program together; `spec` is what is known after the last layer."""
    known = BASES[base]

    def call(make: Make) -> Function:
        return functools.partial(known.call, make("base", known.function))

    return Program(base, call, tuple(layers), context, spec)


def _draw_base(rng: random.Random, context: str) -> tuple[str, Spec]:
    base = rng.choice(list(BASES))
    dtype = rng.choice(WIDE_DTYPES if context == "x64" else DTYPES)
    shape = rng.choice([(), (3,), (2, 3), (0, 3), (1, 2, 2)])
    weak = rng.random() < 0.2
    y_dtype = ("float64" if context == "x64" else "float32") if weak else dtype
    x = Argument(shape, dtype)
    y = Argument(() if weak or rng.random() < 0.5 else shape[-1:], y_dtype, weak)
    known = BASES[base]
    plain = Spec(x, y, frozenset(), own_vjps=known.own_vjps, awaits_axis=known.awaits_axis)
    number = ((), "int64" if context == "x64" else "int32")
    site = Site("base", (*plain.inputs(), *[number] * known.numbers))
    return base, dataclasses.replace(plain, sites=frozenset({site}))


def _draw_layer(rng: random.Random, spec: Spec, context: str, kinds: Sequence[Callable[..., Layer | None]]) -> Layer:
    while True:
        kind = rng.choice(kinds)
        layer = kind(rng, spec) if not (context == "no_jit" and kind is shard_map) else None
        if layer is not None:
            return layer
