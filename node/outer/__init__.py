"""Everything between cells: their leaders find the group of a window, and the stages average with
the stages of other cells.

Enters: postings and offers of other leaders, plans that name a window.
Leaves: groups for the leader, the next parameters of a stage.
Never: the inside of a cell.
"""
