"""Tools for people: each looks at a mod or the machine and returns plain data."""

from attnloom.tools.checking import Check, check_mod
from attnloom.tools.diagnosis import Diagnosis, doctor
from attnloom.tools.explanation import Explanation, explain

__all__ = ["Check", "Diagnosis", "Explanation", "check_mod", "doctor", "explain"]
