"""One hop: a tensor as a frame, the calling and the called side. Never: where to, which the machine
says.
"""
