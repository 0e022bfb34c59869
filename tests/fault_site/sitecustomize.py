"""Plants faults in the source of modules as they are imported, in every process of a command.

A fault is a small change of one expression. It is in force while its name is the content of the
file that DOMINO_TEST_FAULT_FILE names, or the value of DOMINO_TEST_FAULT: so one running server can
be given one fault after another.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from planted import PLANTED


def planted_fault(name):
    """Whether a fault is in force now."""
    file = os.environ.get("DOMINO_TEST_FAULT_FILE")
    if file:
        return Path(file).read_text().strip() == name
    return os.environ.get("DOMINO_TEST_FAULT") == name


class Planter(importlib.machinery.SourceFileLoader):
    """Compiles a module from its changed source; nothing is cached on disk."""

    def get_code(self, fullname):
        source = self.get_source(fullname)
        for edit in PLANTED:
            if edit.module == fullname:
                source = edit.apply(source)
        return compile(source, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Takes over the modules that a fault is planted in."""

    def find_spec(self, fullname, path, target=None):
        if not any(edit.module == fullname for edit in PLANTED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Planter(fullname, spec.origin)
        return spec


if os.environ.get("DOMINO_TEST_FAULT") or os.environ.get("DOMINO_TEST_FAULT_FILE"):
    sys.planted_fault = planted_fault
    sys.meta_path.insert(0, Finder())
