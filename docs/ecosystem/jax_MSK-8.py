# jax 0.10.2: a row without an allowed key is the mean of all values with `mask`, and NaN with a `bias` of -infinity. The
# residual of such a row is -2.4e38, whose exponential is 0 and whose sum with another one is right; it is not -infinity.
import jax
import jax.numpy as jnp

x = jnp.ones((1, 2, 1, 4))
value = jnp.arange(8.0).reshape(1, 2, 1, 4)
allowed = jnp.array([[True, True], [False, False]])[None, None]
bias = jnp.where(allowed, 0.0, -jnp.inf)
for name, options in (("mask", {"mask": allowed}), ("bias", {"bias": bias})):
    output, residual = jax.nn.dot_product_attention(x, x, value, return_residual=True, **options)
    print(name, "gives the empty row", output[0, 1, 0], "and the residual", residual[0, 1, 0])
