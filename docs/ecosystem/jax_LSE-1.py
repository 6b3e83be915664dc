# jax 0.10.2: the residual has the dtype of the key, and is rounded to it. In bfloat16 a residual of 100 is off by up to 0.25,
# so that a part of the keys gets up to 28 % more or less than its share where parts are merged by residuals.
import jax
import jax.numpy as jnp

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (1, 512, 1, 64), jnp.bfloat16) for key in keys)
q = q * 16
halves = [slice(0, 256), slice(256, 512)]


def merged(q, k, v):
    attend = jax.nn.dot_product_attention
    parts = [attend(q, k[:, part], v[:, part], return_residual=True) for part in halves]
    sums = jnp.stack([residual for _, residual in parts]).astype(jnp.float32)
    shares = jax.nn.softmax(sums, 0)[..., None]
    return parts[0][1].dtype, shares[0] * parts[0][0] + shares[1] * parts[1][0]


whole = jax.nn.dot_product_attention(q, k, v).astype(jnp.float32)
for dtype in (jnp.bfloat16, jnp.float32):
    of_residual, output = merged(*(x.astype(dtype) for x in (q, k, v)))
    error = jnp.abs(output - whole).max()
    print("residual in", of_residual, "- largest error of the merge:", error)
