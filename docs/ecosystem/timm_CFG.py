# timm 1.0.31: CFG-2 a bare AssertionError without the sizes; CFG-3 a negative num_heads is accepted.
from timm.layers import Attention

for arguments in ({"dim": 10, "num_heads": 3}, {"dim": 8, "num_heads": -2}):
    try:
        print(arguments, "built, head_dim", Attention(**arguments).head_dim)
    except Exception as error:
        print(arguments, type(error).__name__, error)
