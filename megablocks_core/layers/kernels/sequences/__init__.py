"""Triton kernels of sequences: the SSD scan, the causal convolution and the gated RMS norm.

Their plain twins are what ``layers.ssm`` runs elsewhere. Modules here load Triton: import them
where ``triton_serves`` says yes.
"""
