# mlx 0.32.4, CPU: a row without an allowed key is the mean of all values for a boolean mask, and NaN for a float mask of
# -infinity; with the lowest number of the dtype in its place it is the mean, too.
import mlx.core as mx

x = mx.ones((1, 1, 2, 4))
value = mx.arange(8.0).reshape(1, 1, 2, 4)
allowed = mx.array([[True, True], [False, False]])
for name, mask in (
    ("boolean", allowed),
    ("-infinity", mx.where(allowed, 0.0, float("-inf"))),
    ("lowest number", mx.where(allowed, 0.0, mx.finfo(mx.float32).min)),
):
    output = mx.fast.scaled_dot_product_attention(x, x, value, scale=0.5, mask=mask)
    print(name, "gives the empty row", output[0, 0, 1].tolist())
