"""Genuine SGLang on a machine without GPU: its launcher, what it needs in place of GPU packages, its environment."""
