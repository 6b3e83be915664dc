"""litgpt: with capped attention scores, as in Gemma 2, decoding with a cache masks nothing.

`GPT` masks with True and False while it decodes, and the branch that caps the scores adds the mask
to them: allowed keys gain 1 there, and later tokens are seen. Without a cache, or without a cap,
they are not.
"""

import torch
from litgpt import GPT, Config

torch.manual_seed(0)
tokens = torch.randint(50, (1, 6))
others = tokens.clone()
others[:, -1] += 1


def changes_at_the_first_token(softcapping, *, cached):
    """Return how far another last token changes what the model says after the first one."""
    config = Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        block_size=16,
        padded_vocab_size=64,
        attention_logit_softcapping=softcapping,
    )
    torch.manual_seed(1)
    model, positions = GPT(config).eval(), None
    if cached:
        model.set_kv_cache(batch_size=1)
        positions = torch.arange(6)
    with torch.no_grad():
        first, second = (model(x, positions)[:, 0] for x in (tokens, others))
    return (first - second).abs().max().item()


for softcapping in (None, 50.0):
    for cached in (False, True):
        change = changes_at_the_first_token(softcapping, cached=cached)
        print(f"attention_logit_softcapping={softcapping}, cache={cached}: {change:.2g}")
change = changes_at_the_first_token(50.0, cached=True)
assert change == 0, f"the last token changes the logits of the first one by {change:.2g}"
