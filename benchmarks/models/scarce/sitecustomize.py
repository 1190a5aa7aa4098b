"""Makes a daemon's device run out of memory once, in the function that SCARCE names. Python loads
this file by itself where its folder is on the path."""

import os

if where := os.environ.get("SCARCE", ""):
    import torch

    from node.optim.steps import PartSteps
    from node.pipeline.visit_buffers import StageMath

    AFTER = 30
    """Calls that go well before."""
    TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB"
    called = 0

    def scarce(kind, method):
        """The method, which fails at one call where it is of the kind that is named."""

        def tried(*args, **more):
            global called
            called += kind == where
            if kind == where and called == AFTER:
                raise torch.OutOfMemoryError(TOLD)
            return method(*args, **more)

        return tried

    StageMath._forward = scarce("forward", StageMath._forward)
    StageMath._backward = scarce("backward", StageMath._backward)
    StageMath._loss = scarce("loss", StageMath._loss)
    PartSteps.step = scarce("step", PartSteps.step)
