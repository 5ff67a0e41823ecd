"""A discrete-event model of one server: its queue, GPU, link, disks and tiers. No torch, no sglang.

It drives the server's own tree, host tier and policies; what it replaces is time and bytes.
"""
