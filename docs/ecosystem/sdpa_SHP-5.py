# torch 2.13, CPU: the flash operator ends the process by SIGFPE, a division by zero, without a head or a query, as in issue 141219,
# which is closed; F.scaled_dot_product_attention does not call it with those.
import subprocess
import sys

for name, sizes in (
    ("no item", (0, 1, 2, 8)),
    ("no head", (1, 0, 2, 8)),
    ("no query", (1, 1, 0, 8)),
):
    program = f"""
import torch
q = torch.zeros{sizes}
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False)
"""
    print(name, "- exit status", subprocess.run([sys.executable, "-c", program]).returncode)
