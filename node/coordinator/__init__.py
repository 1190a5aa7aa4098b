"""The driver of one peer: messages, timers and signatures around the pure machines of consensus and
epoch, and recordings of these machines.

Enters: messages, time, the end of work.
Leaves: messages, work for the stage.
Never: tensor mathematics.
"""
