"""Imports the package before pytest does: ``ng.pullback`` is a function, and shares its name with the subpackage.

pytest imports the modules that it collects one by one, and sets each as an attribute of its parent. It does not touch
what is imported already.
"""

import natgrad as natgrad
