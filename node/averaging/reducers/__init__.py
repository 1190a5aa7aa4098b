"""What becomes of contributions: their weights, who is left out, by which rule they become one."""
