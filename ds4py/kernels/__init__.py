"""Kernels on packed weights and on what lies between products, one folder per kind of device.

Owns: memory layouts that a device's kernels want. Refuses to know: layers, files. Invariant: a
kernel's weights equal the decoder's values within the bound that its module states.
"""
