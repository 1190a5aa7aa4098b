"""The choice of the kernels that compute the layers and the loss of a stage, by measurement.
Enters: a stage, the operator's setting.
Leaves: a stage that computes by the fastest kernels that agree with torch's own.
Never: a network, the optimizer's products.
"""
