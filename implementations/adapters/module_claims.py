"""What `from_module` claims of a class, by default and as declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.adapters.mask_forms import MaskFormat
from mha.implementations.adapters.reading import limits
from mha.implementations.adapters.signature import Signature
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims

# The forms of masks that are claimed by default.
MASK_FORMS_OF = {"keep": {"bool"}, "drop": {"bool"}, "additive": {"bool", "float"}}


def module_claims(
    label: str, claims: Claims | None, masks: MaskFormat, signature: Signature | None
) -> Claims:
    """Return the claims, or by default what masks, and calls by name, can express."""
    convention = masks.convention
    if claims is None:
        if convention is None:
            claims = Claims(masks=(), causal=None)
        else:
            claims = Claims(masks=MASK_FORMS_OF[convention])
        if signature is not None:
            claims = replace(claims, **limits(signature, masks, claims))
        return claims
    for claim in ("value_width", "lse"):
        if getattr(claims, claim):
            raise ImplementationError(
                f"{label}: claims {claim}, which only a kernel can, adapted by from_kernel"
            )
    if convention is None and claims.masks:
        raise ImplementationError(
            f"{label}: mask=None declares that it takes no mask, but claims.masks is"
            f" {sorted(claims.masks)}; claim masks=() or declare the convention"
        )
    return claims


def require_head_dim(label: str, claims: Claims, arguments: Mapping[str, str]) -> None:
    """Raise ImplementationError for claimed widths of heads that the constructor does not take."""
    if claims.own_head_dim and not {"head_dim", "config"} & set(arguments.values()):
        raise ImplementationError(
            f"{label}: claims own_head_dim, but none of the parameters of its constructor has a"
            f" known name of head_dim ({', '.join(CONSTRUCTOR_NAMES['head_dim'])})"
        )
