# jax 0.10.2: a row without an allowed key is the mean of all values with `mask`. With a `bias` of -infinity it is NaN or, beside
# is_causal=True, the mean of the values after it: what the flag hides gets the score of 0.7 times the lowest number, and wins.
# The residual of such a row is that number; it is not -infinity.
import jax
import jax.numpy as jnp

x = jnp.ones((1, 3, 1, 4))
value = jnp.arange(12.0).reshape(1, 3, 1, 4)
allowed = (
    jnp.ones((1, 1, 3, 3), bool).at[..., 0, 0].set(False)
)  # the first key, from the first query
lowest = jnp.finfo(jnp.float32).min
for name, options in (
    ("mask", {"mask": allowed}),
    ("bias of -infinity", {"bias": jnp.where(allowed, 0.0, -jnp.inf)}),
    ("bias of the lowest number", {"bias": jnp.where(allowed, 0.0, lowest)}),
):
    options |= {"is_causal": True, "return_residual": True}
    output, residual = jax.nn.dot_product_attention(x, x, value, **options)
    print(name, "- the first row is", output[0, 0, 0], "and its residual", residual[0, 0, 0])
