"""Kernels for the CPU, written as LLVM IR and compiled when first used."""
