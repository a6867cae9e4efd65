"""Triton FP8 kernels, what any correct kernel of their kinds may return, and the machinery that compares the two.

Nothing is imported here: the kernels need triton, the contracts need torch, `outcome` needs neither.
"""
