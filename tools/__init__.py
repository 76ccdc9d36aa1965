"""Tools of the project itself; none of them is in the wheel."""
