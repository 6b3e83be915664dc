"""Adapters for what others publish: transformers, timm, x-transformers, keras, and the backends of torch itself."""
