"""`ladder doctor`: checks of this machine and installation."""
