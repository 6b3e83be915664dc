# jax 0.10.2, dot_product_attention compiled for the CPU: one item of one head in bfloat16, with one query and one key or with
# one of these and d_k = 1, raises: Algorithm not supported by the ElementalIrEmitter: ALG_DOT_BF16_BF16_F32
import jax
import jax.numpy as jnp

one, three = (jnp.ones((1, n, 1, 8), jnp.bfloat16) for n in (1, 3))
print(jax.nn.dot_product_attention(one, one, one).shape, "not compiled")
attend = jax.jit(jax.nn.dot_product_attention)
print(attend(one, three, three).shape, "compiled, three keys")
try:
    attend(one, one, one)
except jax.errors.JaxRuntimeError as error:
    print("compiled, one key:", error)
