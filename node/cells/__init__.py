"""Between cells: how the leaders of cells find the group that averages in a window.
Enters: who posted the same key, offers of other leaders.
Never: tensors, what happens inside a cell.
"""
