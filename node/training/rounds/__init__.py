"""Rounds of averaging at one member: inside a cell every epoch, between cells now and then.
Never: when there is one (that is in the plan).
"""
