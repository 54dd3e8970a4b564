"""Compression methods, one file each: pure functions of tensors. Imports kernels and core alone."""
