"""The arithmetic of a decoder layer as pure functions, to the cast as transformers computes it.

Arrays carry their dimension letters as a suffix; each contraction is the einsum of its row in `qwenjax.ops`, run under
a named scope of the same name, so that counts of the compiled program join the inventory by name.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from qwenjax.ops import EINSUM, as_product
from qwenjax.rope_config import RopeScaling

Array = jax.Array
_FEW_PRODUCTS, _FEW_ROWS = 16, 32  # of a batched product


def precision_of(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """Float32 products are kept whole on devices that would round their operands (TF32)."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def contract(op: str, x: Array, y: Array) -> Array:
    """Runs the einsum of a named op as one matrix product with a single axis of rows, columns and summands.

    XLA's CPU compiler runs products with several free axes ten times slower than the same product with the axes merged,
    and the merge costs nothing: the inventory lays weights and cache so that merged axes are neighbours. Float32 is
    kept whole on devices that would round it (TF32). A few products of few rows side by side, the scores of one decoded
    token, go the other way round, which takes that compiler two thirds of the time.
    """
    plan = as_product(EINSUM[op])
    sizes = dict(zip(plan.x + plan.y, x.shape + y.shape, strict=True))
    lead = [sizes[letter] for letter in plan.batch]
    x_letters = plan.batch + plan.rows + plan.contracted
    x_BMC = x.transpose([plan.x.index(letter) for letter in x_letters]).reshape(*lead, _merged(plan.rows, sizes), -1)
    # y stays in its own order, columns or summands first, so that a cache or a weight is never transposed.
    columns_first = plan.y == plan.batch + plan.columns + plan.contracted
    axes = (plan.columns, plan.contracted) if columns_first else (plan.contracted, plan.columns)
    y_merged = y.reshape(*lead, *(_merged(letters, sizes) for letters in axes))
    batch_axes = tuple(range(len(lead)))
    summed = len(lead) + 1, len(lead) + (1 if columns_first else 0)
    if lead and columns_first and math.prod(lead) <= _FEW_PRODUCTS and x_BMC.shape[-2] <= _FEW_ROWS:
        product_BNM = _multiplied(y_merged, x_BMC, summed[::-1], batch_axes)
        product_BMN = product_BNM.swapaxes(-1, -2)
    else:
        product_BMN = _multiplied(x_BMC, y_merged, summed, batch_axes)
    letters = plan.batch + plan.rows + plan.columns
    product = product_BMN.reshape([sizes[letter] for letter in letters])
    return product.transpose([letters.index(letter) for letter in plan.out])


def _multiplied(x: Array, y: Array, summed: tuple[int, int], batch: tuple[int, ...]) -> Array:
    return jax.lax.dot_general(x, y, (((summed[0],), (summed[1],)), (batch, batch)), precision=precision_of(x.dtype))


def _merged(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[letter] for letter in letters)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis: mean square in float32, cast back, then the weight in the input's dtype."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * scaled.astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[npt.NDArray[np.float32], float]:
    """Angle of each pair of channels for one position, radians, and the factor on cos and sin.

    Linear scaling divides every frequency; YaRN (arXiv 2309.00071, with transformers' rounding of the range) keeps the
    fast ones, divides the slow ones and blends between. Exponent, power and reciprocal are each rounded to float32, as
    in transformers: the last bit of a frequency, times 32768 positions, moves a logit by a thousandth.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    plain: npt.NDArray[np.float32] = np.float32(1) / periods
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor), 1.0
    low, high = (
        _turns_to_channel(turns, head_dim, theta, scaling.original_max_position_embeddings)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1) / (np.float32(scaling.factor) * periods)
    return stretched * (1 - kept) + plain * kept, _attention_factor(scaling)


def _turns_to_channel(turns: float, head_dim: int, theta: float, positions: int) -> float:
    """The channel pair that turns this often over the original context."""
    return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def rope_tables(
    positions_BT: Array, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """cos and sin, each [B, T, H/2], from float32 angles, cast to the model's dtype last."""
    frequencies, factor = rope_frequencies(head_dim, theta, scaling)
    angles = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    return (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)


def apply_rope(x_BTNH: Array, cos_BTH: Array, sin_BTH: Array) -> Array:
    """Rotates the pairs (i, i + H/2) of every head; cos and sin hold H/2 channels.

    The halves stay apart on an axis of their own: joined along the channels, XLA's CPU compiler asks at each element
    which half it is in, and takes 2.6 times as long.
    """
    halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, x_BTNH.shape[-1] // 2)
    first, second = jnp.split(halves, 2, axis=-2)
    cos, sin = cos_BTH[:, :, None, None], sin_BTH[:, :, None, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return turned.reshape(x_BTNH.shape)


def causal_mask(query_positions_BT: Array, key_positions_S: Array, window: int | None) -> Array:
    """True where a query may look, [B, T, S]: not ahead, and not further back than the window, itself included."""
    ahead = query_positions_BT[:, :, None] - key_positions_S[None, None, :]
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def attention(q_BTKGH: Array, k_BKSH: Array, v_BKSH: Array, mask_BTS: Array) -> Array:
    """Grouped-query attention, [B, T, K, G, H]: scores in the model's dtype, softmax in float32, cast back."""
    with jax.named_scope("scores"):
        scores_BKGTS = contract("scores", q_BTKGH, k_BKSH) * q_BTKGH.shape[-1] ** -0.5
    with jax.named_scope("softmax"):
        wide = jnp.where(mask_BTS[:, None, None], scores_BKGTS.astype(jnp.float32), -jnp.inf)
        probs_BKGTS = jax.nn.softmax(wide, axis=-1).astype(q_BTKGH.dtype)
    with jax.named_scope("values"):
        return contract("values", probs_BKGTS, v_BKSH)


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up from [..., 2, F]; the activation is on the gate branch."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
