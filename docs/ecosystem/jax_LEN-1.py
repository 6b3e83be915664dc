# jax 0.10.2, implementation="xla": a NaN in a value past an item's length reaches every output, as 0 * NaN; and an item without
# keys gets the mean of all values, though all are past its length. Buffers that are allocated but not written may hold anything.
import jax
import jax.numpy as jnp

x = jnp.ones((1, 2, 1, 4))
value = jnp.array([1.0, jnp.nan])[None, :, None, None] * x
for length in (1, 0):
    lengths = jnp.array([length], jnp.int32)
    output = jax.nn.dot_product_attention(x, x, value, key_value_seq_lengths=lengths)
    print(length, "keys:", output[0, :, 0].tolist())
    value = jnp.array([1.0, 9.0])[None, :, None, None] * x
