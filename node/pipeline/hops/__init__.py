"""One hop: a tensor as a frame, the calling and the called side. Never: the choice of the next
peer; that is the machine's.
"""
