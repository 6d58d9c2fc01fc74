"""A candidate and a call -> a function of the call's inputs alone, which JAX can trace, lower and transform."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tune_jax._call import Batch, Call, variadic_name
from tune_jax._jax import ShapedArray, is_batched, shaped, takes_cotangent, vary_as, vary_over
from tune_jax._placement import MeshShape


def wrap(call: Call, hyperparams: Mapping[str, Any], *, name: str) -> Callable[..., Any]:
    """Return the function of the call's inputs that runs the candidate and returns its result as it is.

    If the backward pass belongs to the call, it takes the cotangents of the result's differentiable leaves after the
    inputs, and returns the result with the gradients. Its `__name__` is `name`, which names the XLA module too.
    """

    def candidate(*inputs: Any) -> Any:
        if call.traced is not None:
            return call.traced.run(hyperparams, inputs)
        bound = bind(call, call.arguments(inputs), hyperparams)
        result = call.tunable.function(*bound.args, **bound.kwargs)
        _check_leaves(call.tunable.name, result)
        return result

    function: Callable[..., Any] = candidate
    for batch in call.batches:
        function = _batched(function, batch)
    if call.moving:
        function = _with_backward(function, len(call.dynamic_indices), call.moving)
    if call.mesh is not None and call.mesh.manual:
        function = (_mapped_side_by_side if _is_side_by_side(call) else _mapped)(function, call.mesh)
    return _renamed(function, name)


def wrap_flat(call: Call, hyperparams: Mapping[str, Any], *, name: str) -> Callable[..., list[Any]]:
    """The same, but with the result's leaves as a flat list."""
    function = wrap(call, hyperparams, name=name)
    return _renamed(lambda *inputs: jax.tree.leaves(function(*inputs)), name)


def single_aval(call: Call, aval: Any) -> Any:
    """The abstract value of a result as the function itself returns it, of that of its program."""
    if not _is_side_by_side(call):
        return shaped(aval)
    return ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def bind(call: Call, arguments: Mapping[str, Any], hyperparams: Mapping[str, Any]) -> inspect.BoundArguments:
    """Join a call's arguments with hyperparameters, each where the function's signature takes it."""
    signature = call.tunable.signature
    variadic = variadic_name(signature)
    named = {name: value for name, value in hyperparams.items() if name in signature.parameters}
    extra = {name: value for name, value in hyperparams.items() if name not in signature.parameters}
    joined = {**arguments, **named}
    if extra and variadic is not None:
        joined[variadic] = {**arguments.get(variadic, {}), **extra}
    ordered = {name: joined[name] for name in signature.parameters if name in joined}
    return inspect.BoundArguments(signature, ordered)


def along(function: Callable[..., Any], inputs: Sequence[Any], moving: Sequence[int]) -> Callable[..., Any]:
    """`function` of its `moving` inputs alone, with the others as they are in `inputs`."""

    def moved(*values: Any) -> Any:
        joined = list(inputs)
        for index, value in zip(moving, values, strict=True):
            joined[index] = value
        return function(*joined)

    return moved


def mapped_outputs(function: Callable[..., Any], batch: Batch, inputs: Sequence[Any]) -> tuple[bool, ...]:
    """Which leaves of the function's result have the axis when it is batched; the inputs may be abstract."""
    found: list[bool] = []

    def noted(*values: Any) -> Any:
        result = function(*values)
        found[:] = [is_batched(leaf) for leaf in jax.tree.leaves(result)]
        return result

    jax.eval_shape(_batched(noted, batch), *inputs)
    return tuple(found)


def _check_leaves(name: str, result: Any) -> None:
    # JAX warns of a generator in a pytree unless told that it is a leaf.
    for path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=inspect.isgenerator):
        try:
            jax.typeof(leaf)
        except TypeError:
            if inspect.iscoroutine(leaf):
                # Nobody will await it, which Python warns of.
                leaf.close()
            dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{name} returned a value of type {type(leaf).__name__}{dtype}{where}, expected arrays, numbers, None, "
                "or pytrees of these"
            ) from None


def _with_backward(function: Callable[..., Any], count: int, moving: Sequence[int]) -> Callable[..., Any]:
    def both(*values: Any) -> Any:
        inputs, cotangents = values[:count], iter(values[count:])
        result, back = jax.vjp(along(function, inputs, moving), *(inputs[index] for index in moving))
        slopes = jax.tree.map(lambda leaf: _cotangent(leaf, cotangents), result)
        return result, back(slopes)

    return both


def _cotangent(leaf: Any, cotangents: Iterator[Any]) -> Any:
    aval = jax.typeof(leaf)
    return vary_as(aval, next(cotangents)) if takes_cotangent(aval) else np.zeros(aval.shape, jax.dtypes.float0)


def _batched(function: Callable[..., Any], batch: Batch) -> Callable[..., Any]:
    def batched(*inputs: Any) -> Any:
        trees: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(function(*values))
            trees.append(tree)
            return leaves

        mapped = jax.vmap(
            flat,
            in_axes=batch.dims,
            out_axes=0 if batch.mapped is None else [0 if moves else None for moves in batch.mapped],
            axis_size=batch.size,
            axis_name=batch.axis_name,
            spmd_axis_name=batch.spmd_axis_name,
        )
        leaves = mapped(*inputs)
        return jax.tree.unflatten(trees[-1], leaves)

    return batched


def _mapped(function: Callable[..., Any], mesh: MeshShape) -> Callable[..., Any]:
    """`function` on each device of a mesh, with the same inputs everywhere.

    Results are taken for the same too, unchecked: only how long they take matters.
    """
    everywhere = jax.sharding.PartitionSpec()
    return jax.shard_map(
        function,
        mesh=mesh.build(),
        in_specs=everywhere,
        out_specs=everywhere,
        axis_names=set(mesh.manual),
        check_vma=False,
    )


def _is_side_by_side(call: Call) -> bool:
    is_mapped = call.mesh is not None and bool(call.mesh.manual)
    return is_mapped and call.traced is not None and call.traced.says_what_varies


def _mapped_side_by_side(function: Callable[..., Any], mesh: MeshShape) -> Callable[..., Any]:
    """The same for a program with the collectives that JAX puts in where it checks what varies over the mesh.

    It checks here too then, so that results, which may vary, are put side by side.
    """
    axes = tuple(name for name in mesh.names if name in mesh.manual)
    return jax.shard_map(
        lambda *inputs: jax.tree.map(lambda leaf: vary_over(axes, leaf)[None], function(*inputs)),
        mesh=mesh.build(),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(axes),
        axis_names=set(axes),
    )


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def renamed(*inputs: Any) -> Any:
        return function(*inputs)

    renamed.__name__ = renamed.__qualname__ = name
    return renamed
