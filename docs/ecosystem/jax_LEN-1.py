# jax 0.10.2, implementation="xla": a NaN in a value past an item's length reaches every output, as 0 * NaN. Buffers that are
# allocated but not written, as of a cache, may hold one.
import jax
import jax.numpy as jnp

x = jnp.ones((1, 2, 1, 4))
value = jnp.array([1.0, jnp.nan])[None, :, None, None] * x
lengths = jnp.array([1], jnp.int32)
print(jax.nn.dot_product_attention(x, x, value, key_value_seq_lengths=lengths)[0, :, 0])
